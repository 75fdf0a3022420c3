# SPDX-License-Identifier: Apache-2.0
"""A worker's half of the connector: read blocks of the cache and put them, fetch some and write
them. Threads do it beside the steps, which touch none of these blocks meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Lock
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from vllm_pyramid.kv_cache.bundle_file import DamagedFileError, file_bytes
from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.transfer.orders import BlockOrder, TransferOrders
from vllm_pyramid.transfer.transport import Transport
from vllm_pyramid.transfer.wire import MismatchError, pack_part, unpack_part

logger = init_logger(f"vllm.{__name__}")
_THREADS = 4
_POLL_S = 0.005


class WorkerTransfers:
    """The transfers of one worker.

    Args:
        transport: of the worker's process. rank: of the worker.
        wait_s: seconds for which it waits for the blocks of a state.
    """

    def __init__(self, transport: Transport, rank: int, wait_s: float) -> None:
        self._transport, self._rank, self._wait_s = transport, rank, wait_s
        self._log = LimitedLog(logger.error)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-blocks")
        self._lock, self._done = Lock(), KVConnectorTransferResults()
        self._pages: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def bind(self, pages: torch.Tensor) -> None:
        """Take the cache, `[blocks, bytes]`, which has been allocated, perhaps again."""
        self._pages = pages
        if pages.device.type == "cuda":
            self._stream = torch.cuda.Stream(pages.device)

    def start(self, orders: TransferOrders) -> None:
        """Start a step's orders."""
        after = None
        if self._stream is not None and (orders.sent or orders.fetched):
            after = torch.cuda.current_stream().record_event()
        for order in orders.sent:
            self._threads.submit(self._send, order, after)
        for order in orders.fetched:
            self._threads.submit(self._fetch, order, after)

    def results(self) -> KVConnectorTransferResults:
        """Return what has ended since the last call."""
        with self._lock:
            done, self._done = self._done, KVConnectorTransferResults()
        return done

    def close(self) -> None:
        """Finish what has been started."""
        self._threads.shutdown(cancel_futures=True)

    def _send(self, order: BlockOrder, after: Any) -> None:
        state, name = order.state, order.state.part_name(self._rank)
        try:
            with self._beside(after):
                pages, ids = self._chosen(order.blocks)
                content = pages.index_select(0, ids).cpu().numpy()
            pieces = pack_part(state, self._rank, len(order.blocks), content)
            self._transport.put(name, pieces)
        except Exception as error:  # its blocks are free either way
            self._log("send", "the state of request %s is not sent: %r", order.request_id, error)
            with suppress(Exception):  # an empty part is damaged: no engine waits for it
                self._transport.put(name, [])
        with self._lock:
            self._done.finished_sending.add(order.request_id)

    def _fetch(self, order: BlockOrder, after: Any) -> None:
        failed = True
        try:
            with self._beside(after):
                pages, ids = self._chosen(order.blocks)
                content = self._content(order, pages.shape[1])
                found = torch.frombuffer(content, dtype=torch.uint8).view(len(order.blocks), -1)
                pages.index_copy_(0, ids, found.to(pages.device))
                if self._stream is not None:
                    self._stream.synchronize()
            failed = False
        except (OSError, DamagedFileError, MismatchError, TimeoutError) as error:
            self._log("fetch", "request %s computes its prompt itself: %s", order.request_id, error)
        except Exception as error:
            self._log("bug", "request %s computes its prompt itself: %r", order.request_id, error)
        self._drop(order)
        with self._lock:
            self._done.finished_recving.add(order.request_id)
            if failed:
                self._done.failed_recving.add(order.request_id)

    def _content(self, order: BlockOrder, page_bytes: int) -> memoryview:
        """Wait for this rank's part of a state, and return its blocks.

        Raises:
            TimeoutError: it has not come in time. OSError, DamagedFileError, MismatchError: as
                of `Transport.get` and `unpack_part`.
        """
        state, end = order.state, time.monotonic() + self._wait_s
        count, size = len(order.blocks), len(order.blocks) * page_bytes
        largest = file_bytes(state.begin(self._rank, count), size)
        while True:
            data = self._transport.get(state.part_name(self._rank), order.peer, largest)
            if data is not None:
                return unpack_part(state, self._rank, count, size, data)
            if time.monotonic() > end:
                raise TimeoutError(f"the blocks of its state did not come in {self._wait_s:g} s")
            time.sleep(_POLL_S)

    def _drop(self, order: BlockOrder) -> None:
        names: Sequence[str] = [order.state.part_name(self._rank)]
        if self._rank == 0:
            names = [order.state.head_name, *names]
        for name in names:
            self._transport.drop(name, order.peer)

    def _chosen(self, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._pages is not None, "vLLM registers the caches before the first step"
        return self._pages, torch.tensor(blocks, dtype=torch.int64, device=self._pages.device)

    def _beside(self, after: Any) -> AbstractContextManager[Any]:
        """Work on a stream beside the steps', behind what these have launched by now."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)
