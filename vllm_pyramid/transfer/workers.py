# SPDX-License-Identifier: Apache-2.0
"""A worker's half of the connector: read blocks of the cache and put them, fetch some and write
them. Threads do it beside the steps, which touch none of these blocks meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Lock
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from vllm_pyramid.kv_cache.bundle_file import DamagedFileError, sealed
from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.transfer.states import (
    BlockOrder,
    MismatchError,
    TransferOrders,
    heads_of,
    sources,
)
from vllm_pyramid.transfer.transport import Transport

logger = init_logger(f"vllm.{__name__}")
_THREADS = 4
_POLL_S = 0.005


class WorkerTransfers:
    """The transfers of one worker, which waits `wait_s` seconds for the blocks of a state.

    `num_heads` are the KV heads of a layer, on all ranks together.
    """

    def __init__(
        self, transport: Transport, rank: int, ranks: int, num_heads: int, wait_s: float
    ) -> None:
        self._transport, self._rank, self._wait_s = transport, rank, wait_s
        self._num_heads, self._heads = num_heads, heads_of(rank, ranks, num_heads)
        (self._sender, _), *_ = sources(self._heads, ranks, num_heads)  # of ranks with these heads
        self._log = LimitedLog(logger.error)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-blocks")
        self._lock, self._done = Lock(), KVConnectorTransferResults()
        self._pages = torch.empty(0)
        self._stream: torch.cuda.Stream | None = None

    def bind(self, pages: torch.Tensor, num_heads: int, head_bytes: int) -> None:
        """Take the cache, `[blocks, bytes]`, which has been allocated, perhaps again.

        A block has `num_heads` KV heads, of `head_bytes` each as they lie together: of all tokens,
        or of one. RuntimeError: a block has other heads.
        """
        if num_heads != len(self._heads) or pages.shape[1] % (num_heads * head_bytes):
            raise RuntimeError(
                f"blocks of {pages.shape[1]} bytes have {num_heads} KV heads of {head_bytes} bytes "
                f"where {len(self._heads)} were expected: leave --kv-transfer-config out, and "
                "report this"
            )
        self._pages = pages.view(len(pages), -1, num_heads, head_bytes)
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
        state, rank = order.state, self._rank
        try:
            if rank == self._sender:
                with self._beside(after):
                    content = self._pages.index_select(0, self._ids(order)).cpu().numpy()
                part = state.part(self._heads.start, len(content), self._layout)
                self._transport.put(state.ticket.name(rank), sealed(part.begin(), content))
        except Exception as error:  # its blocks are free either way
            self._log("send", "the state of request %s is not sent: %r", order.request_id, error)
            with suppress(Exception):  # an empty part is damaged: no engine waits for it
                self._transport.put(state.ticket.name(rank), [])
        with self._lock:
            self._done.finished_sending.add(order.request_id)

    def _fetch(self, order: BlockOrder, after: Any) -> None:
        failed, end = True, time.monotonic() + self._wait_s
        try:
            with self._beside(after):
                ids = self._ids(order)
                for rank, theirs in sources(self._heads, order.state.ticket.ranks, self._num_heads):
                    self._write(ids, theirs, self._content(order, rank, theirs, end))
                if self._stream is not None:
                    self._stream.synchronize()
            failed = False
        except (OSError, DamagedFileError, MismatchError, TimeoutError) as error:
            self._log("fetch", "request %s computes its prompt itself: %s", order.request_id, error)
        except Exception as error:
            self._log("bug", "request %s computes its prompt itself: %r", order.request_id, error)
        with self._lock:
            self._done.finished_recving.add(order.request_id)
            if failed:
                self._done.failed_recving.add(order.request_id)

    def _content(self, order: BlockOrder, rank: int, heads: range, end: float) -> torch.Tensor:
        """Wait for a part of a state, and return its blocks, `[blocks, ..., heads, bytes]`.

        TimeoutError: it has not come in time, or the state has been dropped, by another request
        with its ticket. Other errors are those of `State.fetch`.
        """
        count, (_, pieces, _, head_bytes) = len(order.blocks), self._pages.shape
        shape = count, pieces, len(heads), head_bytes
        part = order.state.part(heads.start, count, self._layout)
        num_bytes = torch.Size(shape).numel()
        while True:
            found = order.state.fetch(self._transport, rank, part, num_bytes)
            if found is not None:
                return torch.frombuffer(found, dtype=torch.uint8).view(shape)
            if not order.state.is_there(self._transport):
                raise TimeoutError("its state was dropped meanwhile")
            if time.monotonic() > end:
                raise TimeoutError(f"the blocks of its state did not come in {self._wait_s:g} s")
            time.sleep(_POLL_S)

    def _write(self, ids: torch.Tensor, theirs: range, content: torch.Tensor) -> None:
        """Write those KV heads of a part that this rank has."""
        mine = self._heads
        first, end = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        found = content[:, :, first - theirs.start : end - theirs.start].to(self._pages.device)
        self._pages[:, :, first - mine.start : end - mine.start].index_copy_(0, ids, found)

    @property
    def _layout(self) -> str:
        """How the KV heads of a block lie in its memory, which all parts of a state share."""
        return f"{self._pages.shape[1]} times {self._pages.shape[3]} bytes"

    def _ids(self, order: BlockOrder) -> torch.Tensor:
        return torch.tensor(order.blocks, dtype=torch.int64, device=self._pages.device)

    def _beside(self, after: Any) -> AbstractContextManager[Any]:
        """Work on a stream beside the steps', behind what these have launched by now."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)
