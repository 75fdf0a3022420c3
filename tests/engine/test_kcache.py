# SPDX-License-Identifier: Apache-2.0
"""K on the device, V in host memory: the bits of `full` where all keys count, else the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.oracles import check_log_probabilities
from tests.engine.paper import HuggingFaceModel
from tests.engine.support import EnginePool, Job, Models, Outcome, Start, greedy, random_prompts

LAYERS, KV_HEADS, HEADS, HEAD_SIZE = 8, 4, 8, 32  # of `random_model`
PLENTY = 4096  # more keys than any sequence here has
# Long prompts come in chunks, mixed with others' decode steps; always the same ones, bit for bit.
SETTINGS: dict[str, Any] = {
    "enable_prefix_caching": False,
    "dtype": "float32",
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
}
KCACHE = {"kv_policy": "kcache", "kv_policy_args": {"top_n": 24}, **SETTINGS}


def _jobs(tokens: int, **extra_args: Any) -> list[Job]:
    """Lengths around the boundaries of both block sizes; some meet requests that decode."""
    lengths = [1, 15, 16, 17, 31, 33, 64, 257, 512, 700]
    prompts = random_prompts(lengths, seed=5, vocab_size=2048)
    return [
        Job(prompt, greedy(tokens, logprobs=2, **extra_args), arrival=index // 2)
        for index, prompt in enumerate(prompts)
    ]


class TopNModel(HuggingFaceModel):
    """Transformers' model; rows from `prompt_len` on take V of their `top_n` best keys."""

    top_n = 0
    device_layers = 0
    renormalize = True

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        k, v = (x[0].repeat_interleave(group, dim=0) for x in (key, value))
        rows = []
        for position in range(query.shape[2]):
            seen = slice(0, position + 1)
            weights = ((k[:, seen] @ query[0, :, position, :, None])[..., 0] * scale).softmax(-1)
            if position >= self._prompt_len and layer >= self.device_layers:
                small = weights.argsort(dim=-1, descending=True, stable=True)[:, self.top_n :]
                weights = weights.scatter(-1, small, 0.0)
                if self.renormalize:
                    weights = weights / weights.sum(dim=-1, keepdim=True)
            rows.append((weights[:, None] @ v[:, seen])[:, 0])
        return torch.stack(rows)[None]


def _assert_tokens_of(model: TopNModel, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        prompt, generated = outcome.job.prompt, outcome.token_ids
        logprobs = model.forward(prompt + generated[:-1], len(prompt))[len(prompt) - 1 :]
        check_log_probabilities(logprobs, outcome, 2e-4)


def test_few_keys_give_the_tokens_of_an_independent_implementation(demo, random_model) -> None:
    model = TopNModel(str(random_model))
    engine = demo(**KCACHE)
    model.device_layers, model.top_n = 1, 24
    jobs = [job for job in _jobs(16) if len(job.prompt) in (15, 33, 257)]
    _assert_tokens_of(model, engine.run(jobs))
    model.top_n = 5
    jobs = [job for job in _jobs(16, kv_top_n=5) if len(job.prompt) in (17, 257)]
    _assert_tokens_of(model, engine.run(jobs))


def test_no_layer_on_the_device_and_the_papers_weights(demo: Start, random_model: Path) -> None:
    model = TopNModel(str(random_model))
    model.top_n, model.device_layers, model.renormalize = 9, 0, False
    args = {"top_n": 9, "device_layers": 0, "renormalize": False}
    engine = demo(kv_policy="kcache", kv_policy_args=args, **SETTINGS)
    assert engine.coordinator.layer_blocks.block_sizes.tolist() == [32] * LAYERS
    jobs = [job for job in _jobs(12) if len(job.prompt) in (16, 64, 257)]
    outcomes = engine.run(jobs)
    _assert_tokens_of(model, outcomes)
    for outcome in outcomes:
        n = len(outcome.job.prompt)
        assert outcome.report["blocks_before"] == -(-n // 16) * LAYERS
        assert outcome.report["blocks_after"] == -(-n // 32) * LAYERS
    engine.check_whole()


def test_bytes_moved_are_reported(demo: Start) -> None:
    engine = demo(**KCACHE)
    (outcome,) = engine.run([Job(random_prompts([600], vocab_size=2048)[0], greedy(11))])
    row = HEAD_SIZE * 4  # float32
    report = outcome.report
    # The last token is never an input.
    assert report["v_bytes_written"] == 610 * KV_HEADS * row * (LAYERS - 1)
    assert report["v_bytes_read_per_token"] == 24 * HEADS * row * (LAYERS - 1)
    prompt = sum(end * KV_HEADS for end in (256, 512, 600)) * row * (LAYERS - 1)
    assert report["v_bytes_read"] == prompt + 10 * report["v_bytes_read_per_token"]
    totals = engine.scheduler.pyramid.reports.policy_stats()
    assert totals["v_bytes_written"] >= report["v_bytes_written"]


# Eviction, with the survivors' V in host memory ---------------------------------------------------


@pytest.mark.parametrize("fill_blocks", [False, True])
def test_survivors_v_in_host_memory(demo: Start, fill_blocks: bool) -> None:
    """Exactly the tokens of the policy without it, where every survivor counts."""
    args: dict[str, Any] = {"fill_blocks": fill_blocks}
    common = {**SETTINGS, "kv_policy": "pyramidkv", "kv_budget": 100}
    plain = demo(**common, kv_policy_args=args, block_size=32)
    expected = plain.run(_jobs(20))
    args |= {"values": {"kind": "host", "device_layers": 2, "top_n": PLENTY}}
    engine = demo(**common, kv_policy_args=args)
    outcomes = engine.run(_jobs(20))
    engine.check_whole()
    for ours, theirs in zip(outcomes, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs  # floats, bit for bit
        assert ours.report["kept_tokens"] == theirs.report["kept_tokens"]
        assert ours.report["evicted_tokens"] == theirs.report["evicted_tokens"]
    long = outcomes[-1].report
    assert long["evicted_tokens"] > 0 and long["blocks_after"] < 0.25 * long["blocks_before"]
    # And few keys of the survivors are another thing.
    few = engine.run(_jobs(20, kv_top_n=6))
    assert few[-1].logprobs[0] == outcomes[-1].logprobs[0]
    assert few[-1].logprobs != outcomes[-1].logprobs
    assert few[-1].report["v_bytes_read_per_token"] == 6 * HEADS * HEAD_SIZE * 4 * (LAYERS - 2)


# Memory -------------------------------------------------------------------------------------------


def test_a_small_host_pool_makes_requests_wait(tiny: Start) -> None:
    """The device's pool is as small as the host's: nothing fails, nothing else runs out."""
    page = 16 * 2 * 4 * 32 * 4
    longest = 24 + 3 * 12  # pages of 384 tokens, of 4 layers
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 384,
        "kv_cache_memory_bytes": 64 << 20,
    }
    jobs = [Job(prompt, greedy(20)) for prompt in random_prompts([350] * 6)]
    roomy = tiny("llama-mha", kv_policy="kcache", **settings)
    assert roomy.pool.num_gpu_blocks == (64 << 20) // page
    expected = [outcome.token_ids for outcome in roomy.run(jobs)]
    space = (2 * longest + 1) * page / 2**30
    engine = tiny("llama-mha", kv_policy="kcache", kv_swap_space=space, **settings)
    assert engine.usable_blocks == 2 * longest
    waited = []
    outcomes = engine.run(jobs, lambda engine: waited.append(len(engine.scheduler.waiting)))
    engine.check_whole()
    assert max(waited) >= 4
    assert [outcome.token_ids for outcome in outcomes] == expected


@pytest.mark.parametrize(
    ("space", "blocks", "message"),
    [
        (60 / 2**16, None, r"holds 60 pages of V of 16384 bytes.*384 tokens needs 61"),
        (61 / 2**16, 100, r"--num-gpu-blocks-override sets their number"),
    ],
)
def test_a_host_pool_that_cannot_work_is_refused(
    tiny_model: Models, engines: EnginePool, space: float, blocks: int | None, message: str
) -> None:
    from tests.engine.support import start_engine

    engines.close()
    settings = {} if blocks is None else {"num_gpu_blocks_override": blocks}
    with pytest.raises(ValueError, match=message):
        start_engine(
            str(tiny_model("llama-mha")),
            kv_policy="kcache",
            kv_swap_space=space,
            dtype="float32",
            max_model_len=384,
            **settings,
        )
