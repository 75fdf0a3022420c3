# SPDX-License-Identifier: Apache-2.0
"""KV heads that keep different numbers of tokens, chosen by their own scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conversations import Rows
from tests.engine.paper import HuggingFaceModel, keep_best, window_importance
from tests.engine.support import (
    EnginePool,
    Job,
    Outcome,
    assert_same_tokens,
    greedy,
    random_prompts,
)
from vllm_pyramid.plan import Budget, RetentionPlan

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


# Prefixes, and evictions inside the prompt ------------------------------------------------------


def test_prefixes_are_found_to_the_window(engines: EnginePool, random_model: Path) -> None:
    """What heads overwrite is copied, out of a prompt's blocks and into those of the next."""
    engine = engines.get(
        random_model,
        kv_policy="headkv",
        kv_policy_args={"scores": SCORES, "beta": BETA},
        **{**SETTINGS, "enable_prefix_caching": True},
    )
    engine.shuffle_blocks(3)
    prompt, other = random_prompts([700, 200], seed=9, vocab_size=2048)
    look = Rows(engine)

    def run(tokens: list[int], budget: str, **extra: Any) -> Outcome:
        params = greedy(MAX_TOKENS, logprobs=3, kv_budget=budget, **extra)
        return engine.run([Job(tokens, params)], look)[0]

    cold = run(prompt, "25%")
    assert cold.cached == 0
    untouched = 700 - max(cold.report["kept_tokens"])
    assert untouched < 320, "else nothing is copied"
    warm = run(prompt, "25%")
    assert warm.cached == (700 - WINDOW) // LANE_BLOCK * LANE_BLOCK == 640
    assert_same_tokens([warm], [cold])
    assert warm.report == cold.report
    longer = run([*prompt[:600], *other], "12%")
    assert longer.cached == 576
    engine.llm.reset_prefix_cache()
    again = run([*prompt[:600], *other], "12%")
    assert again.cached == 0
    assert_same_tokens([longer], [again])
    assert longer.report == again.report
    engine.check_whole()


CHUNK, SINKS = 200, 4


class ChunkedShares(HuggingFaceModel):
    """A model each of whose heads sees its sinks and its most recent tokens, by a plan's points."""

    def __init__(self, path: str, plan: RetentionPlan) -> None:
        super().__init__(path)
        self.plan = plan

    def visible(self, layer: int, kv_heads: int, total: int) -> torch.Tensor:
        seen = super().visible(layer, kv_heads, total)
        ends = [*(point.computed for point in self.plan.points[1:]), total]
        for point, end in zip(self.plan.points, ends, strict=True):
            for head, gone in enumerate(point.skip.reshape(LAYERS, HEADS)[layer].tolist()):
                seen[head, point.computed : end, SINKS : SINKS + gone] = False
        return seen


def test_heads_evict_inside_the_prompt_by_their_shares(
    engines: EnginePool, random_model: Path
) -> None:
    """By a model whose attention sees what the plan says, in prefill too; prefixes to a point."""
    recency = {"scorer": "recency", "chunk.scorer": "recency", "sinks": SINKS}
    engine = engines.get(
        random_model,
        kv_policy="headkv",
        kv_policy_args={
            "scores": SCORES,
            "beta": BETA,
            "chunk.tokens": CHUNK,
            "chunk.keep": 120,
            **recency,
        },
        **{**SETTINGS, "enable_prefix_caching": True},
    )
    engine.shuffle_blocks(4)
    for outcome in engine.run(jobs("15%", [64, 257, 512, 700])):
        prompt, n = outcome.job.prompt, len(outcome.job.prompt)
        plan = engine.scheduler.kv_policy.plan(n, LAYERS * HEADS, LANE_BLOCK, Budget.parse("15%"))
        assert isinstance(plan, RetentionPlan)
        assert outcome.report.get("inner_evictions", 0) == len(plan.inner)
        assert outcome.report["kept_tokens"] == plan.end.held.tolist()
        model = ChunkedShares(str(random_model), plan)
        tokens = [*prompt, *outcome.token_ids][:-1]
        expected = model.forward(tokens)[n - 1 :]
        assert outcome.token_ids == expected.argmax(dim=-1).tolist(), n
        for row, (token, ours) in enumerate(zip(outcome.token_ids, outcome.logprobs, strict=True)):
            assert ours[token] == pytest.approx(float(expected[row, token]), abs=2e-4)
        if n == 700:
            assert len(plan.inner) == 3 and len(set(plan.inner[0].skip.tolist())) > 1
            dense = HuggingFaceModel(str(random_model)).forward(prompt)[-1]
            assert float((dense - expected[0]).abs().max()) > 1e-3
            (warm,) = engine.run([Job(prompt, outcome.job.params)])
            assert warm.cached == CHUNK // LANE_BLOCK * LANE_BLOCK
            assert_same_tokens([warm], [outcome])
    engine.check_whole()
