# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a request a step computes: a chunk never crosses an eviction."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.compat.scheduler_points import SchedulerPoints
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.orders import OrderedBlocks
from vllm_pyramid.plan import Plan
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.admission import Admission
from vllm_pyramid.scheduler.pressure import Pressure


class Chunks:
    """Sizes of chunks.

    A chunk ends at the next eviction, inside the prompt, at its end or later. So a preempted
    request that comes back with generated tokens evicts where it did the first time. The last chunk
    of a prompt is never shorter than the observation window. Where each token behind a prompt takes
    memory, a step computes no more of them again than its workers have reserved
    (`Attend.max_recomputed`); nor does a chunk have more logits
    (`ServedSettings.max_prompt_logits`).

    Attributes:
        admission: decides which prompts start; None: vLLM's own rule.
        loading: the requests whose blocks vLLM's KV connector fills; admission has let them start.
        admitted: the last request that was to start in this step, whether or not it got blocks.
    """

    def __init__(
        self,
        engine: SchedulerPoints,
        coordinator: LockstepCoordinator,
        settings: ServedSettings,
        admission: Admission | None,
        pressure: Pressure | None = None,
    ) -> None:
        self._engine, self._coordinator, self.admission = engine, coordinator, admission
        self._stock_chunk = engine.stock_chunk
        policy = settings.policy
        self._splits_at_prompt_end = policy.splits_at_prompt_end
        self._max_logits = settings.max_prompt_logits
        most = policy.attend.max_recomputed
        self._max_recomputed = 0 if most is None else most
        self._recomputed = 0  # in this step, beside one token of each request
        self._new_tokens = self._stock_chunk if most is None else self._cut_chunk
        self._min_last, self._min_inner = settings.min_last_chunk, settings.min_inner_chunk
        # Otherwise the pool has room for whole sequences, so no request waits for its own head.
        self._pool_may_be_smaller = policy.inner_policy is not None or policy.schedule.every > 0
        self._evicting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self._pressure = pressure
        # In this step: the blocks of orders, while some are under way; and whether a running
        # request may wait for them.
        self._ordered: OrderedBlocks | None = None
        self._may_wait = False
        self.admitted: Request | None = None

    def begin_step(self) -> None:
        """Forget the step before."""
        self._evicting = []
        self._may_wait, self.admitted = False, None
        self._recomputed = 0
        if self.loading:  # one that found no blocks waits again
            records = self._coordinator.plans.records
            for request_id in [name for name in self.loading if not records[name].num_blocks]:
                del self.loading[request_id]
        pressure = self._pressure
        self._ordered = pressure.blocks if pressure is not None and pressure.is_pending else None

    def evicting(self, scheduled: dict[str, int]) -> list[Request]:
        """Return the requests that come to their first eviction in the step just scheduled."""
        return [request for request in self._evicting if request.request_id in scheduled]

    def least_before(self, plan: Plan, point: int) -> int:
        """Return the fewest tokens of a chunk that ends at an eviction of the prompt."""
        return self._min_inner if point < plan.prompt_len else self._min_last

    def next(self, request: Request, computed: int, tokens: int) -> int:
        """Limit vLLM's chunk so that it ends at the next eviction.

        |<- computed ->|<- chunk ->|<- at least the window ->|<- generated before preemption
        0                                              prompt_len   prompt_len + every   ...

        Each piece of a plan is computed in one step: the request waits until a step has room for
        it. vLLM also asks for a request that does not run yet. If that one is not to start now, it
        must stay first in the queue, and vLLM must release what it has pinned for it. vLLM does
        both where blocks are missing, so the coordinator reports that they are. (Returning 0 tokens
        would do in vLLM 0.32; in 0.33 the requests behind would overtake it.)
        """
        if not tokens:
            return 0  # vLLM has no room for its images
        waits = request.status != RequestStatus.RUNNING
        if self._ordered is not None and not waits:
            if self._may_wait and self._ordered.lacks(request, self._slots(computed + tokens)):
                return 0  # an order frees some; vLLM would preempt another request
            self._may_wait = True  # not the first: a step without tokens reports nothing
        if not (waits or self._pool_may_be_smaller) and computed >= request.num_prompt_tokens:
            return self._new_tokens(request, computed, tokens)  # nearly every one
        coordinator = self._coordinator
        plans = coordinator.plans
        record, plan = plans.records[request.request_id], plans.of(request.request_id)
        if waits and record.num_blocks:  # a connector has loaded into them
            self.loading.pop(request.request_id, None)
        if not waits or record.num_blocks or self.starts(request, plan, computed):
            chunk = self._chunk(request, plan, computed, tokens)
            if (
                self._pool_may_be_smaller
                and not waits
                and coordinator.waits_for_blocks(request, self._slots(computed + chunk))
            ):
                return 0
            if chunk or not waits:
                self.admitted = request if waits else self.admitted
                return chunk
        coordinator.blocked_request = request.request_id
        return tokens

    def _slots(self, tokens: int) -> int:
        """Return the tokens for which vLLM wants blocks where a step ends at `tokens`."""
        return min(tokens + self._engine.num_lookahead_tokens, self._engine.max_model_len)

    def _cut_chunk(self, request: Request, computed: int, tokens: int) -> int:
        """Return vLLM's own chunk, cut where it has more known tokens of an answer than are left.

        A chunk behind the prompt may always have one token; drafts behind the known tokens are not
        counted. So a request's other tokens behind its prompt are as many rows as are counted here.
        """
        if tokens > 1:
            first = max(computed + 1, request.num_prompt_tokens)
            again = min(computed + tokens, request.num_tokens) - first
            left = self._max_recomputed - self._recomputed
            if again > left:
                again, tokens = left, first + left - computed
            self._recomputed += max(again, 0)
        return self._stock_chunk(request, computed, tokens)

    def starts(self, request: Request, plan: Plan, computed: int) -> bool:
        """Return whether the first waiting request starts in this step."""
        if self._coordinator.block_pool.tier.must_wait():
            return False  # steps that read more of its prefix come first
        admission = self.admission
        running = [*self._engine.running, *self.loading.values()]
        return admission is None or admission.admits(request, plan, computed, running)

    def _chunk(self, request: Request, plan: Plan, computed: int, tokens: int) -> int:
        """Return the tokens of the next chunk, at most `tokens`; 0 if the step lacks room."""
        tokens = self._new_tokens(request, computed, tokens)
        if computed >= plan.prompt_len and not plan.every:
            return tokens  # all has been evicted
        if request.status != RequestStatus.RUNNING and computed + tokens > request.num_tokens:
            return tokens  # its last token, to which vLLM has added places for drafts
        stop = plan.next_eviction(computed) if plan.evicts else None
        if stop is None:
            left = plan.prompt_len - computed
            params = request.sampling_params
            if self._max_logits and params and params.prompt_logprobs is not None:
                tokens = min(tokens, self._max_logits)
            return min(tokens, left) if self._splits_at_prompt_end and left > 0 else tokens
        if piece := plan.piece_at(computed):
            return piece.tokens if tokens >= piece.tokens else 0
        tokens = min(tokens, stop - computed)
        left = stop - computed - tokens
        if left == 0 and stop == plan.exact_tokens:
            self._evicting.append(request)
        least = self.least_before(plan, stop)
        if computed < plan.prompt_len and 0 < left < least:
            tokens -= least - left
        return max(tokens, 0)
