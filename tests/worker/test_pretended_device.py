# SPDX-License-Identifier: Apache-2.0
"""No policy waits for the device in a step: prompts in chunks, evictions, decoding, all presets.

The same steps on the host must give the same cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.pretended_device import PretendedDevice, data_of
from tests.shifted_worker import BLOCK, Host, Worker, launch_tables, policies
from vllm_pyramid.methods.pages.choosing import TILE, padded
from vllm_pyramid.policy import Policy

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

PROMPTS = {"a": 70, "b": 45, "c": 101}
# Tokens of each step; the last chunk of a prompt has the queries that scorers look at.
STEPS = [
    {"a": 24, "b": 20},  # no prompt ends, and no request decodes
    {"a": 24, "b": 25},
    {"a": 22, "b": 1, "c": 48},
    {"a": 1, "b": 1, "c": 53},
    *({"a": 1, "b": 1, "c": 1} for _ in range(10)),
]
# The same for prompts that are computed in pieces, some while other requests decode.
PIECES = [
    {"a": 48, "b": 45},
    {"a": 22, "b": 1, "c": 48},
    {"a": 1, "b": 1, "c": 48},
    {"a": 1, "b": 1, "c": 5},
    *({"a": 1, "b": 1, "c": 1} for _ in range(72)),
]
# The one line that may wait, in steps in which prompts with open lengths end.
SOLVED = "methods/solved/worker.py: numbers = "


# The pretended device ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "do"),
    [
        ("a number of the host's is assigned", lambda x, i: x.__setitem__(i, 0.0)),
        ("_local_scalar_dense", lambda x, i: x.sum().item()),
        ("_local_scalar_dense", lambda x, i: bool((x > 0).any())),
        ("_local_scalar_dense", lambda x, i: x[i.sum()]),
        ("an index of truth values", lambda x, i: x[x > 0]),
        ("an index of the host's", lambda x, i: x[torch.tensor([1])]),
        ("nonzero", lambda x, i: torch.nonzero(x)),
        ("a copy to the host", lambda x, i: x.cpu()),
        ("a copy to the host", lambda x, i: torch.zeros(4).copy_(x)),
        ("a copy of pageable memory", lambda x, i: x.copy_(torch.zeros(4), non_blocking=True)),
        ("a copy of pageable memory", lambda x, i: torch.zeros(4).to(x.device)),
        ("a copy of pageable memory", lambda x, i: torch.zeros(4).pin_memory().to(x.device)),
    ],
)
def test_what_waits_is_noted(what: str, do: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    with PretendedDevice() as device:
        x, index = torch.ones(4, device=device.device), torch.zeros(2, device=device.device).long()
        assert device.waits == []
        do(x, index)
    assert [name for name, _ in device.waits] == [what]


def test_what_does_not_wait_is_not_noted() -> None:
    with PretendedDevice() as device:
        x = torch.arange(4.0, device=device.device)
        assert x.device.type != "cpu" and x[1:].device == x.device
        y = torch.zeros(4).pin_memory().to(x.device, non_blocking=True)
        y[1:] = 2.0
        y[torch.zeros(1, dtype=torch.int64, device=x.device)] = x[3]
        y += torch.where(x > 1, x, 0) * torch.tensor(2.0)
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(4)
    assert device.waits == []
    assert data_of(y).tolist() == [3.0, 2.0, 6.0, 8.0]


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    thins = policy.allocator.thins_prompts
    steps = PIECES if thins else STEPS
    with PretendedDevice() as device:
        launch_tables(monkeypatch, device)
        worker = Worker(policy, device, PROMPTS, answer=len(steps), at_step_end=True)
        for scheduled in steps:
            worker.step(scheduled)
    waits = [line for _, line in device.waits if not line.startswith(SOLVED)]
    assert waits == []
    solved = policy.allocator.defers
    assert len(device.waits) == (3 if solved else 0)  # three steps in which prompts end
    monkeypatch.undo()
    same = Host()
    launch_tables(monkeypatch, same)
    on_host = Worker(policy, same, PROMPTS, answer=len(steps), copies=False)
    for scheduled in steps:
        on_host.step(scheduled)
    if policy.schedule.every and thins:  # blocks have left the window
        assert worker.evictions > len(PROMPTS)
    assert on_host.evictions == worker.evictions and (worker.evictions > 0) == policy.evicts
    assert torch.equal(on_host.cache, worker.cache)
    assert len(on_host.outs) == len(worker.outs) > 0 or not policy.attends
    for out, right in zip(worker.outs, on_host.outs, strict=True):
        assert torch.equal(out, right)
    assert [len(tokens) for tokens in worker.survived] == ([61, 55, 34, 7] if thins else [])
    for tokens, right in zip(worker.survived, on_host.survived, strict=True):
        assert torch.equal(tokens, right)
    if not policy.copies_blocks:
        assert torch.equal(worker.host_values(), on_host.host_values())
    if policy.attends:
        assert worker.reports == on_host.reports and any(worker.reports)


@pytest.mark.parametrize(
    "policy", [one for one in policies() if one.attend.selects], ids=lambda policy: policy.name
)
def test_decode_steps_with_tensors_that_stay(monkeypatch, policy) -> None:
    """Where graphs of whole decode steps are captured: the same pages, and no wait."""

    def run(device: Any, graphs: bool) -> Worker:
        launch_tables(monkeypatch, device)
        worker = Worker(policy, device, PROMPTS, answer=len(STEPS), graphs=graphs)
        for scheduled in STEPS:
            worker.step(scheduled)
        return worker

    with PretendedDevice() as device:
        worker = run(device, True)
    assert device.waits == [] and worker.failed == {}
    plain = run(Host(), False)
    assert worker.reports == plain.reports and any(worker.reports)
    assert torch.equal(worker.cache, plain.cache)
    pages = padded(-(-worker.longest // BLOCK), TILE)  # lists are as long as any may be
    assert sum(call.block_table.shape[2] == pages for call in worker.calls) > 6
    assert len(worker.outs) == len(plain.outs) > 0
    for out, right in zip(worker.outs, plain.outs, strict=True):
        assert torch.equal(out, right)
