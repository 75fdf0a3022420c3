# SPDX-License-Identifier: Apache-2.0
"""KV heads with lengths of their own: the bits of `full` where all keep everything, and masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.paper import HuggingFaceModel
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    count_preemptions,
    greedy,
    random_prompts,
)
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.heads.scores import HeadScores

pytestmark = pytest.mark.engine

LAYERS, HEADS, LANE_BLOCK = 8, 4, 64  # of `random_model`, with blocks of 16 tokens
SINKS, RECENT = 16, 40
MAX_TOKENS = 12
# Prompts come in chunks, mixed with decode steps of others.
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "dtype": "float32",
    "block_size": 16,
}
# From one token over edges of blocks and chunks to several chunks.
LENGTHS = [1, 56, 57, 64, 65, 257, 512, 700]
MASK = np.random.default_rng(5).random((LAYERS, HEADS)).tolist()
ARGS = {"mask": MASK, "heads.sinks": SINKS, "heads.recent": RECENT, "share": 0.5}


def engine_of(engines: EnginePool, model: Path) -> Engine:
    return engines.get(
        model, kv_policy="duoattention", kv_policy_args=ARGS, kv_min_tokens=None, **SETTINGS
    )


def jobs(**extra_args: Any) -> list[Job]:
    prompts = random_prompts(LENGTHS, seed=7, vocab_size=2048)
    params = greedy(MAX_TOKENS, logprobs=3, **extra_args)
    return [Job(prompt, params, arrival=index) for index, prompt in enumerate(prompts)]


def test_heads_that_keep_everything_give_the_bits_of_full(
    engines: EnginePool, random_model: Path
) -> None:
    full = engines.get(random_model, kv_policy="full", **SETTINGS).run(jobs())
    engine = engine_of(engines, random_model)
    assert (engine.block_size, engine.num_layers) == (LANE_BLOCK, LAYERS * HEADS)
    engine.shuffle_blocks()
    for ours, reference in zip(engine.run(jobs(kv_policy="full")), full, strict=True):
        assert ours.token_ids == reference.token_ids
        assert ours.logprobs == reference.logprobs  # floats, bit for bit
        assert ours.report["evicted_tokens"] == 0
    engine.check_whole()


def kept_positions(prompt_len: int, whole: np.ndarray) -> list[torch.Tensor]:
    """What each head keeps of a prompt, `[layers]` `[G, prompt_len]`, some positions repeated."""
    freed = max(prompt_len - SINKS - RECENT, 0) // LANE_BLOCK * LANE_BLOCK
    everything = torch.arange(prompt_len)
    recent = everything[everything >= SINKS + freed]  # more of them fill the block
    streaming = torch.cat([everything[:SINKS], recent])
    streaming = torch.cat([streaming, streaming[-1:].expand(prompt_len - len(streaming))])
    return [
        torch.stack([everything if keeps else streaming for keeps in of_layer])
        for of_layer in whole.tolist()
    ]


def test_each_head_keeps_what_the_mask_says(engines: EnginePool, random_model: Path) -> None:
    """By the tokens and log probabilities of a model whose attention sees that alone."""
    engine, model = engine_of(engines, random_model), HuggingFaceModel(str(random_model))
    scores = np.array(MASK).ravel()
    whole = np.zeros(LAYERS * HEADS, bool)
    whole[np.argsort(-scores)[: LAYERS * HEADS // 2]] = True
    engine.shuffle_blocks(1)
    outcomes = engine.run(jobs())
    for outcome in outcomes:
        prompt, report = outcome.job.prompt, outcome.report
        n = len(prompt)
        freed = max(n - SINKS - RECENT, 0) // LANE_BLOCK
        held = np.where(whole, n, n - freed * LANE_BLOCK)
        assert report["kept_tokens"] == held.tolist() and report["kv_heads"] == HEADS
        of_all = LAYERS * HEADS * -(-n // LANE_BLOCK)
        assert report["blocks_before"] == of_all
        assert report["blocks_after"] == of_all - LAYERS * HEADS // 2 * freed
        kept = kept_positions(n, whole.reshape(LAYERS, HEADS))
        tokens = [*prompt, *outcome.token_ids]
        expected = model.forward(tokens[:-1], n, kept)[n - 1 :]
        assert outcome.token_ids == expected.argmax(dim=-1).tolist(), n
        for row, (token, ours) in enumerate(zip(outcome.token_ids, outcome.logprobs, strict=True)):
            assert ours[token] == pytest.approx(float(expected[row, token]), abs=2e-4)
        if freed:  # the mask counts: another gives other numbers
            other = kept_positions(n, ~whole.reshape(LAYERS, HEADS))
            wrong = model.forward(tokens[:-1], n, other)[n - 1 :]
            assert float((wrong[1:] - expected[1:]).abs().max()) > 1e-2
    engine.check_whole()


def test_what_the_probe_writes_is_served(
    engines: EnginePool, random_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "heads"
    argv = ["calibrate", "--heads", "--model", str(random_model), "-o", str(folder)]
    assert main([*argv, "--sinks", str(SINKS), "--recent", str(RECENT)]) == 0
    engine = engines.get(
        random_model,
        kv_policy="duoattention",
        kv_policy_args={"mask": str(folder), "share": 0.25},
        kv_min_tokens=None,
        **SETTINGS,
    )
    whole = HeadScores.read(folder).mask(0.25).flatten().numpy()
    prompt = random_prompts([700], seed=3, vocab_size=2048)[0]
    (outcome,) = engine.run([Job(prompt, greedy(2))])
    freed = (700 - SINKS - RECENT) // LANE_BLOCK * LANE_BLOCK
    assert outcome.report["kept_tokens"] == np.where(whole, 700, 700 - freed).tolist()
    assert whole.sum() == LAYERS * HEADS // 4
    engine.check_whole()


def test_blocks_of_streaming_heads_serve_other_requests(
    engines: EnginePool, random_model: Path
) -> None:
    """In a pool of 1.5 whole prompts two run at once; a third preempts, and nothing changes."""
    prompts = random_prompts([700, 690, 680], seed=9, vocab_size=2048)
    params = greedy(40, logprobs=3)
    alone = [engine_of(engines, random_model).run([Job(prompt, params)])[0] for prompt in prompts]
    small = engines.get(
        random_model,
        kv_policy="duoattention",
        kv_policy_args=ARGS,
        kv_min_tokens=None,
        num_gpu_blocks_override=1 + LAYERS * HEADS * 11 * 3 // 2 + LAYERS * HEADS,
        kv_admission="prompt",
        **SETTINGS,
    )
    most = []

    def count(engine: Engine) -> None:
        most.append(len(engine.scheduler.running))

    with count_preemptions(small):
        together = small.run([Job(prompt, params) for prompt in prompts], count)
    assert max(most) >= 2
    for ours, reference in zip(together, alone, strict=True):
        assert ours.token_ids == reference.token_ids
        assert ours.report == reference.report
    small.check_whole()
