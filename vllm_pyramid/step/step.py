# SPDX-License-Identifier: Apache-2.0
"""What each request of a step has given up, and who evicts in it.

`worker/eviction_tracker.py` builds it once a step, from the requests' plans; all layers share it.

Shape legend: L layers, R requests of the step, E requests that evict in it, S of these, T_l tokens
that layer l computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.kernels.records import FP8_DTYPES
from vllm_pyramid.plan import DeferredPlan, Eviction, EvictionPoint, Plan, RetentionPlan
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy

IntArray = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass
class WorkerRequest:
    """What a worker knows of a request; one record from its arrival to its end.

    Attributes:
        policy: what holds for it. plan: its plan now; a solved one takes the place of an open one.
        promised: the plan that it came with, with which it begins again after a preemption.
        state: what methods keep of it, by the name of their hooks.
    """

    request_id: str
    policy: Policy
    plan: Plan
    initial: Plan
    state: dict[str, Any] = field(default_factory=dict)


class StepLayout(Protocol):
    """Which tokens each layer computes, in steps in which these differ between layers.

    Attributes:
        query_starts: `[L, R + 1]` int32, where each request's tokens begin in a layer.
        seq_lens: `[L, R]` int32, where each request's sequence ends in a layer's table.
        skips: `[L, R]` int32, tokens below which a layer's table is not valid.
        survivors: rows of the layer that has just run which the next one computes, `[T_l+1]`
            int64; None: all of them.
    """

    survivors: torch.Tensor | None

    @property
    def query_starts(self) -> IntArray: ...

    @property
    def seq_lens(self) -> IntArray: ...

    @property
    def skips(self) -> IntArray: ...

    def slots(self, layer: int, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Of the step's slots, `[>= T_0]`, those that the layer writes: `[T_l]`."""

    def starts_on(self, layer: int, device: torch.device) -> torch.Tensor:
        """`query_starts` of a layer, `[R + 1]`, on the device."""


@dataclass
class StepEvictions:
    """The requests that come to an eviction in this step; each may have something to give, or not.

    Attributes:
        request_ids: E names.
        rows: `[E]` int64, their rows of the batch.
        query_ends: `[E]` int32, one behind their last query in the step's query tensor.
        query_lens: `[E]` int32, their queries in the step: in a prompt, the chunk up to here.
        prompt_lens: `[E]` int32, tokens computed after the step: the prompt's, fewer if the
            eviction is one inside it, more if it is a later one.
        plans: E plans of this eviction; open ones until they are solved in this step.
        numbers: E numbers of the evictions, see `RetentionPlan.end_number`; not given: 1.
        from_end: `[E]` the same, counted from that at the prompt's end: negative inside it.
        befores: `[L, E]` int32, skips that held until now; None: no skips.
        helds: `[L, E]` int32, tokens that stay in each layer; all of them while a plan is open.
        budgets: `[E]` int32, mean tokens a layer; what an open plan came to, once it is solved.
        unsolved: indices of the requests whose plan was open when the step began. known: of others.
        gives: `[E]` bool, whether the request has something to report: its plan shortens a layer,
            or was open.
        tokens_done: `[E]` int64, tokens evicted so far, over all layers; reported to the scheduler.
        of_prompts: `[E]` int32, tokens of the prompts; not given: `prompt_lens`.
        every: `[E]` tokens between two evictions after the prompt's end, or 0; not given: 0.
        block_size: tokens of the largest cache block.
        copies: E lists of blocks that take copies of what a request's first eviction overwrites,
            layer by layer (`RetentionPlan.blocks_behind`); None where nothing is to be copied.
    """

    request_ids: list[str]
    rows: npt.NDArray[np.int64]
    query_ends: IntArray
    query_lens: IntArray
    prompt_lens: IntArray
    plans: list[EvictionPoint | DeferredPlan]
    numbers: list[int] = field(default_factory=list)
    from_end: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    previous_skips: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    of_prompts: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    every: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    block_size: int = 16
    copies: Sequence[list[int] | None] = ()
    kept_lens: IntArray = field(init=False)
    budgets: IntArray = field(init=False)
    unsolved: npt.NDArray[np.int64] = field(init=False)
    gives: npt.NDArray[np.bool_] = field(init=False)
    tokens_done: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        is_deferred = np.array([plan.is_deferred for plan in self.plans], bool)
        self.unsolved = np.flatnonzero(is_deferred)
        self.known: list[int] = np.flatnonzero(~is_deferred).tolist()
        # Prompts with pieces gave up what they give while the layers ran.
        self.resolved: dict[int, RetentionPlan] = {}
        self._done = np.array([plan.thinned for plan in self.plans], bool)
        self._on_device: dict[bytes, _DeviceEvictions] = {}
        self._copies_on_device: dict[int, torch.Tensor] = {}
        self.kept_lens = np.stack([plan.held for plan in self.plans], axis=1)
        self.numbers = self.numbers or [1] * len(self.plans)
        if not self.from_end.size:
            self.from_end = np.zeros(len(self.plans), np.int64)
        if not self.every.size:
            self.every = np.zeros(len(self.plans), np.int64)
        if not self.of_prompts.size:
            self.of_prompts = self.prompt_lens
        if not self.previous_skips.size:
            self.previous_skips = np.zeros_like(self.kept_lens)
        assert (self.kept_lens <= self.prompt_lens - self.previous_skips).all(), (
            "a layer is to keep more tokens than it has: the allocator or schedule of this policy "
            "does not fall back to fewer tokens as more are computed"
        )
        self.budgets = np.array([plan.budget_tokens for plan in self.plans], np.int32)
        self.gives = is_deferred | np.any(
            self.kept_lens < self.prompt_lens - self.previous_skips, axis=0
        )
        self.tokens_done = np.zeros(len(self.request_ids), np.int64)

    def chosen(self, layer: int) -> npt.NDArray[np.int64]:
        """Indices of the requests that this layer shortens now, as far as they are settled."""
        visible = self.prompt_lens - self.previous_skips[layer]
        return np.flatnonzero((self.kept_lens[layer] < visible) & ~self._done)

    def batch(
        self, call: AttentionInputs, policy: Policy, chosen: npt.NDArray[np.int64]
    ) -> EvictionBatch:
        """The requests `chosen`, `[S]` indices, in one layer.

        Layers mostly shorten the same requests; each set of them that some layer shortens is
        copied to the device when the first such layer asks for it.
        """
        previous_skips = self.previous_skips[:, chosen]
        firsts = previous_skips // self.block_size
        lens = self.prompt_lens[chosen] - firsts * self.block_size
        dead_prefixes = previous_skips - firsts * self.block_size
        key, device = chosen.tobytes(), call.query.device
        if (there := self._on_device.get(key)) is None:
            there = self._on_device[key] = _DeviceEvictions(
                rows=upload(self.rows[chosen], device),
                query_ends=upload(self.query_ends[chosen], device),
                keeps=upload(np.ascontiguousarray(self.kept_lens[:, chosen]), device),
                firsts=upload(firsts.astype(np.int64), device) if firsts.any() else None,
                lens=upload(np.ascontiguousarray(lens), device),
                dead_prefixes=upload(np.ascontiguousarray(dead_prefixes), device),
            )
        layer = call.layer
        tables = call.block_table.index_select(0, there.rows)
        if there.firsts is not None and not call.shifted:
            places = there.firsts[layer][:, None] + torch.arange(tables.shape[1], device=device)
            tables = tables.gather(1, places.clamp_(max=tables.shape[1] - 1))
        return EvictionBatch(
            call,
            policy,
            self,
            chosen,
            tables,
            there.query_ends,
            there.lens[layer],
            there.dead_prefixes[layer],
            there.keeps[layer],
            host_lens=lens[layer],
            host_dead_prefixes=dead_prefixes[layer],
            host_keeps=self.kept_lens[layer, chosen],
        )

    def copy_blocks(self, call: AttentionInputs, indices: Iterable[int]) -> None:
        """Copy what these evictions will overwrite in a layer, whole blocks up to their last token.

        Where a layer keeps everything that is all of it: the request goes on with it.
        """
        if not any(self.copies):
            return
        device = call.key_cache.device
        for index in indices:
            blocks, plan = self.copies[index], self.plans[index]
            if not blocks:
                continue
            assert isinstance(plan, EvictionPoint) and self.numbers[index] == 1
            if (places := self._copies_on_device.get(index)) is None:
                places = upload(np.array(blocks, np.int64), device)
                self._copies_on_device[index] = places
            start, count = (
                int(plan.blocks_behind[: call.layer].sum()),
                plan.blocks_behind[call.layer],
            )
            end = plan.computed // plan.block_size
            sources = call.block_table[int(self.rows[index]), end - int(count) : end].long()
            targets = places[start : start + int(count)]
            for cache in call.moved:
                if cache.dtype in FP8_DTYPES:  # not every device can index those
                    cache = cache.view(torch.uint8)
                cache[targets] = cache[sources]

    def resolve(self, index: int, keep: npt.NDArray[np.int64]) -> None:
        """The lengths of a request are solved: `keep` is `[L]`, window and sinks included.

        Raises:
            ValueError: they break the plan's promise.
        """
        plan = self.plans[index]
        assert isinstance(plan, DeferredPlan), f"{self.request_ids[index]} is solved twice"
        resolved = plan.resolve(keep)
        self.resolved[index] = resolved
        self.plans[index] = resolved.end
        self.kept_lens[:, index] = resolved.end.held
        self.budgets[index] = resolved.budget_tokens


@dataclass(frozen=True)
class _DeviceEvictions:
    """S of a step's evicting requests, where the attention is: copied once for all layers.

    `firsts` are the first blocks that each layer holds, None where all hold everything; `lens` and
    `dead_prefixes` count from there. `rows` and `query_ends` are `[S]`, the others `[L, S]`.
    """

    rows: torch.Tensor
    query_ends: torch.Tensor
    keeps: torch.Tensor
    firsts: torch.Tensor | None
    lens: torch.Tensor
    dead_prefixes: torch.Tensor


@dataclass
class Step:
    """One step, for all layers; built once and shared by their metadata.

    Attributes:
        skips: `[L, R]` int32 on the host, tokens below which a request's table is not valid.
        evictions: the requests that evict now, or None.
        requests: R records, in batch order; none in a step without real requests.
        prompt_lens, computed, scheduled: `[R]` tokens of the prompts, computed before the step, and
            of the step.
        numbers: `[R]` of each request's latest eviction, before the step.
        inner: `[R]` evictions inside the prompt.
        every: `[R]` tokens between two evictions, or 0. may_evict: `[R]` whether the plan evicts.
        layout: where layers compute different tokens; None: all compute all of the step's.
        wants_log_sum_exp: whether attention is to write its log-sum-exp, where it can.
    """

    skips: IntArray
    evictions: StepEvictions | None = None
    requests: list[WorkerRequest] = field(default_factory=list)
    prompt_lens: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    computed: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    scheduled: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    numbers: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    inner: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    every: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    may_evict: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    layout: StepLayout | None = None
    wants_log_sum_exp: bool = False

    @classmethod
    def nothing(cls, num_layers: int, num_reqs: int) -> Step:
        """A step in which every request has its whole cache and none ends its prompt."""
        return cls(np.zeros((num_layers, num_reqs), np.int32))

    def next_inner(self) -> Numbers:
        """`[R]` tokens at each request's next eviction inside its prompt; -1 where none comes."""
        result = np.full(len(self.numbers), -1, np.int64)
        for row in np.flatnonzero(self.numbers < self.inner).tolist():
            result[row] = self.requests[row].plan.computed_at(int(self.numbers[row]) + 1)
        return result

    def view(
        self, call: AttentionInputs, policy: Policy, row: int, first_query: int
    ) -> ScorerInputs | None:
        """A request of the step with its queries from position `first_query` on, or None.

        None where none of its queries counts. For scorers that gather; with no layout.
        """
        computed, scheduled = int(self.computed[row]), int(self.scheduled[row])
        ignored = max(0, first_query - computed)
        if ignored >= scheduled:
            return None
        end = int(self.scheduled[: row + 1].sum())
        skip, size = int(self.skips[call.layer, row]), call.key_cache.shape[2]
        heads = call.key_cache.shape[1]
        return ScorerInputs(
            num_tokens=computed + scheduled - skip,
            window=policy.window,
            sinks=policy.sinks,
            num_query_heads=call.query.shape[1],
            num_kv_heads=heads,
            head_size=call.query.shape[2],
            first_kv_head=heads * (call.ranks.rank if call.ranks is not None else 0),
            layer=call.layer,
            num_layers=len(self.skips),
            scale=call.softmax.scale,
            soft_cap=call.softmax.soft_cap,
            queries=call.query[end - scheduled + ignored : end],
            key_cache=call.key_cache,
            value_cache=call.value_cache,
            block_row=call.block_table[row],
            start=skip % size if call.shifted else skip,
            key_scale=call.batch.key_scale,
            value_scale=call.batch.value_scale,
            key_scales=call.batch.key_scales,
            value_scales=call.batch.value_scales,
            logit_sinks=call.softmax.sinks,
            whole=bool(self.numbers[row] == 0),
            last_position=computed + scheduled - 1,
            prompt_len=int(self.prompt_lens[row]),
            rotary=call.rotary,
            knows_rotary=policy.scorer.needs_rotary,
            ranks=call.ranks,
        )

    def report(self) -> dict[str, Eviction]:
        """What was done with each request that gives, for the scheduler."""
        if self.evictions is None:
            return {}
        evictions = self.evictions
        unsolved = set(evictions.unsolved.tolist())
        report = {}
        for i in np.flatnonzero(evictions.gives).tolist():
            plan, keep = evictions.plans[i], None
            if i in unsolved:
                assert isinstance(plan, EvictionPoint), "a prompt ended and was not solved"
                keep = tuple(plan.keep.tolist())
            report[evictions.request_ids[i]] = Eviction(
                int(evictions.tokens_done[i]), keep, evictions.numbers[i]
            )
        return report
