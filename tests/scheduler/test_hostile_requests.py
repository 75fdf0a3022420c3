# SPDX-License-Identifier: Apache-2.0
"""No request's own settings cost the front end, the scheduler or a worker more than its tokens do.

Every body is shorter than 64 KB. It is refused with a short reason, or accepted within its limits;
either way its cost is that of an honest request of as many tokens and at most `MOST_MS` more, as
the reference machine takes them (`tests/plumbing/reference_time.py`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.plumbing.reference_time import ReferenceTime
from tests.scheduler.harness import Setup, hasher, make_scheduler
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.allocator import point_of_tokens
from vllm_pyramid.policy.limits import MAX_KEYS, MAX_TURNS
from vllm_pyramid.policy.planning import plan_prompt
from vllm_pyramid.policy.request import check_request, for_request
from vllm_pyramid.scheduler.scheduler import PyramidScheduler
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

MOST_MS = 2.0
TURNS, MOST_CALLS = 116, 40  # to plan one more turn of that many
PROMPT = 60_000  # a body of 64 KB has hardly more
LAYERS = 80
TIMES = 7
ROUNDS = 3  # of them, at most: a busy machine may disturb all of one
Body = Callable[[int], dict[str, Any]]  # of the number of the try, so that no cache helps


def _turns(start: int, step: int, count: int = MAX_TURNS) -> list[int]:
    return [start + step * number for number in range(count)]


HONEST: Body = lambda i: {"kv_budget": 300 + i}  # noqa: E731
REFUSED: dict[str, Body] = {
    "a budget of 4,200 digits": lambda i: {"kv_budget": f"12.{i}{'3' * 4200}%"},
    "a budget of 60,000 digits": lambda i: {"kv_budget": f"12.{i}{'3' * 60_000}%"},
    "a budget of blanks": lambda i: {"kv_budget": " " * 60_000 + str(i)},
    "a budget of 60,000 nines": lambda i: {"kv_budget": "9" * 60_000},
    "a huge number": lambda i: {"kv_budget": 10**4000 + i},
    "a floor of 4,000 digits": lambda i: {"kv_min_tokens": 10**4000 + i},
    "unknown keys": lambda i: {f"kv_{i}_{number:04d}": 1 for number in range(4000)},
    "keys of others": lambda i: {f"{i}_{number:04d}": 1 for number in range(4000)},
    "near misses": lambda i: {f"kv_budge{number}": 1 for number in range(3000)},
    "a key of 60 KB": lambda i: {"kv_budget" * 7000: i},
    "a policy of 60 KB": lambda i: {"kv_policy": "pyramidkv" * 7000},
    "an application of 60 KB": lambda i: {"kv_application": "x" * 60_000},
    "an application without averages": lambda i: {"kv_application": f"name {i}"},
    "top_n without V in host memory": lambda i: {"kv_top_n": 1000 + i},
    "a list for a budget": lambda i: {"kv_budget": [1] * 20_000},
    "10,000 turns": lambda i: {"kv_turns": _turns(i + 1, 1, 10_000)},
    "falling turns": lambda i: {"kv_turns": [5] * 20_000},
    "turns of text": lambda i: {"kv_turns": ["x" * 100] * 500},
    "turns behind the prompt": lambda i: {"kv_turns": _turns(2_000_000, 1 + i)},
    "a huge turn": lambda i: {"kv_turns": [1, 10**4000]},
}
ACCEPTED: dict[str, Body] = {
    "most turns": lambda i: {"kv_budget": 300 + i, "kv_turns": _turns(500 + i, 48)},
    "turns all along": lambda i: {"kv_budget": 300 + i, "kv_turns": _turns(500 + i, 116)},
    "turns of a token": lambda i: {"kv_budget": 300 + i, "kv_turns": _turns(900 + i, 1)},
    "turns at the end": lambda i: {"kv_budget": 300 + i, "kv_turns": _turns(9000 - i, 32)},
    "turns of a share": lambda i: {
        "kv_budget": f"{i + 1}.123457%",
        "kv_min_tokens": 0,
        "kv_turns": _turns(100 + i, 48),
    },
    "nearly all of each turn": lambda i: {
        "kv_budget": f"90.00000{i}%",
        "kv_min_tokens": 0,
        "kv_turns": _turns(400 + i, 48),
    },
    "other software's values": lambda i: {
        **{f"other {number}": "x" * 400 for number in range(MAX_KEYS - 1)},
        "kv_budget": 300 + i,
    },
}
SETUP = Setup(
    budget="12%",
    policy_args=(),
    num_layers=LAYERS,
    block_size=16,
    max_model_len=PROMPT + 512,
    max_num_batched_tokens=2048,
    long_prefill_token_threshold=2048,
    prefix_caching=True,
    admission="forecast",
)


@pytest.fixture(scope="module")
def scheduler() -> PyramidScheduler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        made = make_scheduler(SETUP, LAYERS * (SETUP.max_model_len // 16 + 1))
    assert isinstance(made, PyramidScheduler)
    return made


def _params(extra: dict[str, Any]) -> SamplingParams:
    params = SamplingParams(max_tokens=16)
    params.extra_args = extra
    return params


def _ms(time: ReferenceTime, step: Callable[..., object], *args: Any) -> float:
    """Return the process time of a step that finds no plan in the caches."""
    plan_prompt.cached.clear()
    point_of_tokens.cached.clear()
    return time.ms(step, *args)


class Costs:
    """What the front end, the scheduler and a worker take of the reference machine, in ms."""

    def __init__(self, scheduler: PyramidScheduler, body: Body, name: str) -> None:
        self.refused: str | None = None
        self.turns_evict = 0
        self._engine = scheduler
        self._tracker = EvictionTracker(scheduler.pyramid.policy, LAYERS, 16, 4)
        self._time = ReferenceTime()
        costs = [self._costs(f"{name} {index}", body(index)) for index in range(TIMES)]
        self.front, self.scheduler, self.worker = (
            self._time.on_reference(min(of)) for of in zip(*costs, strict=True)
        )

    def _costs(self, name: str, extra: dict[str, Any]) -> tuple[float, float, float]:
        params = _params(extra)
        request = Request(name, list(range(PROMPT)), params, None, block_hasher=hasher(16))
        front = _ms(self._time, self._check, params)
        scheduler = _ms(self._time, self._add, request)
        assert request.sampling_params is not None
        sent = request.sampling_params.extra_args
        assert (sent is None) == (self.refused is not None), "the worker would follow it"
        # A worker follows what the scheduler sends on, and stands what no scheduler has seen.
        worker = _ms(self._time, self._tracker.add, name, PROMPT, sent)
        worker = max(worker, _ms(self._time, for_request, self._engine.pyramid.policy, extra))
        self._engine.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return front, scheduler, worker

    def more_than(self, honest: Costs) -> list[str]:
        """Where the request costs more than an honest one and `MOST_MS`, and how much."""
        more = []
        for place in ("front", "scheduler", "worker"):
            cost, usual = getattr(self, place), getattr(honest, place)
            print(text := f"{place}: {cost:.3f} ms, honest {usual:.3f} ms")
            more += [text] if cost >= usual + MOST_MS else []
        return more

    def _check(self, params: SamplingParams) -> None:
        try:
            check_request(self._engine.pyramid.policy, params).check_turns(PROMPT)
        except ValueError as error:
            self.refused = str(error)

    def _add(self, request: Request) -> None:
        self._engine.add_request(request)
        plan = self._engine.coordinator.plans.of(request.request_id)
        self.turns_evict = len(plan.inner)
        self._engine.cached_prefix(request, PROMPT - 1)


@pytest.fixture(scope="module")
def honest(scheduler: PyramidScheduler) -> Costs:
    Costs(scheduler, HONEST, "warm")
    return Costs(scheduler, HONEST, "honest")


@pytest.mark.parametrize("name", [*REFUSED, *ACCEPTED])
def test_a_hostile_request_costs_what_its_tokens_cost(scheduler, honest, name) -> None:
    body = {**REFUSED, **ACCEPTED}[name]
    if "huge" not in name and "4,000" not in name:  # numbers that JSON in Python cannot write
        assert len(json.dumps(body(6))) < 65_536
    for _ in range(ROUNDS):
        costs = Costs(scheduler, body, name)
        if not (more := costs.more_than(honest)):
            break
    assert not more
    assert (costs.refused is not None) == (name in REFUSED)
    assert (costs.turns_evict > 0) == ("turn" in name and name in ACCEPTED), costs.turns_evict
    assert costs.refused is None or len(costs.refused) < 400


@pytest.mark.parametrize("policy", ["pyramidinfer", "pyramidkv-chunked", "h2o", "kcache", "xkv"])
def test_a_new_budget_costs_a_plan_and_no_more(policy: str) -> None:
    """Of the longest prompt that 64 KB of text can have, with the policies that plan most."""
    served = load_policy(policy)

    def plan(extra: dict[str, Any], index: int) -> None:
        found = for_request(served, extra)
        assert found.error is None, found.error
        found.plan(60_000 - index, LAYERS, 16)

    def body(index: int) -> dict[str, Any]:
        if policy == "kcache":
            return {"kv_top_n": 9 + index}
        return {"kv_budget": 900 + index if policy == "h2o" else f"{30 - index}.123456%"}

    plan({}, 0)
    least = _least_ms(lambda index: plan(body(index), index))
    print(policy, f"{least:.3f} ms")
    assert least < MOST_MS


@pytest.mark.parametrize("share", [5, 50, 90])
@pytest.mark.parametrize("allocator", ["uniform", "arithmetic", "shares"])
def test_no_allocator_takes_longer_for_many_turns(allocator: str, share: int) -> None:
    """Those of policies; an application's own is called for one turn after the other."""
    plan = _plan_of(allocator, share)
    calls, least = _calls_of_a_turn(plan), _least_ms(lambda index: plan(index, MAX_TURNS))
    print(allocator, share, f"{calls:.1f} calls, {least:.3f} ms")
    assert calls < MOST_CALLS
    assert least < 3 * MOST_MS


def _plan_of(allocator: str, share: int) -> Callable[[int, int], int]:
    """Return a function that plans request `index` with `turns` turns, and returns its points."""
    fields = {"shares": [1 + layer * 7 % 13 for layer in range(LAYERS)]}
    parts = {"kind": allocator, **(fields if allocator == "shares" else {})}
    served = load_policy("pyramidkv").model_copy(update={"allocator": parts})

    def plan(index: int, turns: int) -> int:
        extra = {"kv_budget": f"{share}.{index}%", "kv_turns": _turns(500 + index, 116, turns)}
        found = for_request(served, extra)
        assert found.error is None, found.error
        points = len(found.plan(PROMPT, LAYERS, 16).points)
        assert turns < TURNS or points > 50
        return points

    return plan


def _calls_of_a_turn(plan: Callable[[int, int], int]) -> float:
    """Return the calls, of Python and of C, that one more planned turn takes."""
    plan(1, TURNS)  # imports, and what is kept for the policy
    counts = []
    for turns in (TURNS // 4, TURNS):
        calls: Counter[str] = Counter()
        plan_prompt.cached.clear()
        point_of_tokens.cached.clear()
        sys.setprofile(lambda _frame, event, _arg, calls=calls: calls.update([event]))
        try:
            points = plan(2, turns)
        finally:
            sys.setprofile(None)
        counts.append((points, calls["call"] + calls["c_call"]))
    (fewer, least), (more, most) = counts
    return (most - least) / (more - fewer)


def _least_ms(step: Callable[[int], object]) -> float:
    """What the step of a number takes of the reference machine, at least."""
    time, costs = ReferenceTime(), []
    for _ in range(ROUNDS):
        costs += [_ms(time, step, index) for index in range(1, TIMES)]
        if (least := time.on_reference(min(costs))) < MOST_MS:
            break
    return least
