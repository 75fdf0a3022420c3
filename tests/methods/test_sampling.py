# SPDX-License-Identifier: Apache-2.0
"""Online sampling: which requests are solved, what the others get, and that the workers agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from tests.scheduler.harness import make_request
from tests.scheduler.test_refusals import Engine
from vllm_pyramid.methods.solved import SolvingAllocator
from vllm_pyramid.methods.solved import scheduler as sampling
from vllm_pyramid.methods.solved.scheduler import SampledShares
from vllm_pyramid.plan import DeferredPlan
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.request import ALLOCATOR_KEY

LAYERS = 3


def shares(**args: Any) -> SampledShares:
    solver = load_policy("xkv", 12, args).allocator
    assert isinstance(solver, SolvingAllocator)
    return SampledShares(solver, LAYERS)


def solve(sampled: SampledShares, request_id: str, keep: list[int]) -> None:
    plan = load_policy("xkv", 12).plan(40, LAYERS, 4)
    assert isinstance(plan, DeferredPlan)
    sampled.add(request_id, plan, plan.resolve(keep))


def test_the_first_requests_of_each_application_are_solved() -> None:
    sampled = shares(sample_first=2)
    assert sampled.shares_for("a0", "", "a") is None
    solve(sampled, "a0", [8, 8, 20])
    assert sampled.shares_for("a1", "", "a") is None
    assert sampled.shares_for("a2", "", "a") == ((0.0, 0.0, 1.0), 1), "the second is under way"
    solve(sampled, "a1", [14, 14, 8])
    assert sampled.shares_for("a3", "", "a") == ((0.25, 0.25, 0.5), 2)
    assert sampled.shares_for("b0", "", "b") is None, "another application knows nothing of it"


def test_a_share_of_the_requests_is_solved_evenly() -> None:
    sampled = shares(sample_share=0.1)
    solved = []
    for index in range(100):
        if sampled.shares_for(f"r{index}", "", "") is None:
            solved.append(index)
            solve(sampled, f"r{index}", [12, 12, 12])
    assert solved == list(range(0, 100, 10))


def test_everything_is_solved_until_an_average_is_known() -> None:
    sampled = shares(sample_first=1)
    assert all(sampled.shares_for(f"r{index}", "", "") is None for index in range(5))
    solve(sampled, "r3", [20, 8, 8])
    assert sampled.shares_for("r5", "", "") == ((1.0, 0.0, 0.0), 1)


def test_a_request_counts_once_and_only_if_it_was_sampled() -> None:
    sampled = shares(sample_first=1)
    sampled.shares_for("r", "", "")
    solve(sampled, "r", [20, 8, 8])
    solve(sampled, "r", [8, 8, 20])  # solved again after a preemption
    solve(sampled, "stranger", [8, 8, 20])
    assert sampled.shares_for("s", "", "") == ((1.0, 0.0, 0.0), 1)
    assert sampled.shares_for("t", "", "other") is None
    for name in ("r", "s", "t"):
        assert sampled.on_request_finished(name) == {}
    assert not sampled._of_request


def test_applications_do_not_add_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_APPLICATIONS", 3)
    sampled = shares(sample_first=1)
    for name in "abcdabc":
        sampled.shares_for(name, "", name)
        assert sum(map(len, sampled._salts.values())) <= 3
    (of_salt,) = sampled._salts.values()
    assert list(of_salt) == ["a", "b", "c"]
    solve(sampled, "d", [8, 8, 20])  # of an application that was forgotten meanwhile


def test_tenants_with_salts_of_their_own_share_no_average() -> None:
    sampled = shares(sample_first=1)
    assert sampled.shares_for("a0", "tenant a", "mail") is None
    solve(sampled, "a0", [8, 8, 20])
    assert sampled.shares_for("a1", "tenant a", "mail") == ((0.0, 0.0, 1.0), 1)
    assert sampled.shares_for("b0", "tenant b", "mail") is None
    assert sampled.shares_for("c0", "", "mail") is None
    solve(sampled, "b0", [20, 8, 8])
    assert sampled.shares_for("b1", "tenant b", "mail") == ((1.0, 0.0, 0.0), 1)
    assert sampled.shares_for("a2", "tenant a", "mail") == ((0.0, 0.0, 1.0), 1)


def test_a_tenant_with_many_applications_forgets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_APPLICATIONS", 4)
    sampled = shares(sample_first=1)
    sampled.shares_for("honest", "b", "mail")
    solve(sampled, "honest", [8, 8, 20])
    for index in range(20):
        sampled.shares_for(f"r{index}", "a", f"application {index}")
        assert sum(map(len, sampled._salts.values())) == sampled._num_applications <= 4
    assert sampled.shares_for("later", "b", "mail") == ((0.0, 0.0, 1.0), 1)
    for index in range(20):  # a salt each: the number stays bounded, and no salt stays empty
        sampled.shares_for(f"s{index}", f"salt {index}", "mail")
        assert sum(map(len, sampled._salts.values())) == sampled._num_applications <= 4
    assert all(sampled._salts.values())


def test_a_long_salt_is_not_kept() -> None:
    sampled = shares(sample_first=1)
    sampled.shares_for("r", "\ud800" + "x" * 100_000, "mail")
    assert [len(key) for key in sampled._salts] == [32]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"sample_first": 2, "sample_share": 0.5}, "exclude each other"),
        ({"sample_first": 2, "retention": 0.9}, "no set total"),
        ({"sample_first": 0}, "greater than or equal to 1"),
        ({"sample_share": 1.0}, "less than 1"),
    ],
)
def test_wrong_settings(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy("xkv", None, args)


# In the schedulers -------------------------------------------------------------------------------


class Pair(Engine):
    def __init__(self, **changes: Any) -> None:
        args = (("window", 6), ("sample_first", 1))
        super().__init__(policy="xkv", budget=14, policy_args=args, **changes)

    def run(self, *requests: tuple[str, int, dict[str, Any] | None]) -> dict[str, dict[str, Any]]:
        """Add them, and step until all have ended; their reports."""
        return self.finish(*(make_request(name, n, 4, extra) for name, n, extra in requests))

    def finish(self, *requests: Request) -> dict[str, dict[str, Any]]:
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.requests:
            self.step()
        return self.reports


@pytest.mark.parametrize("asynchronous", [False, True])
def test_later_requests_get_the_average_on_both_sides(asynchronous: bool) -> None:
    """The harness reads every cell, so a worker that kept other lengths would be seen."""
    pair = Pair(asynchronous=asynchronous)
    first = pair.run(("r0", 60, None))["r0"]
    solved = np.array(first["solved_tokens"]) - 6
    assert sum(solved) == 3 * 8
    reports = pair.run(
        ("r1", 60, None),
        ("r2", 41, {"kv_budget": 20}),
        ("other", 60, {"kv_application": "other"}),
        ("full", 60, {"kv_policy": "full"}),
        ("short", 9, None),
    )
    for name, n, budget in (("r1", 60, 14), ("r2", 41, 20)):
        report = reports[name]
        assert "solved_tokens" not in report and report["averaged_over"] == 1
        keep = 6 + 3 * (budget - 6) * solved / solved.sum()
        skips = [n - kept for kept in report["kept_tokens"]]
        for skip, wanted in zip(skips, keep, strict=True):
            assert skip in {(n - k) // 4 * 4 for k in (int(wanted), int(wanted) + 1)}
    assert sum(reports["other"]["solved_tokens"]) == 3 * 14
    for name in ("full", "short"):
        assert reports[name]["evicted_tokens"] == 0 and "averaged_over" not in reports[name]
    assert pair.worker.num_solved == 2
    scheduler = pair.scheduler
    assert not scheduler.coordinator.plans.records
    (sampled,) = scheduler.pyramid.hooks
    assert isinstance(sampled, SampledShares)
    assert not sampled._averaged and not sampled._of_request


@pytest.mark.parametrize("reports_cached", [True, False])
def test_averages_of_others_are_reported_where_the_cache_is(reports_cached: bool) -> None:
    pair = Pair(further=(("kv_report_cached", reports_cached),))
    pair.run(("r0", 60, None))
    assert ("averaged_over" in pair.run(("r1", 60, None))["r1"]) == reports_cached
    own = make_request("own", 60, 4, cache_salt="tenant")
    assert "solved_tokens" in pair.finish(own)["own"]
    again = pair.finish(make_request("again", 60, 4, cache_salt="tenant"))["again"]
    assert again["averaged_over"] == 1 and "solved_tokens" not in again


def test_the_clients_parameters_are_not_changed() -> None:
    pair = Pair()
    pair.run(("r0", 60, None))
    request = make_request("r1", 60, 4, {"kv_application": ""})
    params = request.sampling_params
    assert params is not None
    pair.scheduler.add_request(request)
    assert params.extra_args == {"kv_application": ""}
    assert request.sampling_params is not None and request.sampling_params.extra_args is not None
    sent = request.sampling_params.extra_args
    assert sent["kv_application"] == "" and sent[ALLOCATOR_KEY]["kind"] == "shares"
    assert len(sent[ALLOCATOR_KEY]["shares"]) == LAYERS


@pytest.mark.parametrize(
    "wrong",
    [
        {ALLOCATOR_KEY: {"kind": "shares", "shares": [1, 2]}},
        {ALLOCATOR_KEY: "nonsense"},
        {"kv_application": 3},
    ],
)
def test_what_no_front_end_let_through_ends_the_request(wrong: dict[str, Any]) -> None:
    pair = Pair()
    pair.scheduler.add_request(make_request("wrong", 60, 4, wrong))
    assert pair.step() == {"wrong": FinishReason.ERROR}
    assert not pair.scheduler.requests
    assert pair.run(("right", 60, None))["right"]["evicted_tokens"] > 0
