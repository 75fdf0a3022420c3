# SPDX-License-Identifier: Apache-2.0
"""One request whose scores are NaN, beside others: they are evicted as without it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.pretended_device import PretendedDevice
from tests.shifted_worker import Host, Worker, launch_tables, policies
from tests.steps import make_tracker
from tests.worker.test_pretended_device import PIECES, PROMPTS, SOLVED, STEPS
from vllm_pyramid.plan import PlanMismatchError
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.allocator import CurveAllocator
from vllm_pyramid.step.failures import KINDS, METHOD, SCORES, Failure, Failures
from vllm_pyramid.step.hooks import MethodHooks, StepHooks
from vllm_pyramid.step.score_check import check_attention
from vllm_pyramid.step.step import WorkerRequest
from vllm_pyramid.worker.adapter import RunnerAdapter
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

# Some look at no key, so a key that is NaN is nothing to their scores; others compare and count, so
# their scores are numbers whatever the keys are.
EVICTING = [p for p in policies() if p.evicts]
CPU = torch.device("cpu")


def _run(policy: Policy, device: Any, spoiled: str | None, *, graphs: bool = False) -> Worker:
    worker = Worker(
        *(policy, device, PROMPTS, len(PIECES) + 8),
        graphs=graphs,
        at_step_end=not isinstance(device, Host),
    )
    worker.spoiled = spoiled
    for scheduled in (PIECES if policy.allocator.thins_prompts else STEPS)[:7]:
        worker.step(scheduled)
    return worker


def _blocks(worker: Worker, name: str) -> torch.Tensor:
    """What a request's blocks hold in all layers."""
    row = list(PROMPTS).index(name)
    return worker.cache[worker.tables[:, row].long()]


@pytest.mark.parametrize("policy", EVICTING, ids=lambda policy: policy.name)
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_a_request_with_nan_fails_alone(policy, on_device, monkeypatch) -> None:
    if not on_device:
        launch_tables(monkeypatch, Host())
        right, worker = _run(policy, Host(), None), _run(policy, Host(), "c")
    else:
        with PretendedDevice() as device:
            launch_tables(monkeypatch, device)
            right, worker = _run(policy, device, None), _run(policy, device, "c")
        assert all(line.startswith(SOLVED) for _, line in device.waits)
    assert right.failed == {}
    assert set(worker.failed) == {"c"}
    assert worker.failed["c"].kind == SCORES and "NaN" in worker.failed["c"].reason
    for name in ("a", "b"):
        assert torch.equal(_blocks(worker, name), _blocks(right, name))
    assert worker.evictions > 0


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_keys_that_are_chosen_in_every_step_are_looked_at_in_every_step(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is evicted; a key of a generated token is NaN, and then no key can be chosen."""
    policy = load_policy("kcache", None, {"top_n": 16})
    with PretendedDevice() as device:
        used = device if on_device else Host()
        launch_tables(monkeypatch, used)
        worker = Worker(policy, used, PROMPTS, copies=on_device)
        for scheduled in STEPS[:6]:
            worker.step(scheduled)
        assert worker.failed == {}
        worker.spoiled = "c"
        worker.step(STEPS[6])
    assert device.waits == []
    assert {name: failure.kind for name, failure in worker.failed.items()} == {"c": SCORES}


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_pages_that_cannot_be_ranked_end_their_request_alone(
    on_device: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of a prompt are NaN, and so are the summaries of its pages; nothing is evicted."""
    policy = next(policy for policy in policies() if policy.name == "select")
    with PretendedDevice() as device:
        used = device if on_device else Host()
        launch_tables(monkeypatch, used)
        right, worker = (_run(policy, used, spoiled, graphs=graphs) for spoiled in (None, "c"))
    assert device.waits == []
    assert right.failed == {}
    assert {name: failure.kind for name, failure in worker.failed.items()} == {"c": SCORES}
    assert "NaN" in worker.failed["c"].reason
    compared = 0
    for ours, theirs in zip(worker.outs, right.outs, strict=True):
        for row in (0, 1):  # "a" and "b"; in steps with fewer tokens "c" has chosen nothing yet
            if ours[row].isfinite().all():
                assert torch.equal(ours[row], theirs[row])
                compared += 1
    assert compared > 6


class TwoRanks:
    """A rank of two: the sum adds what the other has sent."""

    rank, size = 0, 2

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.other


def test_a_failure_of_one_rank_is_one_of_all() -> None:
    failures, names = Failures(), ["x", "y", "z"]
    failures.add(["y"], Failure(METHOD, "of this rank"))
    failures.sum_over_ranks(names, TwoRanks(torch.tensor([[0, 0, 1.0], [0, 0, 0]])), CPU)  # type: ignore[arg-type]
    taken = failures.take().wait()
    assert taken["y"] == Failure(METHOD, "of this rank")
    assert taken["z"].kind == SCORES and set(taken) == {"y", "z"}
    assert failures.take().wait() == {}  # reported once


def test_flags_of_the_device_join_what_the_host_knows_of_all_ranks() -> None:
    with PretendedDevice() as device:
        failures, names = Failures(), ["x", "y", "z"]
        failures.add(["y"], Failure(METHOD, "of this rank"))
        for row in ([True, False], [False, False]):  # of two layers
            failures.flag(Failure(SCORES, ""), ["z", "x"], device.put(torch.tensor(row)))
        other = device.put(torch.tensor([[1.0, 0, 0], [0, 0, 0]]))
        failures.sum_over_ranks(names, TwoRanks(other), device.device)  # type: ignore[arg-type]
        assert device.waits == []
        taken = failures.take().wait()
    assert {name: failure.kind for name, failure in taken.items()} == {
        "x": SCORES,
        "y": METHOD,
        "z": SCORES,
    }


def test_a_stage_tells_the_next_one() -> None:
    first, last = Failures(), Failures()
    first.add(["y"], Failure(SCORES, "NaN"))
    first.add(["z"], Failure(METHOD, "KeyError"))
    message = first.on_host(["x", "y", "z"])
    assert message.tolist() == [[0, 1, 0], [0, 0, 1]] and len(message) == len(KINDS)
    last.add_from_host(["x", "y", "z"], message)
    kinds = {name: failure.kind for name, failure in last.take().wait().items()}
    assert kinds == {"y": SCORES, "z": METHOD}
    assert np.array_equal(last.on_host(["z", "y"]), [[0, 1], [1, 0]])


def test_an_exception_that_concerns_no_request_is_raised() -> None:
    failures = Failures()
    for error, names in ((KeyError("x"), []), (PlanMismatchError("a chunk"), ["x"])):
        with pytest.raises(type(error)):
            failures.add_error(names, "a hook", error)
    for name in ("x", "y"):
        failures.add_error([name], "a hook", KeyError(name))
    assert failures.of["y"].reason == "a hook: KeyError: 'y'"
    failures.forget("x")
    assert set(failures.take().wait()) == {"y"}


class Forgetful(StepHooks):
    """Hooks that fail wherever one request is concerned."""

    def without_graphs(self, requests: Iterable[WorkerRequest], computed: Any) -> bool:
        raise KeyError([request.request_id for request in requests])

    def forget(self, request_id: str) -> None:
        raise OSError(request_id)


class Planless(CurveAllocator):
    """Fails in the worker alone: the scheduler has made the plan."""

    kind: Literal["planless"] = "planless"

    def curve(self, mean: int, num_layers: int, capacity: int) -> Any:
        if capacity == 70 - 6:
            raise LookupError("no curve")
        return np.full(num_layers, float(mean))


def _tracker() -> EvictionTracker:
    policy = load_policy("pyramidkv", 20, {"window": 4, "sinks": 2, "min_tokens": 0})
    policy = policy.model_copy(update={"allocator": Planless()})
    tracker = make_tracker(policy, 2, 16, 4)
    tracker.hooks = MethodHooks([Forgetful()])
    return tracker


def test_a_plan_that_one_worker_cannot_make_fails_its_request() -> None:
    tracker = _tracker()
    for name, length in (("right", 80), ("wrong", 70)):
        tracker.add(name, length, None)
    assert set(tracker.failures.of) == {"wrong"}
    assert "LookupError: no curve" in tracker.failures.of["wrong"].reason
    lens = np.array([80, 70], np.int32)
    step = tracker.begin_step(["right", "wrong"], lens, np.zeros_like(lens), lens)
    assert step.evictions is not None
    assert [step.evictions.request_ids[i] for i in step.evictions.shortened(0)] == ["right"]


def test_hooks_that_fail_before_a_step_or_behind_a_request() -> None:
    tracker = _tracker()
    tracker.add("r", 80, None)
    assert tracker.needs_eager_step(["r"], np.zeros(1, np.int32))
    assert "`without_graphs` of Forgetful: KeyError" in tracker.failures.of["r"].reason
    tracker.remove("r")
    assert tracker.failures.of == {}


def test_what_other_workers_may_wait_in_is_raised() -> None:
    tracker = _tracker()
    tracker.failures.has_peers = True
    with pytest.raises(LookupError):  # the others evict from it
        tracker.add("wrong", 70, None)
    failures = tracker.failures
    with pytest.raises(KeyError):
        failures.add_error(["x"], "a hook", KeyError("x"), peers_wait=True)
    failures.add_error(["x"], "a hook", KeyError("x"))
    assert set(failures.of) == {"x"}
    step = tracker.step
    step.failures.reports_evictions = True
    with pytest.raises(KeyError):  # a stage that reports with evictions alone
        step.add_error("a hook", KeyError("x"))


class Runner:
    """What the adapter precedes."""

    def execute_model(self) -> str:
        raise KeyError("in a step")

    def sample_tokens(self) -> str:
        raise KeyError("in a step")


@pytest.mark.parametrize("call", ["execute_model", "sample_tokens"])
def test_a_worker_that_fails_unreported_ends(call: str) -> None:
    runner = type("Adapted", (RunnerAdapter, Runner), {})()
    for reports_errors, error in ((True, KeyError), (False, SystemExit)):
        runner.pyramid = SimpleNamespace(
            reports_errors=reports_errors, end_step=lambda output: output
        )
        with pytest.raises(error):
            getattr(runner, call)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_attention_of_every_type_is_looked_at(dtype: torch.dtype) -> None:
    tracker = make_tracker(load_policy("streaming-llm", 20), 2, 16, 4)
    lens = np.array([80, 90], np.int32)
    for name, length in zip(("right", "wrong"), lens.tolist(), strict=True):
        tracker.add(name, length, None)
    step = tracker.begin_step(["right", "wrong"], lens, np.zeros_like(lens), lens)
    out = torch.ones(170, 4, 16)
    out[40] = torch.nan  # not a request's last query
    check_attention(step, 1, out.to(dtype))
    assert tracker.failures.of == {}
    out[169, 3, 7] = torch.nan
    check_attention(step, 1, out.to(dtype))
    assert {name: failure.kind for name, failure in tracker.failures.of.items()} == {
        "wrong": SCORES
    }
