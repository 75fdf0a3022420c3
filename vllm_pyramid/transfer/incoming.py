# SPDX-License-Identifier: Apache-2.0
"""The decoding engine's scheduler: begin requests with the states that their tickets name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundle_file import DamagedFileError
from vllm_pyramid.kv_cache.cache_store import CacheStore, Least
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.new_blocks import begin_tables
from vllm_pyramid.kv_cache.request_record import SchedulerRequest
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy.schedules import PromptEndSchedule
from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.transfer import reasons
from vllm_pyramid.transfer.orders import BlockOrder
from vllm_pyramid.transfer.settings import TransferSettings
from vllm_pyramid.transfer.ticket import FETCH, Ticket, asks
from vllm_pyramid.transfer.transport import Transport
from vllm_pyramid.transfer.wire import (
    LARGEST_HEAD,
    MismatchError,
    StateHead,
    StateId,
    request_key,
    unpack_head,
)

logger = init_logger(f"vllm.{__name__}")
_THREADS = 4


class IncomingHit(NamedTuple):
    """A state with which a request begins.

    Attributes:
        tokens: of its prompt. plan: the request's. first_token: of its answer.
        shared_names: none.
    """

    tokens: int
    plan: RetentionPlan
    first_token: int
    shared_names: Sequence[BlockHash] = ()


@dataclass
class _Incoming:
    """A request with a ticket.

    Attributes:
        ticket: None if it cannot be read. because: why the request computes its prompt; empty
            while it may still begin with the state, or has.
        state: what the state has to be. head: being fetched. hit: the state, when it is there.
        has_begun: whether the request has tables for it. is_loaded: whether these are filled.
    """

    ticket: Ticket | None
    because: str = ""
    state: StateId | None = None
    head: Future[memoryview | None] | None = None
    hit: IncomingHit | None = None
    has_begun: bool = False
    is_loaded: bool = False


class IncomingStates(CacheStore[IncomingHit]):
    """The states that one engine fetches: their requests' tables begin with tails alone.

    Args:
        namespace: see `StateId`. ranks: parts of a state.

    Attributes:
        orders: of the next step. counts: requests with tickets that have ended, by reason.
    """

    shares = False
    loads_later = True

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        settings: TransferSettings,
        transport: Transport,
        namespace: str,
        ranks: int,
        max_model_len: int,
    ) -> None:
        self._coordinator, self._settings, self._transport = coordinator, settings, transport
        self._namespace, self._ranks, self._max_model_len = namespace, ranks, max_model_len
        self._log = LimitedLog(logger.warning)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-heads")
        self._of_request: dict[str, _Incoming] = {}
        self.orders: list[BlockOrder] = []
        self.counts: Counter[str] = Counter()

    # A request's way --------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Begin to fetch the head of the state, if a request has a ticket."""
        params = request.kv_transfer_params
        served = self._coordinator.plans.records[request.request_id].terms.served
        if not asks(params, FETCH) or served is None or served.error is not None:
            return
        assert params is not None
        incoming = _Incoming(Ticket.parse(params))
        self._of_request[request.request_id] = incoming
        ticket, plan = incoming.ticket, self._coordinator.plans.of(request.request_id)
        if not self._settings.fetches:
            self._give_up(request.request_id, incoming, reasons.ROLE)
        elif ticket is None or not self._knows(ticket):
            incoming.ticket = None
            self._give_up(request.request_id, incoming, reasons.TICKET)
        elif why := reasons.why_itself(request, served, self._max_model_len):
            self._give_up(request.request_id, incoming, why)
            self._drop(ticket)
        else:
            assert isinstance(plan, RetentionPlan) and request.prompt_token_ids is not None
            if served.policy.schedule.waits_for_orders:
                # The other engine has evicted the prompt at its end.
                policy = served.policy.model_copy(update={"schedule": PromptEndSchedule()})
                served = served._replace(policy=policy)
            key = request_key(served, plan.estimate(), request.prompt_token_ids)
            state = incoming.state = StateId(ticket.state, self._namespace, key)
            get = self._transport.get
            incoming.head = self._threads.submit(get, state.head_name, ticket.peer, LARGEST_HEAD)

    def matched(self, request_id: str) -> tuple[int | None, bool]:
        """Return the tokens that `lookup` found, as vLLM's `get_num_new_matched_tokens`."""
        incoming = self._of_request.get(request_id)
        if incoming is None or incoming.because:
            return 0, False
        return (None, False) if incoming.hit is None else (incoming.hit.tokens, True)

    def lookup(
        self, request: Request, record: SchedulerRequest, most: int, least: Least
    ) -> IncomingHit | None:
        incoming = self._of_request.get(request.request_id)
        if incoming is None or incoming.because:
            return None
        if incoming.has_begun:  # and lost its blocks
            self._give_up(request.request_id, incoming, reasons.PREEMPTED)
            return None
        if incoming.hit is None and incoming.head is not None and incoming.head.done():
            self._read_head(request, record, incoming)
        return incoming.hit

    def _read_head(self, request: Request, record: SchedulerRequest, incoming: _Incoming) -> None:
        assert incoming.head is not None and incoming.state is not None
        assert isinstance(record.plan, RetentionPlan)
        why, detail, head = "", "", StateHead(0, 0)
        try:
            if (data := incoming.head.result()) is None:
                why = reasons.ABSENT
            else:
                head = unpack_head(incoming.state, data)
        except MismatchError as error:
            why, detail = reasons.DIFFERS, str(error)
        except DamagedFileError as error:
            why, detail = reasons.DAMAGED, str(error)
        except OSError as error:
            why, detail = reasons.UNREACHABLE, str(error)
        if not why and head.tokens != record.plan.prompt_len:
            why = reasons.DIFFERS
        if not why and reasons.ends_answer(request, head.first_token):
            why = reasons.ENDS
        if why:
            self._give_up(request.request_id, incoming, why, detail)
            return
        incoming.hit = IncomingHit(head.tokens, record.plan.estimate(), head.first_token)

    def answer(self, hit: IncomingHit) -> Sequence[int]:
        return (hit.first_token,)

    def blocks_needed(
        self,
        request_id: str,
        record: SchedulerRequest,
        hit: IncomingHit,
        num_tokens: int,
        *,
        capped: bool,
    ) -> int:
        rows = cdiv(num_tokens, self._coordinator.layer_blocks.largest)
        return int((rows - self._heads(hit)).sum())

    def enter(self, request_id: str, record: SchedulerRequest, hit: IncomingHit) -> None:
        """Begin the tables of a request as if it had evicted; the connector fills the blocks."""
        if record.num_blocks:
            raise RuntimeError(
                f"request {request_id} has {record.num_blocks} blocks already, where its tables "
                "begin; report this"
            )
        coordinator, incoming = self._coordinator, self._of_request[request_id]
        rows, heads = cdiv(hit.tokens, coordinator.layer_blocks.largest), self._heads(hit)
        counts = rows - heads
        own = begin_tables(
            coordinator.block_pool,
            coordinator.layout.managers,
            request_id,
            heads.tolist(),
            counts.tolist(),
        )
        record.begin_evicted(hit.plan, hit.tokens, rows)
        if hit.plan is not record.plan:  # it is evicted no further under pressure
            coordinator.plans.order(request_id, hit.plan)
        coordinator.counters.held_blocks += counts
        coordinator.counters.skipped_tokens += hit.plan.skip_after(hit.plan.end_number)
        incoming.has_begun = True
        assert incoming.state is not None and incoming.ticket is not None
        blocks = [block.block_id for blocks in own for block in blocks]
        self.orders.append(BlockOrder(request_id, incoming.state, blocks, incoming.ticket.peer))

    def _heads(self, hit: IncomingHit) -> np.ndarray:
        skip = hit.plan.skip_after(hit.plan.end_number).astype(np.int64)
        heads: np.ndarray = skip // self._coordinator.layer_blocks.largest
        return heads

    def fetched(self, request_id: str, *, failed: bool) -> None:
        """Note that the workers have a state's blocks, or that one of them could not read them."""
        if (incoming := self._of_request.get(request_id)) is None:
            return  # it was aborted meanwhile
        incoming.is_loaded = not failed
        if failed:
            self._give_up(request_id, incoming, reasons.UNREAD)

    def ended(self, request_id: str) -> dict[str, object]:
        """Forget a request, and return what its report says of its ticket."""
        if (incoming := self._of_request.pop(request_id, None)) is None:
            return {}
        if incoming.ticket is not None and not incoming.because and not incoming.has_begun:
            self._drop(incoming.ticket)  # it was aborted before it began
        loaded = incoming.is_loaded and not incoming.because
        self.counts[incoming.because or (reasons.LOADED if loaded else reasons.ABORTED)] += 1
        said: dict[str, object] = {"tokens": 0}
        if loaded and incoming.hit is not None:
            said["tokens"] = incoming.hit.tokens
        elif incoming.because:
            said["because"] = reasons.WORDS[incoming.because]
        return {"handed": said}

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------------------------------

    def _knows(self, ticket: Ticket) -> bool:
        if self._settings.folder is not None:
            return not ticket.peer
        return ticket.peer in self._settings.peers

    def _give_up(self, request_id: str, incoming: _Incoming, why: str, detail: str = "") -> None:
        incoming.because, incoming.hit = why, None
        text = f"{reasons.WORDS[why]} ({detail})" if detail else reasons.WORDS[why]
        self._log(why, "request %s computes its prompt itself: %s", request_id, text)

    def _drop(self, ticket: Ticket) -> None:
        """Let the other engine drop a state that no request needs."""
        names = [f"{ticket.state}.{part}" for part in ("head", *range(self._ranks))]
        drop = self._transport.drop
        self._threads.submit(lambda: [drop(name, ticket.peer) for name in names])
