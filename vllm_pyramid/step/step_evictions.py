# SPDX-License-Identifier: Apache-2.0
"""The requests of a step that come to an eviction.

Shape legend: L layers, E requests that come to an eviction, S of these that one layer shortens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import DeferredPlan, EvictionPoint, IntArray, RetentionPlan
from vllm_pyramid.policy.kept_spans import Spans, leading
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.eviction_memory import pieces
from vllm_pyramid.step.failures import Failures
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy

Indices = npt.NDArray[np.int64]


class HeldTokens(NamedTuple):
    """What layers hold of requests right before an eviction, from `first_blocks` on.

    `lens` counts tokens from the first one of that block, `dead_prefixes` those evicted before.
    """

    first_blocks: IntArray
    lens: IntArray
    dead_prefixes: IntArray


@dataclass(kw_only=True, eq=False, repr=False)
class StepEvictions:
    """E requests that come to an eviction in this step, whether or not a layer shortens them.

    Attributes:
        kept_lens: `[L, E]` int32, tokens that stay in each layer; all of them while a plan is open.
        budgets: `[E]` int32, mean tokens per layer of the plans; of an open one once it is decided.
        deferred: indices of the requests whose plan was deferred when the step began.
        decided: indices of the others.
        resolved: the whole plans of `unsolved` requests, by index, once all layers are solved.
        inside_prompt: `[E]` bool, whether the eviction comes before the prompt's end.
        at_prompt_end: `[E]` bool, whether it comes at the prompt's end.
        is_reported: `[E]` bool, whether the scheduler is told: the request's plan shortens a
            layer, or was deferred.
        tokens_done: `[E]` int64, tokens evicted so far, over all layers; reported to the scheduler.

    Args:
        request_ids: E names.
        rows: `[E]` int64, their rows of the batch.
        query_ends: `[E]` int32, one behind their last query in the step's query tensor.
        query_lens: `[E]` int32, their queries in the step: in a prompt, the chunk up to here.
        prompt_lens: `[E]` int32, tokens of their prompts.
        points: `[E]` int32, tokens computed at the eviction, which the step computes last.
        plans: E plans of this eviction; open ones until they are decided in this step.
        eviction_numbers: `[E]` int64, which eviction of its request it is, from 1.
        end_numbers: `[E]` int64, the number of the eviction at the request's prompt's end.
        intervals: `[E]` int64, tokens between two evictions after the prompt's end, or 0.
        previous_skips: `[L, E]` int32, the skips that held until now.
        block_size: tokens of the largest cache block.
        copies: E lists of blocks that receive copies of what a request's first eviction overwrites,
            layer by layer (`RetentionPlan.blocks_behind`); None where nothing is to be copied.
        keep: E tuples of the spans that stay in every layer and head, merged.
        failures: the worker's; by default none are known.
    """

    request_ids: list[str]
    rows: Indices
    query_ends: IntArray
    query_lens: IntArray
    prompt_lens: IntArray
    points: IntArray
    plans: list[EvictionPoint | DeferredPlan]
    eviction_numbers: Indices
    end_numbers: InitVar[Indices]
    intervals: Indices
    previous_skips: IntArray
    block_size: int
    copies: Sequence[list[int] | None]
    keep: Sequence[Spans]
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self, end_numbers: Indices) -> None:
        request_ids, plans = self.request_ids, self.plans
        self.inside_prompt = self.eviction_numbers < end_numbers
        self.at_prompt_end = self.eviction_numbers == end_numbers
        # All ranks know these; what a rank finds in this step the others learn at its end.
        self._has_failed = np.array([name in self.failures.of for name in request_ids], bool)
        self.kept_lens: IntArray = np.stack([plan.held for plan in plans], axis=1)
        self.budgets = np.array([plan.budget_tokens for plan in plans], np.int32)
        self.tokens_done = np.zeros(len(request_ids), np.int64)
        visible = self.points - self.previous_skips
        if (self.kept_lens > visible).any():
            layer, index = np.argwhere(self.kept_lens > visible)[0].tolist()
            raise RuntimeError(
                f"request {request_ids[index]}: layer {layer} is to keep "
                f"{self.kept_lens[layer, index]} tokens and has {visible[layer, index]}: the "
                "allocator or schedule of this policy does not fall back to fewer tokens as more "
                "are computed; report this"
            )
        is_deferred = np.array([plan.is_deferred for plan in plans], bool)
        self.deferred: Indices = np.flatnonzero(is_deferred)
        self.decided: list[int] = np.flatnonzero(~is_deferred).tolist()
        self.resolved: dict[int, RetentionPlan] = {}
        self._decided_keeps: dict[int, npt.NDArray[np.int64]] = {}
        self.is_reported: npt.NDArray[np.bool_] = is_deferred | np.any(
            self.kept_lens < visible, axis=0
        )
        # Prompts that are computed in pieces have evicted while the layers ran.
        self._is_done = np.array([plan.in_pieces for plan in plans], bool)
        self._on_device: dict[bytes, _DeviceEvictions] = {}
        self._masks: dict[bytes, torch.Tensor | None] = {}

    def with_points(self, points: Mapping[int, EvictionPoint]) -> StepEvictions:
        """Return some of these requests, by index, as if they evicted to other points here."""
        chosen = list(points)
        return replace(
            self,
            request_ids=[self.request_ids[index] for index in chosen],
            rows=self.rows[chosen],
            query_ends=self.query_ends[chosen],
            query_lens=self.query_lens[chosen],
            prompt_lens=self.prompt_lens[chosen],
            points=self.points[chosen],
            plans=list(points.values()),
            eviction_numbers=self.eviction_numbers[chosen],
            end_numbers=self.eviction_numbers[chosen],
            intervals=self.intervals[chosen],
            previous_skips=self.previous_skips[:, chosen],
            copies=[None] * len(chosen),
            keep=[self.keep[index] for index in chosen],
        )

    def shortened(self, layer: int) -> Indices:
        """Return the indices of the requests that this layer shortens now, the same on all ranks.

        Not those with open plans, nor those that failed in an earlier step: these keep what they
        hold until the scheduler ends them.
        """
        visible = self.points - self.previous_skips[layer]
        waits = self._is_done | self._has_failed
        return np.flatnonzero((self.kept_lens[layer] < visible) & ~waits)

    def shortened_anywhere(self) -> Indices:
        """Return the indices of the requests that some layer shortens now; see `shortened`."""
        visible = self.points - self.previous_skips
        waits = self._is_done | self._has_failed
        return np.flatnonzero((self.kept_lens < visible).any(axis=0) & ~waits)

    def pieces(self, call: AttentionInputs, shortened: Indices) -> list[Indices]:
        """Split `[S]` indices into pieces whose scores fit into memory, the same on all ranks."""
        if not shortened.size:
            return []
        lens = self.held(call.layer, shortened).lens
        return [shortened[piece] for piece in pieces(lens, call.key_cache.shape[1])]

    def held(self, layers: int | slice | Indices, indices: Indices) -> HeldTokens:
        """Return what layers hold of requests: of each pair, or `[L, S]` of a slice of layers."""
        skips = self.previous_skips[layers, indices]
        first_blocks = skips // self.block_size
        start = first_blocks * self.block_size
        return HeldTokens(first_blocks, self.points[indices] - start, skips - start)

    def batch(self, call: AttentionInputs, policy: Policy, shortened: Indices) -> EvictionBatch:
        """Return the requests `shortened`, `[S]` indices, as one layer evicts from them.

        Layers mostly shorten the same requests; each set of them is copied to the device once.
        """
        first_blocks, lens, dead_prefixes = self.held(slice(None), shortened)
        key, device = shortened.tobytes(), call.query.device
        if (on_device := self._on_device.get(key)) is None:
            on_device = self._on_device[key] = _DeviceEvictions(
                rows=upload(self.rows[shortened], device),
                query_ends=upload(self.query_ends[shortened], device),
                keeps=upload(np.ascontiguousarray(self.kept_lens[:, shortened]), device),
                first_blocks=(
                    upload(np.ascontiguousarray(first_blocks, np.int64), device)
                    if first_blocks.any()
                    else None
                ),
                lens=upload(np.ascontiguousarray(lens), device),
                dead_prefixes=upload(np.ascontiguousarray(dead_prefixes), device),
            )
        layer = call.layer
        tables = call.block_table.index_select(0, on_device.rows)
        if on_device.first_blocks is not None and not call.shifted:
            columns = torch.arange(tables.shape[1], device=device)
            columns = on_device.first_blocks[layer][:, None] + columns
            tables = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
        return EvictionBatch(
            call,
            policy,
            self,
            shortened,
            np.full(len(shortened), layer),
            tables,
            on_device.query_ends,
            on_device.lens[layer],
            on_device.dead_prefixes[layer],
            on_device.keeps[layer],
            host_lens=lens[layer],
            host_dead_prefixes=dead_prefixes[layer],
            host_keeps=self.kept_lens[layer, shortened],
            host_query_ends=self.query_ends[shortened],
        )

    def kept_spans(self, shortened: Indices, device: torch.device) -> torch.Tensor | None:
        """Return which tokens of `[S]` requests stay because of spans that do not begin at token 0.

        Spans are found at a request's first eviction, so that layers have the same places. The
        result is `[S, end of the last span]` bool; None if there are no such spans. A request with
        spans has all its tokens in its tables, so the mask is no wider than they are. Requests that
        were evicted before do not count.
        """
        key = shortened.tobytes()
        if key not in self._masks:
            spans = [self.keep[index][bool(leading(self.keep[index])) :] for index in shortened]
            ends = [
                min(of_request[-1][1], int(self.points[index])) if of_request else 0
                for of_request, index in zip(spans, shortened, strict=True)
            ]
            mask = None
            if any(spans):
                host = np.zeros((len(shortened), max(ends)), bool)
                for row, of_request in enumerate(spans):
                    for start, end in of_request:
                        host[row, start : min(end, ends[row])] = True
                    if of_request and self.previous_skips[:, shortened[row]].any():
                        raise RuntimeError(
                            f"request {self.request_ids[shortened[row]]}: spans are to be kept at "
                            "an eviction that is not its first; report this"
                        )
                mask = upload(host, device)
            self._masks[key] = mask
        return self._masks[key]

    def open_plan(self, index: int) -> DeferredPlan:
        """Return a request's plan, whose lengths are to be decided in this step."""
        plan = self.plans[index]
        if not isinstance(plan, DeferredPlan):
            raise RuntimeError(f"request {self.request_ids[index]} is decided twice; report this")
        return plan

    def resolve(self, index: int, keep: npt.NDArray[np.int64], first: int = 0) -> None:
        """Take over lengths that were decided; with those of the top layer the plan is known.

        `keep` has the tokens that the layers from `first` on keep, window and sinks included:
        `[L]`, or a number for each of some layers that share a part of the total. ValueError: the
        lengths exceed what the plan has promised.
        """
        plan, end = self.open_plan(index), first + len(keep)
        self.kept_lens[first:end, index] = plan.end_point(keep).held
        keeps = self._decided_keeps.setdefault(index, np.zeros(plan.num_layers, np.int64))
        keeps[first:end] = keep
        if end < plan.num_layers:
            return
        resolved = plan.resolve(keeps)
        self.resolved[index] = resolved
        self.plans[index] = resolved.end
        self.kept_lens[:, index] = resolved.end.held
        self.budgets[index] = resolved.budget_tokens


@dataclass(frozen=True)
class _DeviceEvictions:
    """S of a step's evicting requests on the device of the attention, copied once for all layers.

    Attributes:
        rows, query_ends: `[S]`.
        keeps: `[L, S]`. first_blocks: `[L, S]`, the first block that each layer holds; None where
            all layers hold all blocks. lens, dead_prefixes: `[L, S]`, counted from that block.
    """

    rows: torch.Tensor
    query_ends: torch.Tensor
    keeps: torch.Tensor
    first_blocks: torch.Tensor | None
    lens: torch.Tensor
    dead_prefixes: torch.Tensor
