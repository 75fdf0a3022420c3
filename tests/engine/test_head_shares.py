# SPDX-License-Identifier: Apache-2.0
"""KV heads that keep different numbers of tokens, chosen by their own scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.paper import HuggingFaceModel, keep_best, window_importance
from tests.engine.support import EnginePool, Job, greedy, random_prompts

pytestmark = pytest.mark.engine

LAYERS, HEADS, LANE_BLOCK = 8, 4, 64  # of `random_model`, with blocks of 16 tokens
WINDOW, BETA = 8, 1.2
MAX_TOKENS = 12
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "dtype": "float32",
    "block_size": 16,
    "kv_min_tokens": 0,
}
LENGTHS = [1, 9, 64, 65, 257, 512, 700]
SCORES = (np.random.default_rng(5).random((LAYERS, HEADS)) ** 2).tolist()


def jobs(budget: str, lengths: list[int] = LENGTHS) -> list[Job]:
    prompts = random_prompts(lengths, seed=7, vocab_size=2048)
    params = greedy(MAX_TOKENS, logprobs=3, kv_budget=budget)
    return [Job(prompt, params, arrival=index) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("scorer", ["observation_window", "output_change"])
def test_equal_shares_give_the_bits_of_one_table(
    engines: EnginePool, random_model: Path, scorer: str
) -> None:
    """The same tokens of each head, in blocks of one head or of all; not filled up, as these
    differ in size."""
    exact = {"fill_blocks": False, "scorer": scorer}
    shares = {**exact, "scores": [[1.0] * HEADS] * LAYERS}
    ours = engines.get(random_model, kv_policy="headkv", kv_policy_args=shares, **SETTINGS)
    assert (ours.block_size, ours.num_layers) == (LANE_BLOCK, LAYERS * HEADS)
    ours.shuffle_blocks(2)
    found = ours.run(jobs("30%"))
    ours.check_whole()
    alike = {**exact, "heads": "alike"}
    theirs = engines.get(random_model, kv_policy="headkv", kv_policy_args=alike, **SETTINGS)
    for one, reference in zip(found, theirs.run(jobs("30%")), strict=True):
        assert one.token_ids == reference.token_ids
        assert one.logprobs == reference.logprobs  # floats, bit for bit
        expected = np.repeat(reference.report["kept_tokens"], HEADS)
        assert one.report["kept_tokens"] == expected.tolist()


def lengths_of(prompt_len: int, budget: int) -> np.ndarray:
    """HeadKV's formula in real numbers, `[LAYERS * HEADS]`; no head reaches the prompt here."""
    scores = np.array(SCORES).ravel()
    base = min(budget, prompt_len) - WINDOW
    pool = base / BETA * scores.size
    return base - base / BETA + scores / scores.sum() * pool + WINDOW


@pytest.mark.parametrize("fill_blocks", [True, False])
def test_each_head_keeps_its_share_of_its_best_tokens(
    engines: EnginePool, random_model: Path, fill_blocks: bool
) -> None:
    """By the tokens and log probabilities of a model whose attention sees those alone."""
    args = {"scores": SCORES, "beta": BETA, "fill_blocks": fill_blocks, "pooling": "avg"}
    engine = engines.get(random_model, kv_policy="headkv", kv_policy_args=args, **SETTINGS)
    model = HuggingFaceModel(str(random_model))
    engine.shuffle_blocks(1)
    for outcome in engine.run(jobs("25%", [64, 257, 512, 700])):
        prompt, report, n = outcome.job.prompt, outcome.report, len(outcome.job.prompt)
        held = np.array(report["kept_tokens"])
        wanted = lengths_of(n, -(-n // 4))
        assert wanted.max() < n
        if fill_blocks:
            below, above = (n - (n - k) // LANE_BLOCK * LANE_BLOCK for k in (wanted, wanted + 1))
            assert ((held >= below - 1e-6) & (held <= above + 1e-6)).all()
        else:
            assert (np.abs(held - wanted) < 1).all() and held.sum() == held.size * -(-n // 4)
            assert len(set(held.tolist())) > HEADS
        by_layer = held.reshape(LAYERS, HEADS)
        model.forward(prompt)
        kept = [
            _positions(window_importance(queries, keys, WINDOW, 7, "mean"), lengths)
            for queries, keys, lengths in zip(model.queries, model.keys, by_layer, strict=True)
        ]
        tokens = [*prompt, *outcome.token_ids]
        expected = model.forward(tokens[:-1], n, kept)[n - 1 :]
        assert outcome.token_ids == expected.argmax(dim=-1).tolist(), n
        for row, (token, ours) in enumerate(zip(outcome.token_ids, outcome.logprobs, strict=True)):
            assert ours[token] == pytest.approx(float(expected[row, token]), abs=2e-4)
        if n == 700:  # which head has which length counts
            other = [positions.flip(0) for positions in kept]
            wrong = model.forward(tokens[:-1], n, other)[n - 1 :]
            assert float((wrong[1:] - expected[1:]).abs().max()) > 1e-2
    engine.check_whole()


def _positions(importance: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """What each head keeps, `[HEADS, longest]` with some positions repeated."""
    longest, rows = int(lengths.max()), []
    for head, length in enumerate(lengths.tolist()):
        places = torch.tensor(sorted(keep_best(importance[head : head + 1], length, WINDOW)[0]))
        rows.append(torch.cat([places, places[-1:].expand(longest - length)]))
    return torch.stack(rows)


def test_blocks_that_heads_give_back_serve_other_requests(
    engines: EnginePool, random_model: Path
) -> None:
    """In a pool of 1.5 whole prompts two run at once, and nothing changes."""
    args = {"scores": SCORES, "beta": BETA}
    prompts = random_prompts([700, 690, 680], seed=9, vocab_size=2048)
    params = greedy(60, logprobs=3)
    large = engines.get(random_model, kv_policy="headkv", kv_policy_args=args, **SETTINGS)
    alone = [large.run([Job(prompt, params)])[0] for prompt in prompts]
    small = engines.get(
        random_model,
        kv_policy="headkv",
        kv_policy_args=args,
        num_gpu_blocks_override=1 + LAYERS * HEADS * 11 * 3 // 2 + LAYERS * HEADS,
        kv_admission="prompt",
        **SETTINGS,
    )
    most = []
    together = small.run(
        [Job(prompt, params) for prompt in prompts],
        lambda engine: most.append(len(engine.scheduler.running)),
    )
    assert max(most) >= 2
    for ours, reference in zip(together, alone, strict=True):
        assert ours.token_ids == reference.token_ids
        assert ours.report == reference.report
    small.check_whole()
