# SPDX-License-Identifier: Apache-2.0
"""Requests that no front end checked: the scheduler ends them with an error, and no other one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from tests.scheduler.checks import check_pool
from tests.scheduler.harness import PlainWorker, Setup, make_request, make_scheduler
from vllm_pyramid.policy.request import TEMPLATE_KEY

LIMITS = (("kv_request_overrides", "budget"), ("kv_max_request_budget", "50%"))


class Engine:
    """A scheduler and its worker."""

    def __init__(self, **changes: Any) -> None:
        self.setup = Setup(**changes)
        num_blocks = self.setup.blocks_of_longest + 60
        self.scheduler = make_scheduler(self.setup, num_blocks)
        self.worker = PlainWorker(self.scheduler.pyramid.policy, self.setup, num_blocks)
        self.reports: dict[str, dict[str, Any]] = {}
        report_of = self.scheduler.report_of

        def noted(request: Request) -> dict[str, Any]:
            self.reports[request.request_id] = report_of(request)
            return self.reports[request.request_id]

        self.scheduler.report_of = noted  # type: ignore[method-assign]

    def say(self, name: str, tokens: list[int], answer: int, *own: Any, **others: Any) -> list[int]:
        """Run a request alone; return its tokens with those of its answer."""
        request = make_request(name, tokens, answer, *own, hash_block_size=4, **others)
        self.scheduler.add_request(request)
        while self.scheduler.requests:
            self.step()
        return list(request.all_token_ids)

    def step(self) -> dict[str, FinishReason]:
        """Run a step; returns which requests have ended, and why."""
        output = self.scheduler.schedule()
        result = self.worker.execute(output)
        check_pool(self.scheduler.coordinator)
        return {
            done.request_id: done.finish_reason
            for outputs in self.scheduler.update_from_output(output, result).values()
            for done in outputs.outputs
            if done.finish_reason is not None
        }

    def check_refused(self, request: Request) -> None:
        """Add the request and an ordinary one: the first ends with an error, the other is whole."""
        self.scheduler.add_request(request)
        self.scheduler.add_request(make_request("right", 40, 2))
        ended = self.step()
        assert ended == {request.request_id: FinishReason.ERROR}
        while self.scheduler.requests:
            ended |= self.step()
        assert ended["right"] is not FinishReason.ERROR
        self.scheduler.schedule()
        coordinator = self.scheduler.coordinator
        assert coordinator.block_pool.get_num_free_blocks() == self.worker.num_blocks
        assert not coordinator.plans.records


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "extra", [{"kv_policy": "full"}, {"kv_min_tokens": 0}, {"kv_budget": "51%"}, {"kv_budget": 41}]
)
def test_what_the_operator_forbids(asynchronous: bool, extra: dict[str, Any]) -> None:
    engine = Engine(asynchronous=asynchronous, further=LIMITS)
    engine.check_refused(make_request("wrong", 80, 4, extra))
    engine.scheduler.add_request(make_request("allowed", 80, 1, {"kv_budget": "50%"}))
    ended: dict[str, FinishReason] = {}
    while engine.scheduler.requests:
        ended |= engine.step()
    assert ended == {"allowed": FinishReason.LENGTH}


@pytest.mark.parametrize("keep", [[0, 81], [40, 44, 79, 81], [5], "0-4"])
def test_spans_that_cannot_be_kept(keep: Any) -> None:
    Engine().check_refused(make_request("wrong", 80, 4, {"kv_keep": keep}))


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("pieces", [1, 3])
def test_streaming_input(max_tokens: int, pieces: int) -> None:
    engine = Engine()
    requests = [make_request("wrong", 40, max_tokens) for _ in range(pieces)]
    for request in requests:
        request.resumable = True
    *first, last = requests  # all pieces come under one id
    for request in first:
        engine.scheduler.add_request(request)
    engine.check_refused(last)


def test_images_whose_tokens_attend_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    request = make_request("wrong", 40, 4)
    request.mm_features = [SimpleNamespace(identifier="an image")]  # type: ignore[list-item]
    model = SimpleNamespace(is_mm_prefix_lm=True)
    monkeypatch.setattr(engine.scheduler.pyramid.planner, "_model_config", model)
    engine.check_refused(request)


def test_a_template_that_the_limit_leaves_out_is_reported() -> None:
    """It comes with the request, from the front end that has left it out."""
    engine, reports = Engine(), []
    for name, template in (("kept", [0, 8]), ("left out", None)):
        request = make_request(name, 40, 4, {TEMPLATE_KEY: template})
        engine.scheduler.add_request(request)
        reports.append(engine.scheduler.report_of(request))
    kept, left_out = reports
    assert kept["kv_keep"] == [0, 8] and "kv_template" not in kept
    assert "kv_keep" not in left_out
    assert left_out["kv_template"] == "left out: it exceeds --kv-max-request-budget"


@pytest.mark.parametrize("reports_cached", [True, False])
def test_bytes_that_a_cached_prefix_saves_are_reported_where_the_cache_is(reports_cached) -> None:
    engine = Engine(
        policy_args=(("window", 6), ("values", "host")),
        further=(("kv_report_cached", reports_cached),),
    )
    request, salted = make_request("r", 40), make_request("s", 40, cache_salt="a tenant's")
    for added in (request, salted):
        engine.scheduler.add_request(added)
    written = {"v_bytes_written", "v_bytes_read"}
    report = engine.scheduler.report_of(request)
    assert "v_bytes_read_per_token" in report
    assert written & report.keys() == (written if reports_cached else set())
    assert written <= engine.scheduler.report_of(salted).keys()


@pytest.mark.parametrize("reports_cached", [True, False])
@pytest.mark.parametrize("salt", [None, "a tenant's"])
def test_what_was_found_is_reported_to_its_tenant(reports_cached: bool, salt: str | None) -> None:
    further = (("kv_report_cached", reports_cached),)
    engine = Engine(policy="snapkv", budget=24, prefix_caching=True, further=further)
    reports = engine.reports

    def say(name: str, tokens: list[int], turns: list[int], salt: str | None) -> list[int]:
        return engine.say(name, tokens, 12, {"kv_turns": turns}, cache_salt=salt)

    said = say("first", list(range(100, 140)), [], salt)
    assert engine.scheduler.pyramid.reports.policy_stats()["turns"] == {"unknown": 1}
    later = [*said, *range(200, 230)]
    say("stranger", later, [40], "another tenant's")
    assert reports["stranger"]["resumed_tokens"] == 0, "a salt hides the sessions of others"
    say("second", later, [40], salt)
    report = reports["second"]
    assert engine.worker.num_resumed == 1
    if salt is None and not reports_cached:
        assert "resumed_tokens" not in report and "resumed_tokens" not in reports["first"]
        assert "resumed" not in report
    else:
        assert report["resumed_tokens"] >= 40
        assert report["resumed"] == {"tokens": report["resumed_tokens"], "from": "session"}
        assert "no earlier turn is known" in reports["first"]["resumed"]["because"]
        stranger = reports["stranger"]["resumed"]
        assert stranger["tokens"] == 0 and "at token 40 is not there" in stranger["because"]
    assert report["kv_turns"] == [40, len(later)]
    counts = engine.scheduler.pyramid.reports.policy_stats()["turns"]
    assert counts == {"unknown": 1, "missing": 1, "resumed": 1}


Say = Callable[..., tuple[list[int], dict[str, Any]]]


@pytest.fixture
def talk() -> tuple[Say, Engine]:
    """Say a prompt, and return its tokens with the answer's, and its report; and the engine."""
    engine = Engine(policy="snapkv", budget=24, prefix_caching=True, max_model_len=288)

    def say(tokens: list[int], turns: list[int] | None, *why: Any, **extra: Any) -> Any:
        name = f"r{len(engine.reports)}"
        settings = {**extra, **({"vllm_pyramid_why": list(why)} if why else {})}
        settings |= {} if turns is None else {"kv_turns": turns}
        return engine.say(name, tokens, 6, settings), engine.reports[name]

    return say, engine


def test_why_a_turn_resumed_no_more(talk: tuple[Say, Engine]) -> None:
    """Each reason that the scheduler finds, and the reasons of the front end that it passes on."""
    whole, engine = talk

    def say(tokens: list[int], turns: list[int] | None, *why: Any, **extra: Any) -> Any:
        mode = {} if turns is None else {"kv_turn_mode": "resume"}
        said, report = whole(tokens, turns, *why, **(mode | extra))
        return said, report.get("resumed")

    first = list(range(100, 140))
    said, resumed = say(first, [], "unknown")
    assert resumed["tokens"] == 0 and resumed["from"] is None
    assert "no earlier turn is known" in resumed["because"]
    more = list(range(200, 230))
    _, resumed = say([*said, *more], [40], "settings")
    assert resumed == {"tokens": resumed["tokens"], "from": "session"}, "found nevertheless"
    assert resumed["tokens"] >= 40
    _, resumed = say([*said, *more, 1], [40], "settings", kv_budget=30)
    assert resumed["from"] == "prefix" and "another policy, budget" in resumed["because"]
    _, resumed = say([*first, *more], [40], "differs", 32, 64, 46)
    assert resumed["tokens"] >= 40 and resumed["from"] == "session"
    assert "of 70 tokens, first differs between tokens 32 and 64" in resumed["because"]
    _, resumed = say([*first[:-1], 1, *more], [], "differs", 40, 40, 76)
    assert resumed["from"] == "prefix"
    assert "ends at token 40, inside the session's last turn" in resumed["because"]
    _, resumed = say([*said, *more, 2], [40], kv_turn_mode="exact")
    assert resumed["from"] == "prefix" and "kv_turn_mode is exact" in resumed["because"]
    _, resumed = say([*said, *more, 3], [40], kv_turn_mode="auto", kv_policy="full")
    assert resumed["from"] == "prefix" and "it keeps every token, so there" in resumed["because"]
    _, resumed = say([*first, 5, 6], [40])
    assert "has 2 tokens behind the turn before, and the last 6" in resumed["because"]
    _, resumed = say([*range(300, 370)], [20])
    assert resumed["tokens"] == 0 and "no earlier turn has evicted" in resumed["because"]
    _, resumed = say([*range(400, 470)], [45])
    assert resumed["tokens"] == 0 and "at token 45 is not there" in resumed["because"]
    wrongs: list[tuple[Any, ...]] = [("differs", 1), ("differs", "x", 1, 2), ("nonsense",), (5,)]
    for at, wrong in enumerate(wrongs, 5):
        tokens = list(range(100 * at, 100 * at + 70))
        assert "at token 45" in say(tokens, [45], *wrong)[1]["because"], wrong
    assert say([*range(900, 940)], None)[1] is None, "no turn of a conversation"
    counts = engine.scheduler.pyramid.reports.policy_stats()["turns"]
    assert counts == {
        "unknown": 1,
        "resumed": 1,
        "settings": 1,
        "differs": 2,
        "exact": 1,
        "cannot": 1,
        "short": 1,
        "unevicted": 1,
        "missing": 5,
    }


def test_a_turn_goes_the_way_that_computes_less(talk: tuple[Say, Engine]) -> None:
    """Its report says why; the next one restarts behind it, whatever its client says of turns."""
    say, engine = talk
    said, _ = say([*range(100, 140)], [], "unknown")
    second, report = say([*said, *range(200, 230)], [40])
    assert (report["kv_turn_mode"], report["kv_turns"]) == ("resume", [40, len(said) + 30])
    assert report["resumed"]["from"] == "session" and "because" not in report["resumed"]
    # Another budget: no snapshot of it, and exact prefixes are there.
    ends = [40, len(said) + 30]
    third = [*second, *range(300, 330)]
    _, resumed = say(third, ends, "settings", kv_budget=30, kv_turn_mode="resume")
    said, report = say([*third, 1], ends, "settings", kv_budget=30)
    found, because = report["resumed"]["tokens"], report["resumed"]["because"]
    assert found > resumed["resumed"]["tokens"] and report["resumed"]["from"] == "prefix"
    assert f"begun with {resumed['resumed']['tokens']} tokens, fewer than" in because
    assert "another policy, budget" in because
    ends = [*ends, len(third) + 1]
    assert (report["kv_turn_mode"], report["kv_turns"]) == ("exact", ends[-1:])
    assert report["inner_evictions"] == 0 and report["resumed_tokens"] == 0
    said, report = say([*said, *range(400, 430)], ends, kv_budget=30)
    assert (report["kv_turn_mode"], report["kv_turns"]) == ("resume", [ends[-1], len(said) - 6])
    assert report["resumed_tokens"] >= ends[-1] and report["inner_evictions"] == 1
    ends = [*ends, len(said) - 6]
    _, report = say([*said, *range(500, 530)], ends, kv_budget=30)
    assert report["kv_turns"] == [*ends[-2:], len(said) + 30], "restarted at the same turn"
    assert report["resumed_tokens"] >= ends[-1]
    assert engine.scheduler.pyramid.reports.policy_stats()["turns"]["prefix"] == 1
    _, report = say([*said, *range(500, 530)], ends, kv_budget=30, kv_turn_mode="resume")
    assert report["kv_turns"] == [*ends, len(said) + 30], "the operator's or client's own choice"


def test_events_without_prefixes_are_refused() -> None:
    """The scheduler alone knows that a model's layers cannot share them."""
    with pytest.raises(ValueError, match="does not work with --kv-events-config and this model"):
        make_scheduler(Setup(), 90, events=True)
