# SPDX-License-Identifier: Apache-2.0
"""Answers compared with the whole cache: who is sampled, what is replayed when, who falls back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from vllm.sampling_params import SamplingParams

from tests.frontend.test_overrides import served
from vllm_pyramid.compat.finished_requests import FinishedRequest
from vllm_pyramid.frontend import metrics as prometheus
from vllm_pyramid.frontend import shadow as module
from vllm_pyramid.frontend.sessions import NO_TENANT, Key
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.frontend.shadow import APPLICATION_KEY, Shadow, can_be_compared
from vllm_pyramid.frontend.shadow_judge import MIN_COMPARISONS, WINDOW, ShadowJudge
from vllm_pyramid.frontend.shadow_metrics import MAX_LABELS, Comparison, Labels, ShadowMetrics
from vllm_pyramid.policy.limits import MAX_APPLICATIONS
from vllm_pyramid.policy.request import check_request

pytestmark = pytest.mark.cpu

MAIL, CODE = Key(NO_TENANT, "mail"), Key(NO_TENANT, "code")
GOOD, BAD = Comparison(30, 29), Comparison(30, 20)


class Metrics:
    """What `ShadowMetrics` would count; Prometheus' names exist once in a process."""

    def __init__(self) -> None:
        self.full: dict[str, int] = {}
        self.added: list[tuple[str, bool]] = []
        self.dropped: list[str] = []

    def add(self, application: str, comparison: Comparison, *, evicted: bool) -> None:
        self.added.append((application, evicted))

    def count_full(self, application: str, change: int) -> None:
        self.full[application] = self.full.get(application, 0) + change

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)


def judge(share: float = 1.0, floor: float | None = 0.9) -> tuple[ShadowJudge, Metrics]:
    metrics: Any = Metrics()
    return ShadowJudge(share, floor, metrics), metrics


def test_a_share_is_sampled_evenly() -> None:
    known, _ = judge(0.25)
    assert [known.takes(MAIL) for _ in range(8)] == [False, False, False, True] * 2
    assert [known.takes(CODE) for _ in range(4)] == [False, False, False, True]


def test_an_application_falls_alone_and_comes_back() -> None:
    known, metrics = judge()
    for _ in range(MIN_COMPARISONS - 1):
        known.add(MAIL, BAD, evicted=True)
    assert not known.runs_full(MAIL)
    known.add(MAIL, BAD, evicted=True)
    assert known.runs_full(MAIL) and metrics.full == {"mail": 1}
    for _ in range(20):
        known.add(CODE, GOOD, evicted=True)
    assert not known.runs_full(CODE) and not known.runs_full(Key("another tenant", "mail"))
    assert sum(known.takes(MAIL) for _ in range(100)) == 10, "few go on with the policy"
    for _ in range(WINDOW - 1):
        known.add(MAIL, GOOD, evicted=True)
    assert known.runs_full(MAIL)
    known.add(MAIL, GOOD, evicted=True)
    assert not known.runs_full(MAIL) and metrics.full == {"mail": 0}


def test_the_noise_floor_decides_nothing() -> None:
    known, metrics = judge()
    for _ in range(20):
        known.add(MAIL, BAD, evicted=False)
    assert not known.runs_full(MAIL) and metrics.added == [("mail", False)] * 20
    (row,) = known.listing()
    assert row["noise_floor"] == pytest.approx(2 / 3) and row["agreement"] is None


def test_without_a_floor_it_only_measures_and_short_answers_do_not_decide() -> None:
    known, _ = judge(floor=None)
    for _ in range(20):
        known.add(MAIL, BAD, evicted=True)
    assert not known.runs_full(MAIL) and known.listing()[0]["agreement"] == pytest.approx(2 / 3)
    known, _ = judge()
    for _ in range(20):
        known.add(MAIL, Comparison(1, 0), evicted=True)
    assert not known.runs_full(MAIL)


def test_the_operator_restores_an_application() -> None:
    known, metrics = judge()
    for key in (MAIL, CODE):
        for _ in range(MIN_COMPARISONS):
            known.add(key, BAD, evicted=True)
    assert known.restore("mail", "other") == 0 and known.restore("mail") == 1
    assert not known.runs_full(MAIL) and known.runs_full(CODE)
    assert known.restore() == 1 and metrics.full == {"mail": 0, "code": 0}


class Engine:
    """An engine client whose whole cache finds every second token likeliest."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={})
        self.started = self.aborted = 0
        self.may_end = asyncio.Event()

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        self.started += 1
        assert params.extra_args == {"kv_policy": "full"} and prompt["cache_salt"]
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        tokens = prompt["prompt_token_ids"]
        rows = [
            {token: SimpleNamespace(rank=1 + at % 2, logprob=-0.5)}
            for at, token in enumerate(tokens)
        ]
        yield SimpleNamespace(prompt_logprobs=[None, *rows[1:]])


def request(name: str, extra: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    params = SamplingParams(temperature=0, max_tokens=8, extra_args=extra, **changes)
    return SimpleNamespace(
        request_id=name,
        sampling_params=params,
        cache_salt=None,
        prompt_token_ids=[1] * 400,
        prompt_embeds=None,
        mm_features=None,
        lora_request=None,
    )


def shadow(**settings: Any) -> tuple[Shadow, Metrics]:
    own = served(**{"kv_shadow": "100%", "kv_shadow_floor": "90%", **settings})
    metrics: Any = Metrics()
    return Shadow(own, 2048, metrics), metrics


def send(known: Shadow, one: SimpleNamespace) -> Any:
    """Pass a request through the front end as `PolicyRequestChecks` does."""
    one.sampling_params = known.begin(one.sampling_params)
    found = check_request(known._settings.policy, one.sampling_params)
    return known.choose(one, found)


def test_only_greedy_answers_are_compared() -> None:
    assert can_be_compared(request("a"))
    others = {"n": 2, "temperature": 1}, {"min_tokens": 4}, {"repetition_penalty": 1.2}
    for changes in (*others, {"thinking_token_budget": 0}, {"extra_args": {"target": 7}}):
        one = request("a")
        for key, value in changes.items():
            setattr(one.sampling_params, key, value)
        assert not can_be_compared(one)
    one = request("a")
    one.sampling_params.temperature = 0.7
    assert not can_be_compared(one)


def test_a_replay_waits_for_an_idle_engine_and_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        known, metrics = shadow()
        engine = Engine()
        monkeypatch.setattr(module, "_client", lambda: engine)
        monkeypatch.setattr(module, "_POLL_S", 0.001)
        engine.output_processor.request_states["other"] = object()
        send(known, request("a", {"kv_application": "mail"}))
        report = {"evicted_tokens": 5}
        known.on_finished(MAIL, FinishedRequest([1] * 400, [2] * 41, -41 * 0.25, report))
        known.on_finished("full", FinishedRequest([1] * 9, [2] * 9, None, report))
        for after in ([], [41]):  # under pressure: all is the whole cache's
            kept = {"evicted_tokens": 0, "evicted_after": after}
            known.on_finished(MAIL, FinishedRequest([1] * 400, [2] * 41, None, kept))
        await asyncio.sleep(0.02)
        assert engine.started == 0, "another request runs"
        engine.output_processor.request_states.clear()
        while engine.started == 0:
            await asyncio.sleep(0.001)
        send(known, request("b"))  # a request comes: the replay ends, and comes again
        while engine.started == 1:
            await asyncio.sleep(0.001)
        assert engine.aborted == 1 and metrics.added == []
        engine.may_end.set()
        while not metrics.added:
            await asyncio.sleep(0.001)
        assert metrics.added == [("mail", True)] and metrics.dropped == []
        (found,) = known.judge._applications[MAIL].recent
        assert found.tokens == 40 and found.agreed == 20
        assert found.lost == pytest.approx(41 * 0.25) and found.logprobs == 41
        later = {"evicted_tokens": 0, "evicted_after": [11, 30]}  # preempted behind its evictions
        known.on_finished(MAIL, FinishedRequest([1] * 400, [2] * 41, None, later))
        while len(metrics.added) < 2:
            await asyncio.sleep(0.001)
        assert metrics.added[1] == ("mail", True)
        assert known.judge._applications[MAIL].recent[1][:2] == (30, 15)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_fallen_application_runs_with_the_whole_cache() -> None:
    known, _ = shadow()
    named = {"kv_application": "mail", "kv_budget": 64, "kv_turns": [100], "other": 1}
    one = request("a", named)
    assert send(known, one).policy.name == "pyramidkv"
    assert APPLICATION_KEY not in one.sampling_params.extra_args
    for _ in range(MIN_COMPARISONS):
        known.judge.add(MAIL, BAD, evicted=True)
    one = request("b", named)
    found = send(known, one)
    assert found.policy.name == "full" and found.exact and found.turns == (100,)
    assert one.sampling_params.extra_args == {
        "kv_policy": "full",
        "kv_turns": [100],
        "kv_turn_mode": "exact",
        "other": 1,
    }
    report: dict[str, Any] = {}
    known.on_finishing("full", report)
    assert report == {"kv_shadow": "full"}
    known.on_finishing(MAIL, untouched := {})
    assert untouched == {}
    assert send(known, request("c", {"kv_application": "code"})).policy.name == "pyramidkv"
    with pytest.raises(ValueError, match="cannot be set by requests"):
        send(known, request("d", {APPLICATION_KEY: "x"}))


def test_names_that_come_first_do_not_take_all_labels() -> None:
    names = [f"attack {number}" for number in range(3 * MAX_LABELS)]
    labels, shown = Labels(removable=True), set()
    for name in names[:MAX_LABELS]:
        shown.add(labels.use(name)[0])
    for number in range(20 * MAX_LABELS):  # an honest one among ever new names
        label, gone = labels.use(f"new {number}")
        shown = (shown | {label}) - {gone}
        if number % 16 == 0:
            label, gone = labels.use("mail")
            shown = (shown | {label}) - {gone}
            assert label == "mail"
        assert len(shown) <= MAX_LABELS and ("mail" in shown)
    fixed = Labels(removable=False)
    assert [fixed.use(name)[0] for name in names] == [
        *names[:MAX_LABELS],
        *["(others)"] * 2 * MAX_LABELS,
    ]


def test_series_of_applications_follow_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    for name, kind in (("Counter", Counter), ("Gauge", Gauge)):
        monkeypatch.setattr(prometheus, name, partial(kind, registry=registry))
    metrics = ShadowMetrics()
    metrics.count_full("mail", 1)
    for number in range(MAX_LABELS):
        metrics.add(f"attack {number}", GOOD, evicted=True)
    for _ in range(3):
        metrics.add("mail", BAD, evicted=True)
    metrics.add("code", GOOD, evicted=False)
    text = generate_latest(registry).decode()
    assert 'shadow_requests_total{application="mail",cache="evicted"} 3.0' in text
    assert 'shadow_full{application="mail"} 1.0' in text
    assert 'shadow_full{application="(others)"} 0.0' in text
    assert text.count("shadow_requests_total{") == MAX_LABELS
    metrics.count_full("mail", -1)
    assert 'shadow_full{application="mail"} 0.0' in generate_latest(registry).decode()


def test_new_names_do_not_bring_a_fallen_application_back() -> None:
    known, _ = judge()
    other = Key("another tenant", "mail")
    for key in (MAIL, other):
        for _ in range(MIN_COMPARISONS):
            known.add(key, BAD, evicted=True)
    for number in range(MAX_APPLICATIONS + 10):
        known.takes(Key(NO_TENANT, f"new {number}"))
    assert known.runs_full(MAIL) and known.runs_full(other)
    assert len(known.listing()) == MAX_APPLICATIONS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_shadow": 0}, "must be a share such as 5%"),
        ({"kv_shadow": "101%"}, "must be a share"),
        ({"kv_shadow": "x"}, "must be a share"),
        ({"kv_shadow_floor": "90%"}, "kv_shadow, which is not given"),
        ({"kv_shadow": "1%", "kv_policy": "full"}, "'full' keeps every token"),
        ({"kv_shadow": "1%", "kv_policy": "pyramidinfer"}, "held whole may not fit"),
        ({"kv_shadow": "1%", "kv_max_request_budget": "50%"}, "forbids it"),
        ({"kv_shadow": "1%", "kv_request_overrides": "budget"}, "forbids it"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVSettings.from_additional_config({"kv_policy": "pyramidkv", **settings})


def test_settings_travel() -> None:
    own = served(kv_shadow="5%", kv_shadow_floor=0.9)
    assert own.shadow == 0.05 and own.shadow_floor == 0.9
    assert served().shadow is None
