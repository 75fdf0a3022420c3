# SPDX-License-Identifier: Apache-2.0
"""What evictions take in addition to the cache, and the bounds that hold it down.

    scores        [S, G, longest]   the requests of a step are evicted in pieces   `pieces`
    float32 K, V  [g, T, D]         a long request is scored g KV heads at a time  `parts_of_heads`
    last queries  [L, S, Q, H, D]   where all layers are evicted at a step's end   `QUERIES_BYTES`

A single request of the greatest length is the least that fits: its scores, and the copies of two of
its KV heads. Neither bound changes a result, since requests are evicted one by one, and heads are
scored one by one. docs/kv_layout.md has the formulas of `EvictionMemory`.

Shape legend: S requests, G KV heads of this rank, H query heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks.context import LayerSpec

# Of the padded scores of the requests that one layer evicts from together.
SCORES_BYTES = 16 * 2**20
# Of the queries that wait for a step's end; one request's may exceed it.
QUERIES_BYTES = 64 * 2**20
# Of the copies from which a scorer in PyTorch scores a request.
COPIES_BYTES = 256 * 2**20
# What the C++ window scores keep between their passes (csrc/cpu/scores.cpp: kMaxLogitsBytes).
LOGITS_BYTES = 64 * 2**20
_TILE = 256  # keys, at least as many as in a tile of the C++ kernels

# Bytes for each of the padded scores, in the worst of the paths that a piece may take.
_SCORED = 20  # scores, mass before the pooling, protected scores, kept places, sorted keys
_GATHERED = 60  # where pools follow: copies of the mass, places as int64 before and behind the move
_DEFERRED = 56  # where lengths follow from scores: these sorted and summed in float64
_LEVELLED = 32  # where orders come later: places as int64, levels, and the scores again
_TRACED = 48  # the window's mass again, in float64 for the recall of what is kept


def pieces(
    lens: npt.NDArray[np.int32], num_kv_heads: int, limit: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """Split requests into pieces whose padded scores take at most `limit` bytes (`SCORES_BYTES`).

    Requests of similar length come together, so that one long request does not pad many short ones.
    A request that exceeds the limit by itself is a piece. `lens`, `[S]`, are tokens that a layer
    holds of each. The pieces are indices into it: all as they are, where one piece holds them.
    """
    columns = (SCORES_BYTES if limit is None else limit) // (4 * num_kv_heads)
    if len(lens) * int(lens.max()) <= columns:
        return [np.arange(len(lens))]
    order = np.argsort(-lens, kind="stable")
    found, first = [], 0
    while first < len(order):
        count = max(1, columns // int(lens[order[first]]))
        found.append(np.sort(order[first : first + count]))
        first += count
    return found


def queries_at_step_end(policy: Policy, traces: bool) -> int | None:
    """Return how many of a request's last queries wait for a step's end; None: none can.

    Policies can evict all layers together that ask nothing of a layer's own moment. A trace of kept
    positions looks at queries, too.
    """
    parts = [policy] if policy.inner_policy is None else [policy, policy.inner_policy]
    queries = [part.scorer.queries_at_step_end(part) for part in parts]
    if not policy.evicts or policy.works_in_every_step or policy.allocator.thins_prompts:
        return None
    known = [count for count in queries if count is not None]
    if len(known) < len(queries):
        return None
    return max([*known, *(part.trace_window for part in parts if traces)])


def heads_at_once(policy: Policy, num_tokens: int, head_size: int, group: int) -> int:
    """Return of how many KV heads, each of `group` query heads, the scorer has copies at a time."""
    of_head = 4 * num_tokens * policy.scorer.floats_per_key(policy, head_size, group)
    return max(1, COPIES_BYTES // of_head)


def parts_of_heads(num_kv_heads: int, at_once: int) -> list[slice]:
    """Divide the KV heads of a request evenly into parts of at least two.

    PyTorch multiplies a single matrix by another kernel than several, which rounds differently. So
    a part may have three heads where `at_once` is less.
    """
    count = max(1, min(-(-num_kv_heads // at_once), num_kv_heads // 2))
    bounds = [num_kv_heads * part // count for part in range(count + 1)]
    return [slice(first, end) for first, end in pairwise(bounds)]


@dataclass(frozen=True)
class EvictionMemory:
    """The bytes that the evictions of one policy may take at once, on one worker.

    Attributes:
        policy: the engine's, or the one that it has for evictions inside prompts.
        specs: of the layers that evict. num_heads: H, of a layer.
        tables_per_layer: block tables of a layer; a spec is of one of them.
        longest: tokens of the longest request. requests: most of them that evict in a step.
        threads: that run kernels on the CPU; 0 elsewhere.
        traces: whether kept positions are traced. gathers: whether pools follow the tokens.
        at_step_end: whether all layers may be evicted at a step's end.
    """

    policy: Policy
    specs: Sequence[LayerSpec]
    num_heads: int
    longest: int
    requests: int
    threads: int = 0
    traces: bool = False
    gathers: bool = False
    at_step_end: bool = False
    tables_per_layer: int = 1

    @property
    def num_bytes(self) -> int:
        """The sum of the parts; 0 for a policy that evicts nothing."""
        if not self.policy.evicts or not self.specs:
            return 0
        parts = self.bytes_of_scores() + self.bytes_of_copies() + self.bytes_of_kernels()
        return parts + self.bytes_of_queries()

    def bytes_of_scores(self) -> int:
        """Return the bytes of a piece: its scores, what is selected by them, and its tables."""
        of_each = _SCORED + _TRACED * self.traces
        of_each += _LEVELLED * self.policy.schedule.waits_for_orders
        of_each += _GATHERED * self.gathers + _DEFERRED * self.policy.allocator.defers
        found = []
        for spec in self.specs:
            heads, group = spec.num_kv_heads, self._group_of(spec)
            of_score, of_head = self.policy.scorer.kernel_bytes(self.policy, spec.head_size, group)
            of_requests = of_head * self._rows(heads * group * spec.head_size) * heads * group
            found.append((of_each + of_score) * self._numbers(heads) + of_requests)
        block_size = min(spec.block_size for spec in self.specs)
        tables = 24 * self.requests * -(-self.longest // block_size)  # int32, and as an index
        return max(found) + tables

    def bytes_of_copies(self) -> int:
        """Return the bytes of the copies of as many KV heads as are scored at a time."""
        if not self.policy.scorer.copies_keys:
            return 0
        found = []
        for spec in self.specs:
            heads, group = spec.num_kv_heads, self._group_of(spec)
            floats = self.policy.scorer.floats_per_key(self.policy, spec.head_size, group)
            most = 4 * heads * self.longest * floats
            if self.policy.scorer.in_parts:
                at_once = heads_at_once(self.policy, self.longest, spec.head_size, group)
                (*_, last) = parts_of_heads(heads, at_once)  # the largest part
                of_part = 4 * (last.stop - last.start) * self.longest * floats
                # Shorter requests fill the bound better.
                most = min(most, max(of_part, COPIES_BYTES))
            found.append(most)
        return max(found) + self.policy.scorer.workspace_bytes

    def bytes_of_queries(self) -> int:
        """Return the bytes of queries that wait for a step's end, and of their copy, as float32.

        Points in answers may come in the step in which prompts end.
        """
        queries = queries_at_step_end(self.policy, self.traces) if self.at_step_end else None
        if not queries:
            return 0
        size = max(spec.head_size for spec in self.specs)
        of_each = len(self.specs) * queries * self.num_heads * size * 4
        parts = 3 if self.policy.schedule.levels_every else 2
        return parts * max(of_each, min(QUERIES_BYTES, self.requests * of_each))

    def bytes_of_kernels(self) -> int:
        """Return the bytes of the C++ kernels' scratch, a quarter larger than they ask for."""
        if not self.threads:
            return 0
        policy, rows = self.policy, 0
        if policy.scorer.needs_queries and not policy.scorer.copies_keys:
            rows = self._group() * policy.window
        size = max(spec.head_size for spec in self.specs)
        # Queries and a tile of products; keys to select from, and as many that are left of them.
        of_thread = 4 * rows * (size + _TILE) + 8 * (self.longest + 1) + 2**20
        return 5 * (self.threads * of_thread + LOGITS_BYTES * (rows > 0)) // 4

    def _rows(self, numbers_of_query: int) -> int:
        """Return the most rows of a batch: requests, in each layer where all evict together.

        A query of a row has `numbers_of_query`, of at least two bytes each.
        """
        queries = queries_at_step_end(self.policy, self.traces) if self.at_step_end else None
        if not queries:
            return self.requests
        tables = len(self.specs) * self.tables_per_layer
        waiting = max(tables, QUERIES_BYTES // (2 * queries * numbers_of_query))
        return max(self.requests, min(self.requests * tables, waiting))

    def _numbers(self, num_kv_heads: int) -> int:
        """Return the most padded scores of a piece."""
        one = num_kv_heads * self.longest
        most, rows = SCORES_BYTES // 4, self.requests
        if self.at_step_end:
            rows *= len(self.specs) * self.tables_per_layer
        if self.policy.allocator.defers:  # all layers have the pieces of the first one
            most = most * num_kv_heads // min(spec.num_kv_heads for spec in self.specs)
        return min(max(most, one), rows * one)

    def _group(self) -> int:
        """Return the most query heads of a KV head."""
        return max(map(self._group_of, self.specs))

    def _group_of(self, spec: LayerSpec) -> int:
        return self.num_heads // (spec.num_kv_heads * self.tables_per_layer)
