# SPDX-License-Identifier: Apache-2.0
"""Tokens leave the forward pass (PyramidInfer): against `thinned_paper.py`, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support import (
    Engine,
    Job,
    Models,
    Outcome,
    Start,
    count_preemptions,
    greedy,
    kept_at_evictions,
    random_prompts,
)
from tests.engine.thinned_paper import Run, Settings, ThinnedModel
from tests.scheduler.checks import check_pool
from vllm_pyramid.methods.thinning.kernels import cpu

BLOCK = 16
PIECE = 128
MAX_TOKENS = 10
# Sharper than the paper's, so that models of a few layers lose most of their context.
ARGS: dict[str, Any] = {
    "decay_ratio": 0.5,
    "interval": 2,
    "min_context": 24,
    "recent_ratio": 0.25,
    "piece_tokens": PIECE,
}
ENGINE: dict[str, Any] = {
    "kv_policy": "pyramidinfer",
    "dtype": "float32",
    "max_num_batched_tokens": 160,
    "max_model_len": 1024,
}
# Around pieces (128, 256), blocks and the floor; several pieces, with short last ones.
LENGTHS = [130, 57, 401, 256, 333, 97, 129, 5]


def _settings(args: dict[str, Any], fill_blocks: bool = True) -> Settings:
    chosen = {key: value for key, value in args.items() if key in Settings.__annotations__}
    linear = args.get("decay_curve") == "linear"
    return Settings(**chosen, linear=linear, unit=BLOCK if fill_blocks else 1)


def _check_answer(outcome: Outcome, run: Run) -> None:
    assert outcome.token_ids == run.tokens
    for ours, token, right_one in zip(outcome.logprobs, run.tokens, run.logprobs, strict=True):
        assert ours[token] == pytest.approx(right_one, abs=5e-4)


def _check(
    model: ThinnedModel, settings: Settings, outcome: Outcome, folder: Path, num_layers: int
) -> int:
    """Lengths, kept positions, tokens and their log probabilities; positions decided by ties."""
    n = len(outcome.job.prompt)
    ((point, kept),) = kept_at_evictions(folder, outcome).items()
    assert point == n
    for heads in kept:
        assert (heads == heads[0]).all(), "one set for all heads"
    right = [0] * num_layers
    for start in range(0, n, settings.piece_tokens):
        of_piece = settings.kept(min(settings.piece_tokens, n - start), num_layers)
        right = [a + b for a, b in zip(right, of_piece, strict=True)]
    held = [heads.shape[1] for heads in kept]
    assert held == right == outcome.report["kept_tokens"]
    run = model.generate(
        outcome.job.prompt, len(outcome.token_ids), settings, [heads[0] for heads in kept]
    )
    assert [heads[0].tolist() for heads in kept] == run.kept
    _check_answer(outcome, run)
    return run.ties


def _check_generated(
    model: ThinnedModel, settings: Settings, outcome: Outcome, folder: Path
) -> dict[int, list[list[int]]]:
    """All evictions of a request, step by step, and what was generated over what they left."""
    n, found = len(outcome.job.prompt), {}
    for point, layers in kept_at_evictions(folder, outcome).items():
        assert all((rows == rows[0]).all() for rows in layers), "one set for all heads"
        found[point] = [rows[0].tolist() for rows in layers]
    prompt = [torch.tensor(positions) for positions in found.pop(n)]
    run = model.generate(outcome.job.prompt, len(outcome.token_ids), settings, prompt)
    # The last token is sampled and not computed.
    run.thinned.pop(n + len(outcome.token_ids), None)
    assert run.kept == [positions.tolist() for positions in prompt]
    assert found == run.thinned, f"closest scores {run.closest}"
    _check_answer(outcome, run)
    return run.thinned


def test_what_is_generated_is_thinned(engines, tiny_model, tmp_path) -> None:
    """Every eviction of long answers in mixed batches, with preemptions, beside a full request."""
    path = tiny_model("llama-mha")
    generated = {"gen_window": 32, "gen_interval": 16, "gen_compress_ratio": 0.8}
    engine = engines.get(
        path,
        kv_policy_args={**ARGS, "schedule": "thin_generated", **generated},
        kv_trace=str(tmp_path),
        kv_admission="prompt",
        num_gpu_blocks_override=4 * 56 + 1,
        **{**ENGINE, "max_model_len": 640},
    )
    engine.shuffle_blocks()
    prompts = random_prompts([300, 57, 401, 128, 201], seed=5)
    jobs = [
        Job(
            prompt,
            greedy(170, logprobs=1, **({"kv_policy": "full"} if i == 3 else {})),
            arrival=4 * i,
        )
        for i, prompt in enumerate(prompts)
    ]
    mixed = 0

    def look(engine: Engine) -> None:
        nonlocal mixed
        check_pool(engine.coordinator)
        states = {request.num_output_tokens > 0 for request in engine.scheduler.running}
        mixed += len(states) == 2

    with count_preemptions(engine) as preemptions:
        outcomes = engine.run(jobs, look)
    engine.check_whole()
    assert preemptions["evicted"] > 0, preemptions
    model = ThinnedModel(str(path))
    settings = replace(_settings(ARGS), **generated)
    for i, outcome in enumerate(outcomes):
        n = len(outcome.job.prompt)
        if i == 3:
            assert outcome.report["evicted_tokens"] == 0
            assert outcome.token_ids == model.generate(outcome.job.prompt, 170, None).tokens
            continue
        thinned = _check_generated(model, settings, outcome, tmp_path)
        assert list(thinned) == list(range(n + 16, n + 170, 16))
        last = [len(positions) for positions in thinned[n + 160]]
        assert outcome.report["computed_tokens"] == n + 160
        assert outcome.report["kept_tokens"] == last
        # 128 tokens have left the window; the top layer keeps 0.8 * 0.232 of them.
        kept = [sum(p >= n for p in positions) for positions in thinned[n + 160]]
        assert [count - 32 for count in kept] == [112, 96, 64, 32]
        assert outcome.report["blocks_after"] < sum(-(-count // BLOCK) + 1 for count in last)


def _jobs(vocab_size: int, *, staggered: bool) -> list[Job]:
    """Staggered prompts meet others that decode."""
    prompts = random_prompts(LENGTHS, seed=11, vocab_size=vocab_size)
    return [
        Job(prompt, greedy(MAX_TOKENS, logprobs=1), arrival=2 * i if staggered else 0)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("name", "args", "fill_blocks"),
    [
        ("llama-mha", ARGS, True),
        ("mistral", {**ARGS, "decay_curve": "linear", "interval": 1, "piece_tokens": 100}, False),
        ("qwen2", {**ARGS, "distance_weight": 3.0}, True),
        ("qwen3", {**ARGS, "interval": 3, "sinks": 0, "recent_ratio": 0.4}, False),
    ],
)
def test_models(engines, tiny_model, tmp_path, monkeypatch, name, args, fill_blocks) -> None:
    """Mixed batches, prompts of up to five pieces, physical blocks in random order."""
    score, calls = cpu.recent_mass, []

    def watched(*inputs: Any, **options: Any) -> torch.Tensor:
        calls.append(options["log_sum_exp"])
        return score(*inputs, **options)

    monkeypatch.setattr(cpu, "recent_mass", watched)
    path = tiny_model(name)
    engine = engines.get(
        path, kv_policy_args={**args, "fill_blocks": fill_blocks}, kv_trace=str(tmp_path), **ENGINE
    )
    engine.shuffle_blocks()
    model = ThinnedModel(str(path))
    ties = 0
    for staggered in (False, True):
        for outcome in engine.run(_jobs(512, staggered=staggered)):
            assert outcome.report["evicted_tokens"] > 0 or len(outcome.job.prompt) < 90
            settings = _settings(args, fill_blocks)
            ties += _check(model, settings, outcome, tmp_path, engine.num_layers)
    assert calls and all(lse is not None for lse in calls)
    assert ties <= 4
    engine.check_whole()


def _inner_model(engine: Engine) -> Any:
    return engine.core.model_executor.driver_worker.worker.model_runner.get_model().model


def test_deeper_layers_compute_less_and_memory_halves(tiny: Start) -> None:
    """32 layers: rows that reach each MLP, and the blocks that are held once a prompt has ended."""
    settings = {**ENGINE, "max_num_batched_tokens": 2304, "max_model_len": 4096}
    engine = tiny("llama-deep", kv_budget="48%", kv_policy_args={"interval": 1}, **settings)
    rows = [0] * engine.num_layers

    def count(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            rows[layer] += inputs[0].shape[0]

        return hook

    model = _inner_model(engine)
    handles = [
        layer.mlp.register_forward_hook(count(index)) for index, layer in enumerate(model.layers)
    ]
    held: list[list[int]] = []

    def blocks(engine: Engine) -> None:
        held.extend(
            engine.coordinator.blocks_held(request.request_id)
            for request in engine.scheduler.running
        )

    (outcome,) = engine.run([Job(random_prompts([3000])[0], greedy(4))], blocks)
    for handle in handles:
        handle.remove()
    full_blocks = -(-3000 // BLOCK) * 32
    # The budget counts tokens; blocks are whole.
    assert sum(held[-1]) == outcome.report["blocks_after"] <= 0.5 * full_blocks
    kept = outcome.report["kept_tokens"]
    # Three decode steps of one row; a layer computes what the one below has kept.
    assert [count - 3 for count in rows] == [3000, *kept[:-1]]
    assert kept[-1] < 0.3 * 3000
    engine.check_whole()


def test_refused(tiny_model: Models, random_model: Path, tmp_path: Path) -> None:
    """Before anything starts, naming the model, flag or budget."""
    import json

    from tests.engine.test_refusals import _config

    policy = {"kv_policy": "pyramidinfer"}
    config = json.loads((random_model / "config.json").read_text())
    for architecture, model_type in (("GPT2LMHeadModel", "gpt2"), ("PhiForCausalLM", "phi")):
        folder = tmp_path / model_type
        folder.mkdir()
        changed = {**config, "architectures": [architecture], "model_type": model_type}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"Llama, Mistral, Qwen2, Qwen3.*is {architecture}"):
            _config(folder, policy)
    for arguments, said in (
        ({"enable_lora": True}, "--enable-lora: it drops"),
        ({"max_num_batched_tokens": 511}, "--max-num-batched-tokens 511 .* piece of 512"),
        ({"long_prefill_token_threshold": 300}, "--long-prefill-token-threshold 300"),
    ):
        with pytest.raises(ValueError, match=said):
            _config(random_model, policy, **arguments)
    with pytest.raises(ValueError, match=r"budget 30% is out of reach .* over 8 layers"):
        _config(random_model, {**policy, "kv_budget": "30%"}, max_num_batched_tokens=1024)
    with pytest.raises(ValueError, match="a percentage such as 50%, not 64 tokens"):
        _config(random_model, {**policy, "kv_budget": 64})
