# SPDX-License-Identifier: Apache-2.0
"""The connector's registration, and a worker's half over memory in place of a cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
    supports_hma,
)

from vllm_pyramid.plugin import register
from vllm_pyramid.transfer.connector import PyramidConnector
from vllm_pyramid.transfer.folder import FolderTransport
from vllm_pyramid.transfer.states import BlockOrder, State, Ticket, TransferOrders
from vllm_pyramid.transfer.workers import WorkerTransfers

BLOCKS, PAGE = 12, 64
STATE = State(Ticket("0123456789abcdef" * 2), "namespace", "key")


def test_it_is_registered_once() -> None:
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("PyramidConnector")
    assert found is PyramidConnector
    assert supports_hma(found)


def test_it_needs_a_policy() -> None:
    transfer = KVTransferConfig(kv_connector="PyramidConnector", kv_role="kv_both")
    config: Any = SimpleNamespace(kv_transfer_config=transfer, additional_config={})
    with pytest.raises(ValueError, match="start the server with --kv-policy"):
        PyramidConnector(config, KVConnectorRole.SCHEDULER, None)


class Failing:
    """A transport over which nothing goes."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        raise self._error

    def get(self, name: str, peer: str, largest: int) -> memoryview | None:
        raise self._error

    def drop(self, names: Sequence[str], peer: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderTransport]:
    transport = FolderTransport(str(tmp_path / "states"), 60.0, 1 << 20)
    yield transport
    transport.close()


def worker(transport: Any, seed: int, rank: int = 0) -> tuple[WorkerTransfers, torch.Tensor]:
    """A worker with random pages of two KV heads."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 256, (BLOCKS, PAGE), dtype=torch.uint8, generator=generator)
    found = WorkerTransfers(transport, rank, 1 + rank, 2 * (1 + rank), wait_s=0.2)
    found.bind(pages, 2, PAGE // 2)
    return found, pages


def results(found: WorkerTransfers) -> KVConnectorTransferResults:
    """What the worker reports, once it reports something."""
    end = time.monotonic() + 10
    while True:
        done = found.results()
        if done.finished_sending or done.finished_recving:
            assert not found.results().finished_recving, "reported once"
            return done
        assert time.monotonic() < end
        time.sleep(0.005)


def test_blocks_go_from_one_cache_into_another(folder: FolderTransport) -> None:
    sender, source = worker(folder, 0)
    fetcher, target = worker(folder, 1)
    before = target.clone()
    sent, filled = [3, 11, 0, 7], [8, 2, 5, 1]
    sender.start(TransferOrders(sent=[BlockOrder("p", STATE, sent)]))
    assert results(sender).finished_sending == {"p"}
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", STATE, filled)]))
    done = results(fetcher)
    assert (done.finished_recving, done.failed_recving) == ({"d"}, set())
    assert torch.equal(target[filled], source[sent])
    others = [block for block in range(BLOCKS) if block not in filled]
    assert torch.equal(target[others], before[others])
    for one in (sender, fetcher):
        one.close()


def test_blocks_may_come_later_than_they_are_waited_for(folder: FolderTransport) -> None:
    sender, source = worker(folder, 0)
    fetcher, target = worker(folder, 1)
    STATE.put_head(folder, 5)
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", STATE, [1])]))
    time.sleep(0.05)
    sender.start(TransferOrders(sent=[BlockOrder("p", STATE, [4])]))
    assert not results(fetcher).failed_recving
    assert torch.equal(target[1], source[4])


@pytest.mark.parametrize(
    "state", [STATE._replace(key="other"), STATE._replace(namespace="other")], ids=["key", "name"]
)
def test_blocks_of_another_state_are_not_written(folder: FolderTransport, state: State) -> None:
    sender, _ = worker(folder, 0)
    fetcher, target = worker(folder, 1)
    before = target.clone()
    sender.start(TransferOrders(sent=[BlockOrder("p", STATE, [4, 5])]))
    results(sender)
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", state, [1, 2])]))
    assert results(fetcher).failed_recving == {"d"}
    fetcher.start(TransferOrders(fetched=[BlockOrder("e", STATE, [1, 2, 3])]))
    assert results(fetcher).failed_recving == {"e"}
    assert torch.equal(target, before)


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("a bug")])
def test_whatever_fails_is_reported(error: Exception) -> None:
    """A request that waits for ever would hold its blocks for ever."""
    found, pages = worker(Failing(error), 0)
    before = pages.clone()
    found.start(TransferOrders(sent=[BlockOrder("p", STATE, [4])]))
    assert results(found).finished_sending == {"p"}
    found.start(TransferOrders(fetched=[BlockOrder("d", STATE, [4])]))
    done = results(found)
    assert done.finished_recving == done.failed_recving == {"d"}
    assert torch.equal(pages, before)


def test_a_part_that_finds_no_room_is_not_waited_for(tmp_path: Path) -> None:
    transport = FolderTransport(str(tmp_path / "states"), 60.0, PAGE)
    sender, _ = worker(transport, 0)
    sender.start(TransferOrders(sent=[BlockOrder("p", STATE, [4, 5])]))
    results(sender)
    fetcher = WorkerTransfers(transport, 0, 1, 2, wait_s=60.0)
    fetcher.bind(torch.zeros(BLOCKS, PAGE, dtype=torch.uint8), 2, PAGE // 2)
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", STATE, [1, 2])]))
    assert results(fetcher).failed_recving == {"d"}
    transport.close()


def test_what_never_comes_is_given_up(folder: FolderTransport) -> None:
    found, _ = worker(folder, 0, rank=1)
    STATE.put_head(folder, 5)
    begun = time.monotonic()
    found.start(TransferOrders(fetched=[BlockOrder("d", STATE, [4])]))
    assert results(found).failed_recving == {"d"}
    assert time.monotonic() - begun > 0.2


def test_what_was_dropped_is_not_waited_for(folder: FolderTransport) -> None:
    """Requests with one ticket would else hold all threads, one after the other."""
    fetcher = WorkerTransfers(folder, 0, 1, 2, wait_s=60.0)
    fetcher.bind(torch.zeros(BLOCKS, PAGE, dtype=torch.uint8), 2, PAGE // 2)
    STATE.put_head(folder, 5)
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", STATE, [4])]))
    time.sleep(0.05)
    assert not fetcher.results().finished_recving, "its part may still come"
    folder.drop(STATE.ticket.names, "")
    assert results(fetcher).failed_recving == {"d"}


def share(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What vLLM puts into the cache of a rank, of `[blocks, heads, ...]` of all."""
    each = max(whole.shape[1] // ranks, 1)
    first = rank * whole.shape[1] // ranks
    return whole[:, first : first + each]


@pytest.mark.parametrize(
    ("tokens_first", "dtype"), [(False, torch.float8_e4m3fn), (True, torch.float32)]
)
@pytest.mark.parametrize(
    ("theirs", "mine"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (8, 4), (4, 8)]
)
def test_ranks_of_other_numbers(folder, theirs, mine, tokens_first, dtype) -> None:
    """Every rank gets its KV heads, wherever they are; 8 ranks hold each of 4 heads twice."""
    heads, tokens, size = 4, 8, 6
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(BLOCKS, heads, tokens, size, generator=generator).to(dtype)
    sent, filled = [3, 11, 0, 7], [8, 2, 5, 1]
    state = STATE._replace(ticket=STATE.ticket._replace(ranks=theirs))

    def start(rank: int, ranks: int, held: torch.Tensor) -> WorkerTransfers:
        """A worker whose cache is `held`, `[blocks, heads, tokens, size]` in some order."""
        found = WorkerTransfers(folder, rank, ranks, heads, wait_s=5.0)
        in_memory = held.transpose(1, 2) if tokens_first else held
        pages = in_memory.view(torch.uint8).view(BLOCKS, -1)
        rows = 1 if tokens_first else tokens
        found.bind(pages, held.shape[1], rows * size * held.element_size())
        return found

    def cache(of: torch.Tensor) -> torch.Tensor:
        if not tokens_first:
            return of.contiguous()
        return of.transpose(1, 2).contiguous().transpose(1, 2)

    senders = [start(rank, theirs, cache(share(whole, rank, theirs))) for rank in range(theirs)]
    state.put_head(folder, 5)
    for one in senders:
        one.start(TransferOrders(sent=[BlockOrder("p", state, sent)]))
    for rank in range(mine):
        target = cache(torch.zeros_like(share(whole, rank, mine)))
        fetcher = start(rank, mine, target)
        fetcher.start(TransferOrders(fetched=[BlockOrder("d", state, filled)]))
        assert not results(fetcher).failed_recving
        expected = share(whole, rank, mine)
        assert torch.equal(target[filled].view(torch.uint8), expected[sent].view(torch.uint8))
        others = [block for block in range(BLOCKS) if block not in filled]
        assert not target[others].view(torch.uint8).any()
        fetcher.close()
    for one in senders:
        assert results(one).finished_sending == {"p"}, "also a rank whose heads another sends"
        one.close()


def test_blocks_in_another_layout_are_not_written(folder: FolderTransport) -> None:
    sender, _ = worker(folder, 0)
    fetcher, target = worker(folder, 1)
    fetcher.bind(target, 2, 1)  # a row of a head instead of all its rows
    before = target.clone()
    sender.start(TransferOrders(sent=[BlockOrder("p", STATE, [4, 5])]))
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", STATE, [1, 2])]))
    assert results(fetcher).failed_recving == {"d"}
    assert torch.equal(target, before)


def test_a_block_with_other_heads_is_refused(folder: FolderTransport) -> None:
    found = WorkerTransfers(folder, 0, 2, 4, wait_s=1.0)
    with pytest.raises(RuntimeError, match="1 KV heads of 64 bytes where 2 were expected"):
        found.bind(torch.zeros(BLOCKS, PAGE, dtype=torch.uint8), 1, PAGE)
