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
from vllm_pyramid.transfer.orders import BlockOrder, TransferOrders
from vllm_pyramid.transfer.wire import StateId
from vllm_pyramid.transfer.workers import WorkerTransfers

pytestmark = pytest.mark.cpu

BLOCKS, PAGE = 12, 64
STATE = StateId("0123456789abcdef" * 2, "namespace", "key")


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

    def drop(self, name: str, peer: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderTransport]:
    transport = FolderTransport(str(tmp_path / "states"), 60.0, 1 << 20)
    yield transport
    transport.close()


def worker(transport: Any, seed: int, rank: int = 0) -> tuple[WorkerTransfers, torch.Tensor]:
    """A worker with random pages."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 256, (BLOCKS, PAGE), dtype=torch.uint8, generator=generator)
    found = WorkerTransfers(transport, rank, wait_s=0.2)
    found.bind(pages)
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
    assert folder.get(STATE.part_name(0), "", 1 << 20) is None, "it is dropped"
    for one in (sender, fetcher):
        one.close()


def test_blocks_may_come_later_than_they_are_waited_for(folder: FolderTransport) -> None:
    sender, source = worker(folder, 0)
    fetcher, target = worker(folder, 1)
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", STATE, [1])]))
    time.sleep(0.05)
    sender.start(TransferOrders(sent=[BlockOrder("p", STATE, [4])]))
    assert not results(fetcher).failed_recving
    assert torch.equal(target[1], source[4])


@pytest.mark.parametrize(
    "state", [STATE._replace(key="other"), STATE._replace(namespace="other")], ids=["key", "name"]
)
def test_blocks_of_another_state_are_not_written(folder: FolderTransport, state: StateId) -> None:
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
    fetcher = WorkerTransfers(transport, 0, wait_s=60.0)
    fetcher.bind(torch.zeros(BLOCKS, PAGE, dtype=torch.uint8))
    fetcher.start(TransferOrders(fetched=[BlockOrder("d", STATE, [1, 2])]))
    assert results(fetcher).failed_recving == {"d"}
    transport.close()


def test_what_never_comes_is_given_up(folder: FolderTransport) -> None:
    found, _ = worker(folder, 0, rank=1)
    begun = time.monotonic()
    found.start(TransferOrders(fetched=[BlockOrder("d", STATE, [4])]))
    assert results(found).failed_recving == {"d"}
    assert time.monotonic() - begun > 0.2
