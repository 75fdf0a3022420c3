# SPDX-License-Identifier: Apache-2.0
"""KV heads whose lengths follow from the prompt, beside requests that keep everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.paper import HuggingFaceModel
from tests.engine.support import NEAR_TIE, Job, greedy, random_prompts
from tests.scheduler.checks import check_pool

LAYERS, HEADS, LANE_BLOCK = 8, 4, 64  # of `random_model`, with blocks of 16 tokens
WINDOW, SINKS, ALPHA = 8, 4, 0.25
MAX_TOKENS = 12
SETTINGS: dict[str, Any] = {
    "kv_policy": "adakv",
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "dtype": "float32",
    "block_size": 16,
    "kv_min_tokens": 0,
}
LENGTHS = [9, 257, 512, 700]


def by_directions(keys: torch.Tensor, n: int, budget: int) -> tuple[list[int], list[torch.Tensor]]:
    """What the heads of a layer keep of their keys, by KeyDiff's score."""
    unit = torch.nn.functional.normalize(keys[:, :n].double(), dim=-1)
    anchor = torch.nn.functional.normalize(unit.mean(dim=1, keepdim=True), dim=-1)
    scores = -(unit * anchor).sum(dim=-1)[:, SINKS : n - WINDOW]
    order = scores.argsort(dim=-1, descending=True, stable=True)
    mean = budget - SINKS - WINDOW
    safe = int(ALPHA * mean)
    rest = [
        (-float(scores[head, place]), int(place), head)
        for head in range(HEADS)
        for place in order[head, safe:]
    ]
    taken = sorted(rest)[: (mean - safe) * HEADS]
    counts = [safe + sum(head == other for *_, other in taken) for head in range(HEADS)]
    return [SINKS + WINDOW + count for count in counts], list(order + SINKS)


def test_lengths_tokens_and_blocks_beside_requests_that_keep_everything(demo, random_model) -> None:
    """By the tokens and log probabilities of a model whose attention sees those alone."""
    args = {"scorer": "keydiff", "window": WINDOW, "sinks": SINKS, "alpha": ALPHA}
    engine = demo(kv_policy_args=args, **SETTINGS)
    assert (engine.block_size, engine.num_layers) == (LANE_BLOCK, LAYERS * HEADS)
    engine.shuffle_blocks(3)
    prompts = random_prompts(LENGTHS, seed=7, vocab_size=2048)
    full = greedy(MAX_TOKENS, logprobs=3, kv_policy="full")
    whole = greedy(MAX_TOKENS, logprobs=3, kv_budget="100%")
    some = greedy(MAX_TOKENS, logprobs=3, kv_budget="25%")
    jobs = [
        Job(prompt, params, arrival=index)
        for index, prompt in enumerate(prompts)
        for params in (full, some, whole)
    ]
    freed = engine.coordinator.counters.blocks_freed.copy()
    outcomes = engine.run(jobs, lambda engine: check_pool(engine.coordinator))
    engine.check_whole()
    freed = (engine.coordinator.counters.blocks_freed - freed).reshape(LAYERS, HEADS)
    model, unequal = HuggingFaceModel(str(random_model)), 0
    for full_run, run, whole_run in zip(outcomes[::3], outcomes[1::3], outcomes[2::3], strict=True):
        # Where nothing is evicted, the bits are those of `full`.
        assert whole_run.token_ids == full_run.token_ids
        assert whole_run.logprobs == full_run.logprobs
        prompt, report, n = run.job.prompt, run.report, len(run.job.prompt)
        assert full_run.report["kept_tokens"] == [n] * LAYERS * HEADS
        assert report["kv_heads"] == HEADS
        if n <= SINKS + WINDOW:
            assert run.logprobs == full_run.logprobs and report["evicted_tokens"] == 0
            continue
        budget = -(-n // 4)
        solved = np.array(report["solved_tokens"]).reshape(LAYERS, HEADS)
        held = np.array(report["kept_tokens"]).reshape(LAYERS, HEADS)
        assert (solved.sum(axis=1) == budget * HEADS).all()
        assert (held == n - (n - solved) // LANE_BLOCK * LANE_BLOCK).all()
        assert report["evicted_tokens"] == (n - held).sum()
        blocks = -(-n // LANE_BLOCK) - (n - held) // LANE_BLOCK
        assert report["blocks_after"] == blocks.sum() < report["blocks_before"]
        freed -= -(-n // LANE_BLOCK) - blocks
        unequal += len({tuple(row) for row in held.tolist()}) > 1 and np.ptp(held, axis=1).any()
        model.forward(prompt)
        kept = []
        for keys, lengths, holds in zip(model.keys, solved.tolist(), held.tolist(), strict=True):
            expected, order = by_directions(keys, n, budget)
            assert lengths == expected
            rows = []
            for head, count in enumerate(holds):
                best = order[head][: count - SINKS - WINDOW]
                ends = torch.cat([torch.arange(SINKS), torch.arange(n - WINDOW, n)])
                places = torch.cat([ends, best])
                rows.append(torch.cat([places, places[-1:].expand(max(holds) - count)]))
            kept.append(torch.stack(rows))
        tokens = [*prompt, *run.token_ids]
        expected_rows = model.forward(tokens[:-1], n, kept)[n - 1 :]
        for row, (token, ours) in enumerate(zip(run.token_ids, run.logprobs, strict=True)):
            assert ours[token] == pytest.approx(float(expected_rows[row, token]), abs=2e-4), n
            assert float(expected_rows[row].max() - expected_rows[row, token]) < NEAR_TIE, n
    assert unequal, "heads of a layer have lengths of their own"
    assert not freed.any(), "each head's blocks went back"
