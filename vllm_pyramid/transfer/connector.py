# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector: its two halves, in the scheduler and in each worker."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.host_folder import namespace_of_engines
from vllm_pyramid.step.hooks import SchedulerHooks
from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.transfer.incoming import IncomingStates
from vllm_pyramid.transfer.settings import NAME, TransferSettings
from vllm_pyramid.transfer.states import (
    SEND,
    BlockOrder,
    State,
    Ticket,
    TransferOrders,
    asks,
    given_back,
    request_key,
)
from vllm_pyramid.transfer.transport import Transport, make_transport
from vllm_pyramid.transfer.workers import WorkerTransfers
from vllm_pyramid.worker.host_pool import pages_of


class PyramidConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands evicted states from an engine that prefills to one that decodes.

    Only engines with a KV policy can: their coordinator knows which blocks a request keeps.

    Raises:
        ValueError: there is no policy, or wrong settings (`TransferSettings`).
        OSError: the folder cannot be made, or the port is taken.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        served = ServedSettings.of(vllm_config)
        if served is None:
            raise ValueError(f"{NAME} hands over evicted states: start the server with --kv-policy")
        self._served, self._engine, self._caches = served, vllm_config, kv_cache_config
        self._settings = TransferSettings.of(vllm_config.kv_transfer_config)
        self._orders = TransferOrders()
        self._of_worker: WorkerTransfers | None = None
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        if role != KVConnectorRole.WORKER:
            self._transport = make_transport(self._settings, 0)
            return
        rank = get_tensor_model_parallel_rank()
        self._transport = make_transport(self._settings, 1 + rank)
        num_heads = vllm_config.model_config.get_total_num_kv_heads()
        self._of_worker = WorkerTransfers(
            self._transport, rank, self._ranks, num_heads, self._settings.wait_s
        )

    # In the scheduler -------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        coordinator: Any = kv_cache_manager.coordinator
        assert isinstance(coordinator, LockstepCoordinator)
        config, settings = self._engine, self._settings
        namespace = namespace_of_engines(config, self._served, coordinator.layer_specs)
        self._outgoing = OutgoingStates(
            coordinator, self._transport, namespace, settings.name, self._ranks
        )
        self._incoming = IncomingStates(
            coordinator, settings, self._transport, namespace, config.model_config
        )
        coordinator.stores.put_first(self._incoming)

    @cached_property
    def scheduler_hooks(self) -> list[SchedulerHooks]:
        """The hooks that our scheduler calls (`compat.scheduler_points.connector_hooks`)."""
        return [self._incoming]

    def on_new_request(self, request: Request) -> None:
        self._incoming.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._incoming.matched(request.request_id)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        """Do nothing: `IncomingStates.enter` knows the blocks, and has ordered them."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders = TransferOrders(self._outgoing.orders, self._incoming.orders)
        self._outgoing.orders, self._incoming.orders = [], []
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        failed = connector_output.failed_recving or set()
        for request_id in connector_output.finished_recving or ():
            self._incoming.fetched(request_id, failed=request_id in failed)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._outgoing.ended(request) if self._settings.sends else (False, None)

    # In a worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._of_worker is not None
        groups, count = self._caches.kv_cache_groups, self._caches.num_blocks
        (page_bytes,) = {group.kv_cache_spec.page_size_bytes for group in groups}
        pages = pages_of([*kv_caches.values()], count, page_bytes, "--kv-transfer-config")
        cache = next(iter(kv_caches.values()))  # [P, G, N, 2 D]
        _, heads, tokens, size = cache.shape
        layout = self._engine.cache_config.get_resolved_kv_cache_layout()
        rows = tokens if layout.is_block_contiguous else 1  # of a head that lie together
        self._of_worker.bind(pages, heads, rows * size * cache.element_size())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, TransferOrders)
        self._orders = connector_metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._of_worker is not None
        self._of_worker.start(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests wait until all layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are sent when their request has ended."""

    def wait_for_save(self) -> None:
        """Do nothing, for the same reason."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._of_worker is not None
        return self._of_worker.results()

    def shutdown(self) -> None:
        if self._of_worker is not None:
            self._of_worker.close()
        elif hasattr(self, "_incoming"):
            self._incoming.close()
        self._transport.close()


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
