# SPDX-License-Identifier: Apache-2.0
"""The decoding engine's scheduler: begin requests with the states that their tickets name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundle_file import DamagedFileError
from vllm_pyramid.kv_cache.cache_store import CacheStore, Least, SchedulerRequest
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.new_blocks import begin_tables
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy.schedules import PromptEndSchedule
from vllm_pyramid.step.hooks import SchedulerHooks
from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.transfer import reasons
from vllm_pyramid.transfer.settings import TransferSettings
from vllm_pyramid.transfer.states import (
    FETCH,
    BlockOrder,
    MismatchError,
    State,
    Ticket,
    asks,
    given_back,
    request_key,
)
from vllm_pyramid.transfer.transport import Transport

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
        ticket: of a state that the other engine may still drop. because: why the request computes
            its prompt; empty while it may still begin with the state, or has.
        state: what the state has to be. head: its first token, being fetched. hit: the state, when
            it is there.
        has_begun: whether the request has tables for it. is_loaded: whether these are filled.
    """

    ticket: Ticket | None
    because: str = ""
    state: State | None = None
    head: Future[int | None] | None = None
    hit: IncomingHit | None = None
    has_begun: bool = False
    is_loaded: bool = False


class IncomingStates(CacheStore[IncomingHit], SchedulerHooks):
    """The states that one engine fetches: their requests' tables begin with tails alone.

    Responses and metrics say what became of tickets. `orders` are of the next step.
    """

    name = "handed"
    shares = False
    loads_later = True

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        settings: TransferSettings,
        transport: Transport,
        namespace: str,
        model_config: Any,
    ) -> None:
        self._coordinator, self._settings, self._transport = coordinator, settings, transport
        self._namespace, self._max_model_len = namespace, model_config.max_model_len
        self._vocabulary = model_config.get_vocab_size()
        self._log = LimitedLog(logger.warning)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-heads")
        self._of_request: dict[str, _Incoming] = {}
        self._loading: dict[str, _Incoming] = {}  # until the workers have ended
        self.orders: list[BlockOrder] = []
        self._counts: Counter[str] = Counter()

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
        if ticket is None or not self._knows(ticket):
            incoming.ticket = None
            self._give_up(request.request_id, incoming, reasons.TICKET)
        elif why := reasons.why_itself(request, served, self._max_model_len):
            self._give_up(request.request_id, incoming, why)
            self._drop(incoming)
        else:
            assert isinstance(plan, RetentionPlan) and request.prompt_token_ids is not None
            if served.policy.schedule.waits_for_orders:
                # The other engine has evicted the prompt at its end.
                policy = served.policy.model_copy(update={"schedule": PromptEndSchedule()})
                served = served._replace(policy=policy)
            key = request_key(served, plan.estimate(), request.prompt_token_ids)
            state = incoming.state = State(ticket, self._namespace, key)
            incoming.head = self._threads.submit(
                state.fetch_head, self._transport, self._vocabulary
            )

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
        assert incoming.head is not None and isinstance(record.plan, RetentionPlan)
        why, detail, token = reasons.ABSENT, "", None
        try:
            token = incoming.head.result()
        except MismatchError as error:
            why, detail = reasons.DIFFERS, str(error)
        except DamagedFileError as error:
            why, detail = reasons.UNREAD, str(error)
        except OSError as error:
            why, detail = reasons.UNREACHABLE, str(error)
        if token is None:
            incoming.ticket = None  # gone, or of another request
            self._give_up(request.request_id, incoming, why, detail)
        elif reasons.ends_answer(request, token):
            self._give_up(request.request_id, incoming, reasons.SHORT)
            self._drop(incoming)
        else:
            plan = record.plan
            incoming.hit = IncomingHit(plan.prompt_len, plan.estimate(), token)

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
        size = self._coordinator.layer_blocks.largest
        return int((cdiv(num_tokens, size) - given_back(hit.plan, size)).sum())

    def enter(self, request_id: str, record: SchedulerRequest, hit: IncomingHit) -> None:
        """Begin the tables of a request as if it had evicted; the connector fills the blocks."""
        coordinator, incoming = self._coordinator, self._of_request[request_id]
        assert incoming.state is not None
        size = coordinator.layer_blocks.largest
        rows, heads = cdiv(hit.tokens, size), given_back(hit.plan, size)
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
        self._loading[request_id] = incoming
        blocks = [block.block_id for blocks in own for block in blocks]
        self.orders.append(BlockOrder(request_id, incoming.state, blocks))

    def fetched(self, request_id: str, *, failed: bool) -> None:
        """Note that the workers have a state's blocks, or that one of them could not read them."""
        incoming = self._loading.pop(request_id)
        incoming.is_loaded = not failed
        self._drop(incoming)
        if failed and request_id in self._of_request:  # it may have been aborted meanwhile
            self._give_up(request_id, incoming, reasons.UNREAD)

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        if (incoming := self._of_request.pop(request_id, None)) is None:
            return {}
        if not incoming.has_begun:  # else the workers read what would be dropped
            self._drop(incoming)
        loaded = incoming.is_loaded and not incoming.because
        self._counts[incoming.because or (reasons.LOADED if loaded else reasons.ABORTED)] += 1
        said: dict[str, Any] = {"tokens": 0}
        if loaded and incoming.hit is not None:
            said["tokens"] = incoming.hit.tokens
        elif incoming.because:
            said["because"] = reasons.WORDS[incoming.because]
        return {self.name: said}

    def totals(self) -> dict[str, Any]:
        return {self.name: dict(self._counts)} if self._counts else {}

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    # ------------------------------------------------------------------------------------------

    def _knows(self, ticket: Ticket) -> bool:
        if self._settings.folder is not None:
            return self._settings.fetches and not ticket.peer
        return self._settings.fetches and ticket.peer in self._settings.peers

    def _give_up(self, request_id: str, incoming: _Incoming, why: str, detail: str = "") -> None:
        incoming.because, incoming.hit = why, None
        text = f"{reasons.WORDS[why]} ({detail})" if detail else reasons.WORDS[why]
        self._log(why, "request %s computes its prompt itself: %s", request_id, text)

    def _drop(self, incoming: _Incoming) -> None:
        """Let the other engine drop a state that the request needs no more, once."""
        ticket, incoming.ticket = incoming.ticket, None
        if ticket is not None:
            self._threads.submit(self._transport.drop, ticket.names, ticket.peer)
