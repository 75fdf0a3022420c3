# SPDX-License-Identifier: Apache-2.0
"""Where nothing is to be evicted, nothing changes: bit for bit `full`, and `full` is the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support import Engine, Outcome, Start, greedy, is_cpu_build, random_prompts

BATCHES = (1, 7, 40)
# Small enough that long prompts come in chunks, mixed with others' decode steps. A hit would make
# the same prompt's chunks others, and another chunk rounds otherwise.
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
}


def _lengths(count: int) -> list[int]:
    """From one token over block and chunk boundaries to several chunks."""
    if count == 1:
        return [600]
    fixed = [1, 7, 16, 17, 257, 512, 700]
    return [fixed[i] if i < len(fixed) else 3 + 13 * i for i in range(count)]


def _run(
    engine: Engine, batches: tuple[int, ...] = BATCHES, **extra_args: Any
) -> dict[int, list[Outcome]]:
    return {
        count: engine.generate(
            random_prompts(_lengths(count), seed=count, vocab_size=2048),
            greedy(12, logprobs=3, **extra_args),
        )
        for count in batches
    }


@pytest.fixture(scope="module")
def full_runs(demo: Start) -> dict[int, list[Outcome]]:
    return _run(demo(kv_policy="full", **SETTINGS))


def test_full_equals_vllm_without_the_plugin(demo: Start) -> None:
    """One block table for all layers or one each, its attention or ours: the same tokens."""
    runs = {}
    for policy in ("none", "full"):
        engine = demo(kv_policy=policy, dtype="float32", **SETTINGS)
        runs[policy] = _run(engine)
        if policy == "none":
            assert engine.num_layers == 1  # groups: vLLM as it is
            attention = engine.core.vllm_config.compilation_config.static_forward_context
            names = {type(layer.impl).__name__ for layer in attention.values()}
            assert names == {"CPUAttentionBackendImpl" if is_cpu_build() else "PyramidCpuImpl"}
    for count, ours in runs["full"].items():
        for one, stock in zip(ours, runs["none"][count], strict=True):
            assert one.token_ids == stock.token_ids
            for found, expected in zip(one.logprobs, stock.logprobs, strict=True):
                assert found == pytest.approx(expected, abs=2e-5)


# `full` against Hugging Face Transformers ---------------------------------------------------------


def _transformers_model(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def test_full_in_bfloat16_is_as_near_to_float32_as_transformers(full_runs, random_model) -> None:
    """Log probabilities of the engine's tokens: our error is at most twice that of Transformers."""
    exact = _transformers_model(random_model, torch.float32)
    rounded = _transformers_model(random_model, torch.bfloat16)
    ours, theirs = [], []
    for outcome in full_runs[7]:
        tokens = outcome.token_ids
        with torch.no_grad():
            logprobs = [
                model(torch.tensor([outcome.job.prompt + tokens]))
                .logits[0, len(outcome.job.prompt) - 1 : -1]
                .float()
                .log_softmax(dim=-1)
                .gather(1, torch.tensor(tokens)[:, None])[:, 0]
                for model in (exact, rounded)
            ]
        engine = torch.tensor([p[t] for p, t in zip(outcome.logprobs, tokens, strict=True)])
        ours.append(engine - logprobs[0])
        theirs.append(logprobs[1] - logprobs[0])
    our_error = torch.cat(ours).square().mean().sqrt().item()
    their_error = torch.cat(theirs).square().mean().sqrt().item()
    print(f"root mean square error of log probabilities: {our_error:.4f} and {their_error:.4f}")
    assert our_error <= 2 * their_error, (our_error, their_error)
