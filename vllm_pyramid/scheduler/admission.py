# SPDX-License-Identifier: Apache-2.0
"""Admission: a prompt starts if it will not be preempted before its prefill was worth it.

vLLM starts a prompt as soon as all of it fits. With eviction nearly every prompt fits, once: the
running requests hold little yet. Later they grow, the pool runs out, and vLLM preempts the newest,
whose prompt then has to be processed again. So a prompt starts only if the pool will be large
enough for what all requests are expected to hold (`forecast.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.prefix_cache import PrefixCache
from vllm_pyramid.kv_cache.shared_blocks import Requests
from vllm_pyramid.plan import LevelPlan, Plan, RetentionPlan, least_given_back, tokens_per_step
from vllm_pyramid.scheduler.forecast import (
    Numbers,
    RequestArrays,
    SharedBlocks,
    StagePoolView,
    StepRules,
    missing_blocks,
)

# Tokens of an answer before one has ended: the order of a chat's answer. A wrong guess costs what
# vLLM's own rule costs (too short), or a batch that fills up later (too long), until some answers
# have ended.
FIRST_GUESS = 128
# About as many answers make up the mean: answers of hours ago say little.
AVERAGING_WINDOW = 64
# Steps after which a refused request is looked at again in any case: it grows less before the
# ends of the running requests as these come nearer.
RECHECK_STEPS = 32
# About as many steps of a request with drafts make up the mean pace.
PACE_WINDOW = 512
UNBOUNDED = 1 << 40


class AnswerLengths:
    """The mean tokens of the answers that have ended; recent ones weigh more.

    An answer that was cut off at `max_tokens` would have gone on: its tokens count, its end does
    not. That is the maximum-likelihood mean of lifetimes some of which are cut off, where an end is
    equally likely at every token. If all are cut off, the mean grows until `max_tokens` bounds it.
    """

    def __init__(self) -> None:
        self._tokens, self._ends = float(FIRST_GUESS), 1.0

    @property
    def mean(self) -> float:
        """Return the mean tokens of an answer."""
        if self._tokens >= UNBOUNDED * self._ends:  # none ends by itself
            return float(UNBOUNDED)
        return self._tokens / self._ends

    def add(self, tokens: int, cut_off: bool) -> None:
        """Count an answer that has ended."""
        keep = 1 - 1 / AVERAGING_WINDOW
        self._tokens = keep * self._tokens + tokens
        self._ends = keep * self._ends + (not cut_off)


class Pace:
    """The mean tokens that a request gets in a step: more than one where drafts are accepted."""

    def __init__(self) -> None:
        self.mean = 1.0

    def add(self, tokens: int) -> None:
        """Count a step in which a request with drafts got `tokens` tokens."""
        self.mean += (tokens - self.mean) / PACE_WINDOW


def answer_bounds(request: Request, max_model_len: int) -> tuple[int, int]:
    """Return the fewest and the most tokens of an answer; equal where nothing can end it early.

    `max_tokens` alone says little: clients ask for thousands and get hundreds.
    """
    most = max(min(request.max_tokens, max_model_len - request.num_prompt_tokens), 1)
    params = request.sampling_params
    if params is None:
        return 1, most
    if params.ignore_eos and not params.stop and not params.stop_token_ids:
        return most, most
    return min(max(params.min_tokens, 1), most), most


class RequestTable:
    """The numbers of `RequestArrays` that change seldom, for every request that may run."""

    def __init__(self, stages: int) -> None:
        # In the order of `RequestArrays`: `[5, slots]` of a request, `[stages, 4, slots]` of each
        # stage.
        self._of_request = np.zeros((5, 16), np.int64)
        self._of_stages = np.zeros((stages, 4, 16), np.int64)
        self._slots: dict[str, int] = {}
        self._unused = list(range(16))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def put(
        self,
        request_id: str,
        of_request: tuple[int, int, int, int, int],
        of_stages: tuple[Numbers | int, Numbers | int, Numbers | int, Numbers | int],
    ) -> None:
        """Write a request's numbers.

        Args:
            of_request: prompt, least, most, target and chunk.
            of_stages: given_back, bound, peak and peak_after, `[stages]` or one for all.
        """
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._unused:
                size = self._of_request.shape[1]
                self._unused.extend(range(size, 2 * size))
                self._of_request = np.tile(self._of_request, 2)
                self._of_stages = np.tile(self._of_stages, 2)
            slot = self._slots[request_id] = self._unused.pop()
        self._of_request[:, slot] = of_request
        for index, numbers in enumerate(of_stages):
            self._of_stages[:, index, slot] = numbers

    def put_given_back(self, request_id: str, blocks: Numbers) -> None:
        """Correct what a request's evictions give back, `[stages]`."""
        self._of_stages[:, 0, self._slots[request_id]] = blocks

    def put_whole(self, request_id: str) -> None:
        """Correct the numbers of a request that never gives blocks back."""
        never = [0, UNBOUNDED, UNBOUNDED, 0]
        self._of_stages[:, :, self._slots[request_id]] = never

    def remove(self, request_id: str) -> None:
        """Drop a request, if the table has it."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._unused.append(slot)

    def arrays(
        self, request_ids: Sequence[str], computed: Numbers, in_flight: Numbers, stage: int
    ) -> RequestArrays:
        """Return the numbers of some requests in a stage."""
        slots = [self._slots[request_id] for request_id in request_ids]
        of_request, of_stage = self._of_request[:, slots], self._of_stages[stage][:, slots]
        return RequestArrays._make([*of_request, *of_stage, computed, in_flight])


class Admission:
    """Decide whether the first waiting request may start.

    It refuses only while other requests run, so something always ends, and never lets one request
    overtake another. It looks at a refused request again when blocks have been given back, or some
    steps later.

    Args:
        step_tokens: the most tokens of a step.
        longest_chunk: the most tokens of one request in a step.
        lag: steps that are under way when the next is scheduled.
        ahead: places for drafts behind a request's last token.
    """

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        *,
        max_model_len: int,
        step_tokens: int,
        longest_chunk: int,
        lag: int,
        ahead: int = 0,
    ) -> None:
        self.lengths = AnswerLengths()
        self.pace = Pace()
        self._coordinator = coordinator
        self._stages = coordinator.layer_blocks.stages
        self._max_model_len = max_model_len
        self._step_tokens, self._longest_chunk = step_tokens, longest_chunk
        self._lag, self._ahead = lag, ahead
        self.table = RequestTable(len(self._stages))
        self._refused: tuple[str, int] | None = None
        self._waits = 0  # steps since the look that refused the request
        self._enough = 0  # cached tokens with which the refused request would fit by sharing

    def admits(
        self, request: Request, plan: Plan, computed: int, running: Sequence[Request]
    ) -> bool:
        """Return whether the first waiting request, with `computed` tokens in the cache, may start.

        `running` are all running requests, in the order in which they get tokens.
        """
        name = request.request_id
        now = name, self._coordinator.counters.num_releases
        if (
            running
            and self._refused == now
            and self._waits < RECHECK_STEPS
            and computed < self._enough
        ):
            self._waits += 1
            return False
        self.enter(request, plan)
        if not running:
            return True
        names = [*(other.request_id for other in running), name]
        processed = np.array([*(other.num_computed_tokens for other in running), computed])
        in_flight = np.array([*(other.num_in_flight_tokens for other in running), 0])
        for stage in range(len(self._stages)):
            if missing := self.missing_blocks(names, processed, in_flight, stage):
                prefixes = self._coordinator.prefixes
                bundles = -(-missing // int(prefixes.bundle_blocks[stage]))
                self._enough = computed + bundles * prefixes.cache.tokens
                self._refused, self._waits = now, 0
                return False
        return True

    def missing_blocks(
        self, names: list[str], computed: Numbers, in_flight: Numbers, stage: int
    ) -> int:
        """Return the blocks that a stage will lack for these requests, the candidate last."""
        coordinator = self._coordinator
        stock_groups = coordinator.stock_groups
        return missing_blocks(
            self.table.arrays(names, computed, in_flight, stage),
            StagePoolView(
                usable=coordinator.usable_blocks[stage],
                whole_blocks=partial(coordinator.layer_blocks.whole, stage=stage),
                stock_blocks=stock_groups.blocks_of if stock_groups else None,
                shared=partial(self._shared, names, stage),
            ),
            StepRules(self._step_tokens, self._lag, self._ahead, self.pace.mean, self.lengths.mean),
        )

    def evicted(self, request_id: str, resolved: RetentionPlan, number: int) -> None:
        """Record the worker's eviction: now it is known exactly what the request gives back."""
        if number >= resolved.end_number:
            self.table.put_given_back(request_id, self._given_back(resolved, number))

    def ended(self, request: Request) -> None:
        """Forget a request that has ended, whether it ever ran or not, and learn its length."""
        self.table.remove(request.request_id)
        least, most = answer_bounds(request, self._max_model_len)
        failed = request.status in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)
        # One that could have no other length says nothing about the others.
        if least < most and request.num_output_tokens and not failed:
            cut_off = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            self.lengths.add(request.num_output_tokens, cut_off)

    def enter(self, request: Request, plan: Plan) -> None:
        """Write the numbers of a request that may start."""
        least, most = answer_bounds(request, self._max_model_len)
        own_plan, plan = plan, plan.estimate()
        reduced = plan
        if isinstance(own_plan, LevelPlan):
            reduced = own_plan.counted()
            plan = RetentionPlan((reduced.end,))
        # All pieces but the last, which is the rest, are as long as the first; so are chunks.
        chunk = min([self._longest_chunk, *(piece.tokens for piece in plan.pieces[:1])])
        most_in_step = 0
        if plan.inner:
            chunk, _ = tokens_per_step(plan, chunk)
            # A request gets longer chunks than others leave it as long as it is alone.
            _, most_in_step = tokens_per_step(plan, self._step_tokens)
        # A request that evicts inside its prompt, or evicted while it generated, never holds all of
        # it. Heads come back some steps late, and each step computes that many tokens.
        peak: Numbers | int = UNBOUNDED
        peak_after: Numbers | int = 0
        if plan.inner or plan.every:
            late = self._lag * max(plan.every, most_in_step)
            most_blocks = partial(self._coordinator.layer_blocks.most, own_plan)
            peak = most_blocks(request.num_tokens, late)
            peak_after = most_blocks(request.num_tokens, late, evicted=True)
        prompt_len = request.num_prompt_tokens
        given_back: Numbers | int = self._given_back(plan, plan.end_number)
        if own_plan.is_deferred:  # until the worker reports
            given_back = least_given_back(own_plan, self._coordinator.layer_blocks.block_sizes)
        bound = self._bound(reduced, prompt_len + most - 1)
        self.table.put(
            request.request_id,
            (prompt_len, least, most, request.num_tokens, chunk),
            (given_back, bound, peak, peak_after),
        )

    def _given_back(self, plan: RetentionPlan, number: int) -> Numbers:
        return self._stages.sums(
            plan.skip_after(number) // self._coordinator.layer_blocks.block_sizes
        )

    def _bound(self, plan: RetentionPlan, end: int) -> Numbers | int:
        """Return the most blocks that a request holds behind its prompt if it evicts repeatedly.

        What it holds after an eviction grows until it is the budget; up to the next eviction
        `every` tokens come, and the first block may be filled in part.
        """
        if not plan.every:
            return UNBOUNDED
        held = plan.after(plan.evictions_by(end)).held
        most = np.maximum(held, plan.end.held) + plan.every + self._lag
        return self._stages.sums(-(-most // self._coordinator.layer_blocks.block_sizes) + 1)

    def shared_bundles(self, request_id: str) -> list[tuple[PrefixCache, dict[Requests, int]]]:
        """Return, by kind, bundles by the requests that have them, if this one begins with its
        hit.
        """
        coordinator, record = self._coordinator, self._coordinator.plans.records[request_id]
        names = [] if record.found is None else record.found.hit.shared_names
        bundles, plan = coordinator.block_pool.bundles, record.plan
        of_kinds = []
        for kind in coordinator.prefixes.kinds:
            own = [bundles[name] for name in kind.named(names)]
            to_end = 0 if plan is None else plan.in_place // kind.tokens
            of_kinds.append((kind, kind.holders.shared(request_id, own, to_end)))
        return of_kinds

    def _shared(self, names: list[str], stage: int) -> SharedBlocks:
        """Return the blocks of a stage that several of these requests have."""
        places = {name: index for index, name in enumerate(names)}
        sets: list[tuple[int, list[tuple[int, bool]]]] = []
        for cache, shared in self.shared_bundles(names[-1]):
            bundle_blocks = int(cache.bundle_blocks[stage])
            for holders, bundles in shared.items():
                has = [
                    (places[name], to_end or cache.to_end)
                    for name, to_end in holders
                    if name in places
                ]
                if len(has) > 1:
                    sets.append((bundles * bundle_blocks, has))
        found = np.zeros((2, len(sets), len(names)), np.bool_)
        for number, (_, has) in enumerate(sets):
            for place, to_end in has:
                found[:, number, place] = True, to_end
        return SharedBlocks(np.array([blocks for blocks, _ in sets], np.int64), *found)
