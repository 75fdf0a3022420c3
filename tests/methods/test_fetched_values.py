# SPDX-License-Identifier: Apache-2.0
"""V that is fetched to a device: memory, parts of a step, prefetching; numbers beside the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shifted_worker import Host, Worker, launch_tables
from vllm_pyramid.methods.host_values.fetch import FetchedValues
from vllm_pyramid.methods.host_values.worker import FetchedValueCache
from vllm_pyramid.policy import load_policy

PROMPTS = {"a": 100, "b": 90, "c": 96, "d": 64}
HOST: dict[str, Any] = {"kind": "host", "top_n": 6}


def make_worker(monkeypatch: pytest.MonkeyPatch, *, copies: bool = True) -> Worker:
    device = Host()
    launch_tables(monkeypatch, device)
    return Worker(load_policy("kcache", args={"values": HOST}), device, PROMPTS, copies=copies)


def fetched_of(worker: Worker) -> FetchedValues:
    (hooks,) = worker.tracker.hooks
    assert isinstance(hooks, FetchedValueCache)
    fetched: FetchedValues = hooks._fetched
    return fetched


def test_memory_is_counted_and_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch)
    (hooks,) = worker.tracker.hooks.cache
    fetched = fetched_of(worker)
    buffers = [*fetched._new, *fetched._buffers, fetched._workspace]
    assert hooks.bytes_of_buffers() == sum(buffer.nbytes for buffer in buffers) > 2**27
    hooks.allocate(50)  # vLLM makes its cache a second time
    assert [buffer.data_ptr() for buffer in buffers] == [
        buffer.data_ptr() for buffer in [*fetched._new, *fetched._buffers, fetched._workspace]
    ]


def test_more_prompts_than_the_buffers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pages: two prompts of two each, then one of four; one between them decodes."""
    workers = [make_worker(monkeypatch, copies=copies) for copies in (True, False)]
    fetched = fetched_of(workers[0])
    assert fetched._pages == 5
    parts = []
    monkeypatch.setattr(workers[0].ops, "copy_pages", count(workers[0].ops.copy_pages, parts))
    steps = [
        {"a": 40, "b": 40, "d": 64, "c": 40},
        {"a": 50, "b": 30, "d": 1, "c": 50},
        {"a": 10, "b": 20, "d": 1, "c": 6},
        {"a": 1, "b": 1, "d": 1, "c": 1},
    ]
    for scheduled in steps:
        for worker in workers:
            worker.step(scheduled)
    # Three layers have V on the host; nothing is there yet in the first step, and in the last one
    # everybody chooses. Page of the buffer, row and entry of the table.
    second = [[[0, 0, 0], [1, 0, 1]], [[0, 1, 0], [1, 1, 1]], [[0, 3, 0], [1, 3, 1]]]
    third = [
        [[0, 0, 0], [1, 0, 1], [2, 0, 2]],
        [[0, 1, 0], [1, 1, 1], [2, 1, 2]],
        [[0, 3, 0], [1, 3, 1], [2, 3, 2]],
    ]
    assert parts == 3 * second + 3 * third
    for out, right in zip(*(worker.outs for worker in workers), strict=True):
        assert torch.equal(out, right)
    assert workers[0].reports == workers[1].reports
    assert torch.equal(*(worker.host_values() for worker in workers))


def count(copy: Any, parts: list[Any]) -> Any:
    def counted(target: Any, source: Any, table: Any, places: Any) -> None:
        parts.append(places.tolist())
        copy(target, source, table, places)

    counted.__name__ = "copy_pages"
    return counted


def test_the_next_layers_v_is_fetched_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's by the layer below it, which keeps V on the device."""
    worker = make_worker(monkeypatch)
    worker.step({"a": 40})
    log: list[str] = []
    fetched = fetched_of(worker)
    launch, attend = fetched._copies.launch, worker.ops.paged_attention

    def launched(copy: Any, *args: Any, **kwargs: Any) -> Any:
        if copy.__name__ == "copy_pages":
            log.append("fetch")
        return launch(copy, *args, **kwargs)

    def attended(*args: Any, **kwargs: Any) -> None:
        log.append("attend")
        attend(*args, **kwargs)

    monkeypatch.setattr(fetched._copies, "launch", launched)
    monkeypatch.setattr(worker.ops, "paged_attention", attended)
    worker.step({"a": 40})
    assert log == ["fetch", "fetch", "attend", "fetch", "attend", "attend"]


def test_steps_without_requests_give_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiling, warm-up, the capture of graphs."""
    worker = make_worker(monkeypatch)
    worker.step({"a": 40})
    call = worker.calls[-1]
    worker.tracker.idle_step(1)
    out = torch.full_like(call.query, torch.nan)
    assert worker.contexts[1].attend(call, out) and not out.any()
    assert worker.tracker.end_step() == ({}, {})
