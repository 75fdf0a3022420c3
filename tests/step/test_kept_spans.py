# SPDX-License-Identifier: Apache-2.0
"""What an eviction keeps where spans of the prompt are to stay, against a ranking by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import steps
from tests.steps import make_call
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.kept_spans import merged
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.policy.selectors import Selector
from vllm_pyramid.step.eviction_batch import EvictionBatch

HEADS, BLOCK = 2, 16


class Sorted(Selector):
    """A selector of one's own: it goes through `select_each`."""

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :keep]


POLICIES: list[Policy] = [
    load_policy("snapkv", 24, {"window": 4, "sinks": 2}),
    load_policy("snapkv", 24, {"window": 4, "selector": {"kind": f"{__name__}:Sorted"}}),
]


def ranked_by_hand(scores: torch.Tensor, keep: int, protected: set[int]) -> list[int]:
    others = [place for place in range(len(scores)) if place not in protected]
    best = sorted(others, key=lambda place: (-float(scores[place]), place))
    return sorted([*protected, *best[: keep - len(protected)]])


@settings(max_examples=60)
@given(data=st.data(), policy=st.sampled_from(POLICIES))
def test_spans_stay_in_every_head(data: st.DataObject, policy: Policy) -> None:
    """Behind an eviction a request has fewer tokens, and its first span is found there alone."""
    count = data.draw(st.integers(1, 4), label="requests")
    lens, keeps, spans, skips = [], [], [], []
    for _ in range(count):
        tokens, skip = data.draw(st.integers(20, 70)), data.draw(st.sampled_from([0, 300, 5]))
        bounds = st.tuples(st.integers(0, tokens - 1), st.integers(1, 6))
        found = data.draw(st.lists(bounds, max_size=4))
        found = [(0, size) for _, size in found[:1]] if skip else found
        spans.append(merged((start, min(start + size, tokens)) for start, size in found))
        lens.append(tokens)
        skips.append(skip)
        protected = _protected(policy, tokens, spans[-1])
        keeps.append(data.draw(st.integers(len(protected), tokens)))
    points = [tokens + skip for tokens, skip in zip(lens, skips, strict=True)]
    evictions = steps.make_evictions(points, [keeps], spans=spans, skips=[skips])
    dead = [skip % BLOCK for skip in skips]
    blocks = -(-(max(points) + BLOCK) // BLOCK)
    tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
    cache = torch.zeros(count * blocks, HEADS, BLOCK, 8)
    shortened = np.arange(count)
    for ops in (reference, cpu):
        call = make_call(tables, ops=ops, caches=(cache, cache))
        batch: EvictionBatch = evictions.batch(call, policy, shortened)
        # Columns of the window may be missing; ties are frequent.
        columns = batch.longest - data.draw(st.sampled_from([0, policy.window]))
        scores = torch.randint(0, 9, (count, HEADS, columns)).float()
        kept = batch.select(scores)
        for row in range(count):
            protected = _protected(policy, lens[row], spans[row])
            for head in range(HEADS):
                of_head, found = torch.zeros(lens[row]), scores[row, head, dead[row] :]
                of_head[: len(found)] = found[: lens[row]]
                expected = ranked_by_hand(of_head, keeps[row], protected)
                places = kept[row, head, : keeps[row]] - dead[row]
                assert places.tolist() == expected


def _protected(policy: Policy, tokens: int, spans: Any) -> set[int]:
    inside = {token for start, end in spans for token in range(start, end)}
    return inside | {*range(policy.sinks), *range(tokens - policy.window, tokens)}
