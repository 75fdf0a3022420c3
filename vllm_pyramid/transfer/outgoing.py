# SPDX-License-Identifier: Apache-2.0
"""The prefilling engine's scheduler: name the states of requests that have ended."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.transfer.states import (
    SEND,
    BlockOrder,
    State,
    Ticket,
    asks,
    given_back,
    request_key,
)
from vllm_pyramid.transfer.transport import Transport

logger = init_logger(f"vllm.{__name__}")


class OutgoingStates:
    """The states that one engine sends; `orders` are of the next step."""

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        transport: Transport,
        namespace: str,
        peer: str,
        ranks: int,
    ) -> None:
        self._coordinator, self._transport = coordinator, transport
        self._namespace, self._peer, self._ranks = namespace, peer, ranks
        self._log = LimitedLog(logger.error)
        self.orders: list[BlockOrder] = []

    def ended(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Order a request's state to be sent, if the request asks for that.

        An answer that has ended by itself is complete, and needs no other engine. Returns whether
        the blocks stay until they are reported as sent, and the ticket, as
        `request_finished_all_groups`.
        """
        if not asks(request.kv_transfer_params, SEND):
            return False, None
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED or request.mm_features:
            return False, None
        record = self._coordinator.plans.records[request.request_id]
        served, plan = record.terms.served, record.resolved or record.plan
        if served is None or not isinstance(plan, RetentionPlan) or not record.num_blocks:
            return False, None
        if request.prompt_token_ids is None or record.is_ordered:
            return False, None
        ticket = Ticket.new(self._peer, self._ranks)
        key = request_key(served, plan, request.prompt_token_ids)
        state = State(ticket, self._namespace, key)
        try:
            state.put_head(self._transport, int(request.output_token_ids[0]))
        except OSError as error:
            self._log("head", "no ticket for request %s: %s", request.request_id, error)
            return False, None
        self.orders.append(BlockOrder(request.request_id, state, self._tails(request, plan)))
        return True, ticket.as_params()

    def _tails(self, request: Request, plan: RetentionPlan) -> list[int]:
        """Return the ids of the blocks that hold what a prompt keeps, of all layers in turn."""
        size = self._coordinator.layer_blocks.largest
        rows, heads = -(-plan.prompt_len // size), given_back(plan, size).tolist()
        tables = self._coordinator.layout.tables(request.request_id)
        found = [table[head:rows] for table, head in zip(tables, heads, strict=True)]
        blocks = [block for tail in found for block in tail]
        if any(block.is_null for block in blocks):
            raise RuntimeError(
                f"request {request.request_id}: its tables lack blocks that its prompt keeps; "
                "report this"
            )
        return [block.block_id for block in blocks]
