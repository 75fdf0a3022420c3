# SPDX-License-Identifier: Apache-2.0
"""The scheduler ends requests that failed in the worker, and no others; the engine goes on."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from tests.scheduler.harness import Setup
from tests.scheduler.test_scheduler import ASYNC, SYNC, Pair
from vllm_pyramid.compat.side_channel import attach_report, read_report, take_policy_stats
from vllm_pyramid.policy.allocator import CurveAllocator
from vllm_pyramid.step.hooks import SchedulerHooks


def _fail(pair: Pair, output: Any, name: str) -> ModelRunnerOutput:
    """What the worker returns of a step in which a request's scores were NaN."""
    result: ModelRunnerOutput = pair.worker.execute(output)
    report = read_report(result)
    report.failures[name] = ("scores", "layer 1: NaN")
    if name in report.evictions:  # not what the plan says, since nothing has moved
        report.evictions[name] = report.evictions[name]._replace(tokens=1)
    return attach_report(result, report)


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_failed_request_ends_with_the_reason_and_the_others_go_on(max_tokens: int) -> None:
    pair = Pair(SYNC)
    pair.add("wrong", 40, max_tokens=max_tokens)
    pair.add("right", 40)
    output = pair.scheduler.schedule()
    (outputs,) = pair.scheduler.update_from_output(output, _fail(pair, output, "wrong")).values()
    ended = {one.request_id: one for one in outputs.outputs if one.finish_reason is not None}
    assert set(ended) == {"wrong"}
    assert ended["wrong"].finish_reason == FinishReason.ERROR
    assert ended["wrong"].new_token_ids == []
    assert ended["wrong"].stop_reason == "KV policy: layer 1: NaN"
    stats = take_policy_stats(outputs.scheduler_stats)
    assert stats is not None and stats["now"]["failed_requests"] == {"scores": 1}
    assert set(pair.scheduler.requests) == {"right"}
    pair.step()
    assert not pair.scheduler.pyramid.failed.dropped_reports
    pair.scheduler.finish_requests(
        "right", pair.scheduler.requests["right"].status.FINISHED_ABORTED
    )
    pair.step()
    assert pair.coordinator.block_pool.get_num_free_blocks() == pair.worker.num_blocks
    assert not pair.coordinator.plans.records


def test_with_a_step_in_flight() -> None:
    pair = Pair(ASYNC)
    pair.add("wrong", 40)
    first = pair.scheduler.schedule()
    failed = _fail(pair, first, "wrong")
    second = pair.scheduler.schedule()
    late = pair.worker.execute(second)
    (outputs,) = pair.scheduler.update_from_output(first, failed).values()
    assert [one.finish_reason for one in outputs.outputs] == [FinishReason.ERROR]
    pair.scheduler.update_from_output(second, late)
    assert pair.coordinator.block_pool.get_num_free_blocks() == pair.worker.num_blocks


class Reporting(SchedulerHooks):
    """A method whose report is `what`."""

    name = "reporting"

    def __init__(self, what: Any) -> None:
        self.what = what

    def on_request_finished(self, request_id: str) -> dict[str, Any]:
        if isinstance(self.what, Exception):
            raise self.what
        return {"of_method": self.what}


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (object(), "TypeError: .*object"),
        ("x" * (1 << 18), r"ValueError: it has \d+ bytes, more than 262144"),
    ],
)
def test_a_report_that_cannot_be_sent_is_left_out(what: Any, reason: str) -> None:
    import re

    pair = Pair(SYNC)
    pair.scheduler.pyramid.hooks.append(Reporting(what))
    pair.add("r", 40, max_tokens=1)
    (outputs,) = pair.step().values()
    (only,) = outputs.outputs
    assert only.finish_reason == FinishReason.LENGTH and len(only.new_token_ids) == 1
    assert set(only.kv_transfer_params) == {"report_error"}
    assert re.match(reason, only.kv_transfer_params["report_error"])
    assert pair.scheduler.pyramid.reports.policy_stats()["dropped_reports"] == 1


class Raising(SchedulerHooks):
    """A method that fails at every message."""

    name = "raising"

    def on_eviction(self, request_id: str, plan: Any, resolved: Any) -> None:
        if request_id == "wrong":
            raise KeyError(request_id)

    def on_step_report(self, report: Any, is_known: Any) -> None:
        raise TypeError(report)


def test_a_hook_of_the_scheduler_that_raises_ends_its_request_at_most() -> None:
    pair = Pair(SYNC)
    pair.scheduler.pyramid.hooks.append(Raising())
    pair.add("wrong", 40)
    pair.add("right", 40)
    output = pair.scheduler.schedule()
    result = pair.worker.execute(output)
    report = read_report(result)
    report.methods["raising"] = "a report"
    (outputs,) = pair.scheduler.update_from_output(output, attach_report(result, report)).values()
    ended = {one.request_id: one.finish_reason for one in outputs.outputs}
    assert ended == {"wrong": FinishReason.ERROR} and "right" in pair.scheduler.requests
    assert pair.scheduler.pyramid.failed.ended == {"method": 1}
    assert pair.scheduler.pyramid.failed.dropped_reports == 1
    pair.step()


class Fussy(CurveAllocator):
    """Fails for prompts of one length."""

    kind: Literal["fussy"] = "fussy"

    def curve(self, mean: int, num_layers: int, capacity: int) -> np.ndarray:
        if capacity == 41 - 6:
            raise LookupError("no curve")
        return np.full(num_layers, float(mean))


class Refusing(SchedulerHooks):
    """A method that fails when some request comes, and whose counters fail."""

    name = "refusing"

    def on_request_added(self, request_id: str, salt: str, application: str, plan: Any) -> None:
        if request_id == "refused":
            raise OSError("not this one")

    def totals(self) -> dict[str, int]:
        raise KeyError("totals")


@pytest.mark.parametrize("setup", [SYNC, ASYNC])
def test_a_method_that_fails_when_a_request_comes_ends_that_request(setup: Setup) -> None:
    pair = Pair(setup)
    policy = pair.scheduler.pyramid.policy.model_copy(update={"allocator": Fussy()})
    pair.scheduler.pyramid.planner._policy = pair.worker.tracker.policy = policy
    pair.scheduler.pyramid.hooks.append(Refusing())
    assert pair.scheduler.pyramid.planner._hooks is pair.scheduler.pyramid.hooks
    for name, length in (("right", 40), ("wrong", 41), ("refused", 42)):
        pair.add(name, length, max_tokens=3)
    reasons: dict[str, Any] = {}
    tokens: list[int] = []
    for _ in range(8):
        for outputs in pair.step().values():
            for one in outputs.outputs:
                tokens += one.new_token_ids
                if one.finish_reason is not None:
                    reasons[one.request_id] = (one.finish_reason, one.stop_reason)
        if not pair.scheduler.requests and not pair.in_flight:
            break
    # A step runs with the others before they end, and what it samples is dropped.
    assert reasons["right"][0] == FinishReason.LENGTH and len(tokens) == 3
    for name, text in (("wrong", "LookupError: no curve"), ("refused", "OSError: not this one")):
        assert reasons[name][0] == FinishReason.ERROR
        assert reasons[name][1].startswith("KV policy: the plan of the policy 'pyramidkv'")
        assert text in reasons[name][1]
    assert pair.scheduler.pyramid.failed.ended == {"method": 2}
    assert pair.scheduler.pyramid.failed.dropped_reports > 0
    assert pair.coordinator.block_pool.get_num_free_blocks() == pair.worker.num_blocks
    assert not pair.coordinator.plans.records
