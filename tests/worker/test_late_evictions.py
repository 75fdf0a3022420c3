# SPDX-License-Identifier: Apache-2.0
"""Levels and orders of all layers together are those of layers one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.pretended_device import PretendedDevice
from tests.shifted_worker import Host, Worker, launch_tables, marks_of, order
from vllm_pyramid.attention import step_end
from vllm_pyramid.plan import LateEviction, PlanMismatchError
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step import eviction_memory
from vllm_pyramid.worker.late_evictions import LateEvictions

PROMPTS = {"a": 90, "b": 85, "c": 130, "d": 9}
STEPS = [{"a": 30, "b": 85, "d": 9}, {"a": 60, "c": 130, "d": 1}]
# A request, and the level to which it is ordered.
ORDERS = [("a", 0), ("c", 1), ("a", 1), ("b", 0)]


def _policy(name: str) -> Policy:
    args: dict[str, Any] = {"schedule": "pressure", "schedule.levels": ["60%"], "min_tokens": 0}
    if name not in ("streaming-llm", "keydiff"):
        args["window"] = 16 if name == "auto" else 8
    return load_policy(name, "25%", args=args)


def _run(
    policy: Policy, device: Any, monkeypatch: pytest.MonkeyPatch, *, at_step_end: bool
) -> tuple[Worker, LateEvictions, dict[str, tuple[int, list[float]]]]:
    launch_tables(monkeypatch, device)
    more = [partial(LateEvictions, policy)]
    worker = Worker(policy, device, PROMPTS, at_step_end=at_step_end, layers=4, more=more)
    (late,) = worker.more
    losses = {}
    for step in STEPS:
        worker.step(step)
        waits = len(getattr(device, "waits", []))
        losses |= late.take_losses()  # read back
        del getattr(device, "waits", [])[waits:]
    given: dict[str, list[tuple[int, int]]] = {}
    for name, level in ORDERS:
        given.setdefault(name, []).append((PROMPTS[name], level))
        order(worker, late, name, given[name])
        worker.step({"a": 1, "b": 1, "c": 1})
    assert worker.failed == {}
    monkeypatch.undo()
    return worker, late, losses


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "auto", "streaming-llm", "keydiff"])
def test_levels_and_orders_of_all_layers_together(name, in_pieces, monkeypatch) -> None:
    """Marks, losses and caches are the same; on a device nothing waits for it."""
    policy = _policy(name)
    alone, late, losses = _run(policy, Host(), monkeypatch, at_step_end=False)
    assert not alone.joins and set(losses) == {"a", "b", "c"}
    if in_pieces:  # of a few rows, which divide a request's layers
        monkeypatch.setattr(eviction_memory, "SCORES_BYTES", 4 * 2 * 300)
        monkeypatch.setattr(step_end, "QUERIES_BYTES", 1)
    with PretendedDevice() as device:
        together, same, same_losses = _run(policy, device, monkeypatch, at_step_end=True)
    assert together.joins and device.waits == []
    groups = [len(one.layers) for one in same._requests["c"].marks]
    assert sum(groups) == 4 and (max(groups) < 4 if in_pieces else len(groups) <= 2)
    assert torch.equal(alone.cache, together.cache)
    for request, (point, shares) in losses.items():
        assert same_losses[request] == (point, pytest.approx(shares, abs=1e-6))
        marks = marks_of(late, request)
        for layer, of_layer in marks_of(same, request).items():
            assert torch.equal(of_layer, marks[layer]), (request, layer)


def test_a_request_for_which_there_is_no_memory_gets_no_levels(monkeypatch) -> None:
    """Others of its step do; an order for it would leave its survivors where they are."""
    host = Host()
    launch_tables(monkeypatch, host)
    policy = _policy("snapkv")
    worker = Worker(policy, host, PROMPTS, layers=4, more=[partial(LateEvictions, policy)])
    (late,) = worker.more
    late.without = ["b"]
    worker.step({"a": 90, "b": 85})
    assert list(late.take_losses()) == list(late._requests) == ["a"]
    with pytest.raises(PlanMismatchError, match="up to token 85 and has no levels"):
        late.carry_out({"b": LateEviction(((85, 0),), [])}, worker.tracker.order)
