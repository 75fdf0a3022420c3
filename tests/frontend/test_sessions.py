# SPDX-License-Identifier: Apache-2.0
"""Sessions by name in the front end: branches, edits, tenants, bounds, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.frontend.test_overrides import served
from vllm_pyramid.compat.chat_renderer import Template
from vllm_pyramid.frontend import sessions as module
from vllm_pyramid.frontend.follow_sessions import sessions_of
from vllm_pyramid.frontend.requests import PolicyRequestChecks
from vllm_pyramid.frontend.sessions import NO_TENANT, Prompt, Sessions
from vllm_pyramid.policy.limits import MAX_SESSION_NAME, MAX_TURNS
from vllm_pyramid.policy.request import TEMPLATE_KEY
from vllm_pyramid.policy.resumed import WHY_KEY
from vllm_pyramid.policy.served_settings import SERVED_KEY

FIRST, SECOND = [7] * 400, [*[7] * 400, *[8] * 300]
THIRD = [*SECOND, *[9] * 200]


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def send(known: Sessions, name: str, tokens: list[int], salt: str | None = None, **how: Any) -> Any:
    """Send a prompt in a session."""
    key, prompt = known.key(name, salt), Prompt(tokens, **how)
    found = known.find(key, prompt)
    known.record(key, prompt, found)
    return found


def say(*asked: Any, **how: Any) -> Any:
    """Send a prompt in a session; the turns that it resumes."""
    return list(send(*asked, **how).turns)


def why(*asked: Any, **how: Any) -> Any:
    """Send a prompt in a session; why it does not continue the last turn."""
    return send(*asked, **how).why


def test_a_prompt_resumes_the_longest_turn_that_it_begins_with() -> None:
    known = Sessions(60)
    assert say(known, "a", FIRST) == []
    assert say(known, "a", SECOND) == [400]
    assert say(known, "a", THIRD) == [400, 700]
    assert say(known, "a", THIRD) == [400, 700], "sent again"
    assert say(known, "a", [*SECOND[:-1], *THIRD]) == [400], "the second turn was edited"
    branch = [*SECOND, *[5] * 90]
    assert say(known, "a", branch) == [400, 700], "another third turn"
    assert say(known, "a", [*branch, 1]) == [400, 700, 790]
    assert say(known, "a", [*THIRD, 1]) == [400, 700, 900], "the first branch is still there"
    assert say(known, "a", [1, *SECOND]) == [], "an edit of the beginning"
    assert say(known, "b", THIRD) == [], "another name"


def test_a_prompt_sent_again_resumes_what_it_resumed() -> None:
    """Even if a turn in between was said since, so that the answer is the same."""
    known = Sessions(60)
    assert say(known, "a", THIRD) == []
    assert say(known, "a", SECOND) == []
    assert say(known, "a", THIRD) == []
    assert say(known, "a", [*THIRD, 1]) == [900]


def test_images_and_adapters_are_part_of_a_turn() -> None:
    known = Sessions(60)
    say(known, "a", FIRST, inputs=((10, "cat"),))
    assert say(known, "a", SECOND, inputs=((10, "dog"),)) == []
    assert say(known, "a", SECOND, inputs=((10, "cat"), (500, "dog"))) == [400]
    assert say(known, "a", THIRD, inputs=((10, "cat"), (500, "cat"))) == [400]
    assert say(known, "a", THIRD, adapter="poet", inputs=((10, "cat"),)) == []


def test_a_prompt_is_told_where_it_leaves_the_last_turn() -> None:
    known = Sessions(60)
    assert why(known, "a", SECOND) == ("unknown",)
    assert why(known, "a", THIRD) == () == why(known, "a", THIRD), "continued, and sent again"
    assert why(known, "a", THIRD, "salt") == ("unknown",)
    changed = [*THIRD[:12], 5, *THIRD[13:], *THIRD]
    assert why(known, "a", changed) == ("differs", 0, 32, 900)
    late = [*changed[:-1], 1]
    assert why(known, "a", late) == ("differs", 1792, 1800, 1800), "in what is no whole range"
    assert why(known, "a", late[:500]) == ("differs", 500, 500, 1800), "it ends before it differs"
    assert why(known, "a", [*late, 1]) == (), "another branch, to its end"
    assert why(known, "a", [*FIRST, *[3] * 2000]) == ("differs", 0, 32, 1801)
    assert why(known, "c", THIRD) == ("unknown",)
    assert why(known, "c", [*THIRD[:700], *[3] * 2000]) == ("differs", 672, 704, 900)
    assert why(known, "b", FIRST, inputs=((10, "cat"),)) == ("unknown",)
    assert why(known, "b", SECOND, inputs=((10, "dog"),)) == ("differs", 0, 32, 400)
    assert why(known, "b", SECOND, inputs=((10, "dog"),), adapter="poet")[:2] == ("differs", 0)


def test_a_session_keeps_few_numbers_of_a_long_prompt() -> None:
    known, long = Sessions(60), list(range(100_000))
    why(known, "a", long)
    (session,) = known._sessions.values()
    assert session.last is not None and session.last.marks.nbytes <= 4096
    long[70_000] = 1
    assert why(known, "a", long) == ("differs", 69_888, 70_144, 100_000)


def test_salts_are_tenants_and_the_list_has_no_salt() -> None:
    known = Sessions(60)
    for salt in (None, "secret of one", "secret of another"):
        assert say(known, "a", FIRST, salt) == []
        assert say(known, "a", SECOND, salt) == [400]
    listed = known.listing()
    tenants = [row["tenant"] for row in listed]
    assert len(set(tenants)) == 3 and NO_TENANT in tenants
    assert "secret" not in repr(listed)
    assert {(row["session"], row["turns"], row["tokens"]) for row in listed} == {("a", 2, 700)}
    again = Sessions(60)
    say(again, "a", FIRST, "secret of one")
    assert again.listing()[0]["tenant"] not in tenants, "a salt cannot be tried out"
    assert known.forget("a", tenants[0]) == 1 and known.forget("a", tenants[0]) == 0
    assert say(known, "a", THIRD, "secret of another") == []
    assert known.forget("b") == 0 and known.forget() == 3 and known.listing() == []


def test_sessions_expire_when_they_are_not_used() -> None:
    clock = Clock()
    known = Sessions(60, clock)
    say(known, "a", FIRST)
    clock.now = 50
    assert say(known, "a", SECOND) == [400]
    say(known, "b", FIRST)
    clock.now = 109
    assert say(known, "a", THIRD) == [400, 700]
    clock.now = 111
    assert [row["session"] for row in known.listing()] == ["a"]
    assert known.listing()[0]["expires_in_s"] == 58
    assert say(known, "b", SECOND) == []
    clock.now = 169
    assert say(known, "a", THIRD) == []


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 4)
    monkeypatch.setattr(module, "MAX_SESSION_TURNS", 3)
    monkeypatch.setattr(module, "MAX_SESSIONS_TURNS", 7)
    known = Sessions(60)
    say(known, "mine", FIRST, "me")
    for number in range(9):  # another tenant loses its own
        say(known, f"{number}", FIRST, "other")
    assert {row["session"] for row in known.listing()} == {"mine", "6", "7", "8"}
    for length in range(401, 405):  # branches of one turn: the oldest leaf goes, the trunk stays
        assert say(known, "mine", [*FIRST, *[length] * (length - 400)], "me") == [400]
    assert max(row["turns"] for row in known.listing()) == 3
    assert say(known, "mine", [*FIRST, 404, 404, 404, 404, 1], "me") == [400, 404]
    assert say(known, "mine", [*FIRST, 401, 1], "me") == [400], "its leaf had to go"
    for number in range(9, 12):
        for tokens in (FIRST, SECOND, THIRD):
            say(known, f"{number}", tokens, "third")
        assert sum(row["turns"] for row in known.listing()) <= 7
        assert known.listing()[0]["session"] == f"{number}" and known.listing()[0]["turns"] == 3
    assert sum(known._num_turns.values()) == sum(row["turns"] for row in known.listing())
    assert sum(known._num_sessions.values()) == len(known.listing())


def test_a_session_begins_anew_behind_as_many_turns_as_a_request_has() -> None:
    known = Sessions(60)
    for length in range(1, MAX_TURNS + 1):
        assert len(say(known, "a", [3] * length)) == length - 1
    assert say(known, "a", [3] * (MAX_TURNS + 1)) == []
    assert say(known, "a", [3] * (MAX_TURNS + 2)) == [MAX_TURNS + 1]
    assert say(known, "a", [4] * 5) == []


class Front:
    """The checks of one front end, with requests as vLLM makes them."""

    def __init__(self, parallel: dict[str, Any] | None = None, **settings: Any) -> None:
        own = served(**settings)
        config = SimpleNamespace(
            additional_config={SERVED_KEY: own.as_data()}, kv_transfer_config=None
        )
        text = SimpleNamespace(num_kv_shared_layers=1)  # how many layers evict is not known here
        config.model_config = SimpleNamespace(hf_text_config=text)
        if parallel is not None:
            config.parallel_config = SimpleNamespace(**parallel)
        self.processor: Any = Processor(config)
        self.checks = PolicyRequestChecks()

    def ask(
        self,
        tokens: list[int],
        extra: dict[str, Any],
        salt: str | None = None,
        spans: list[int] | None = None,
        **changes: Any,
    ) -> SimpleNamespace:
        """The engine's request, of a chat whose template has `spans`, if they are given.

        The client's own parameters stay as they are.
        """
        template = None if spans is None else Template(spans, len(tokens))
        params = SamplingParams(max_tokens=8, extra_args=extra)
        before = dict(extra)
        found, own = self.checks.before(self.processor, params, template, resumable=False)
        assert params.extra_args == before
        request = SimpleNamespace(
            mm_features=None,
            prompt_token_ids=tokens,
            prompt_embeds=None,
            sampling_params=own.clone(),
            cache_salt=salt,
            lora_request=None,
            data_parallel_rank=None,
        )
        vars(request).update(changes)
        self.checks.after(self.processor, request, found)
        return request

    def turns(self, tokens: list[int], extra: dict[str, Any], salt: str | None = None) -> Any:
        """The turns that travel to the scheduler."""
        sent = self.ask(tokens, extra, salt).sampling_params.extra_args
        assert sent["kv_session"] == extra["kv_session"]
        return sent["kv_turns"]


class Processor:
    """vLLM's `InputProcessor` as far as the checks of requests look into it."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.model_config = SimpleNamespace(is_mm_prefix_lm=True)


def test_the_front_end_adds_the_turns() -> None:
    front = Front()
    named = {"kv_session": "a", "other": 1}
    assert front.turns(FIRST, named) == []
    assert front.turns(SECOND, named) == [400]
    assert front.turns(SECOND, named, "salt") == []
    assert front.turns(THIRD, {**named, "kv_turn_mode": "exact"}) == [400, 700]
    assert front.turns([*THIRD, 1], named) == [400, 700, 900]
    known = sessions_of(front.processor)
    assert known is not None and len(known.listing()) == 2
    known.forget("a")
    assert front.turns(THIRD, named) == []
    assert "kv_turns" not in front.ask(FIRST, {"other": 1}).sampling_params.extra_args


def test_the_front_end_says_why_a_turn_does_not_continue_the_last() -> None:
    front, named = Front(), {"kv_session": "a"}

    def said(tokens: list[int], **extra: Any) -> Any:
        return front.ask(tokens, {**named, **extra}).sampling_params.extra_args.get(WHY_KEY)

    assert said(FIRST) == ["unknown"]
    assert said(SECOND) is None
    assert said(THIRD, kv_budget="40%") == ["settings"]
    assert said([*THIRD, 1], kv_budget="40%") is None
    assert said([*THIRD, 1, 2], kv_turn_mode="exact", kv_budget="40%") == ["settings"]
    assert said([1, *THIRD]) == ["differs", 0, 32, 902]
    with pytest.raises(VLLMValidationError, match="vllm_pyramid_why cannot be set by requests"):
        said(FIRST, **{WHY_KEY: ["unknown"]})


def test_a_request_that_is_refused_is_no_turn() -> None:
    front = Front(kv_max_request_budget="25%")
    assert front.turns(FIRST, {"kv_session": "a"}) == []
    with pytest.raises(VLLMValidationError, match="this server allows"):
        front.ask(SECOND, {"kv_session": "a", "kv_budget": "60%"})
    assert front.turns(THIRD, {"kv_session": "a"}) == [400]


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        ({"kv_session": ""}, {}, "a name of 1 to 128 letters, digits"),
        ({"kv_session": "x" * (MAX_SESSION_NAME + 1)}, {}, "a name of 1 to 128"),
        ({"kv_session": "two words"}, {}, "not 'two words'"),
        ({"kv_session": "a\n"}, {}, "a name of 1 to 128"),
        ({"kv_session": "../x"}, {}, "a letter or digit first"),
        ({"kv_session": 5}, {}, "not 5"),
        ({"kv_session": "a", "kv_turns": []}, {}, "both kv_session and kv_turns"),
        ({"kv_session": "a", "kv_turn_mode": "fast"}, {}, "resume or exact"),
        (
            {"kv_session": "a", "kv_policy": "full", "kv_turn_mode": "resume"},
            {},
            "'full' .* not work with kv_session: it",
        ),
        ({"kv_session": "a"}, {"prompt_token_ids": None}, "given as embeddings: send kv_turns"),
    ],
)
def test_wrong_sessions(extra: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    front = Front()
    with pytest.raises(VLLMValidationError, match=message):
        front.ask(FIRST, extra, **changes)
    known = sessions_of(front.processor)
    assert known is not None and known.listing() == []


def test_the_operator_can_forbid_sessions() -> None:
    with pytest.raises(VLLMValidationError, match="kv_session is not open to requests"):
        Front(kv_request_overrides="budget,turns").ask(FIRST, {"kv_session": "a"})
    assert Front(kv_request_overrides="session").turns(FIRST, {"kv_session": "a"}) == []


def test_replicas_and_several_front_ends() -> None:
    """With one front end a session stays at a replica; several would not know each other's."""
    one = {"data_parallel_size": 4, "local_engines_only": False, "_api_process_count": 1}
    front = Front(one)
    ranks = set()
    for name in "abcdefgh":
        asked = {"kv_session": name}
        at = {front.ask(tokens, asked).data_parallel_rank for tokens in (FIRST, SECOND, THIRD)}
        assert len(at) == 1 and at < set(range(4))
        ranks |= at
    assert len(ranks) > 1
    assert front.ask(FIRST, {"kv_session": "a"}, data_parallel_rank=3).data_parallel_rank == 3
    assert front.ask(FIRST, {}).data_parallel_rank is None
    with pytest.raises(VLLMValidationError, match=r"4 API servers.*--api-server-count 1"):
        Front({**one, "_api_process_count": 4}).ask(FIRST, {"kv_session": "a"})
    with pytest.raises(VLLMValidationError, match="front ends of their own"):
        Front({**one, "local_engines_only": True}).ask(FIRST, {"kv_session": "a"})


def test_the_front_end_answers_what_is_forbidden() -> None:
    front, prompt = Front(kv_request_overrides="budget", kv_max_request_budget="25%"), [1] * 1000
    front.ask(prompt, {})
    front.ask(prompt, {"kv_budget": 256, "other": 1})
    for tokens, extra, changes, message in (
        (prompt, {"kv_policy": "full"}, {}, "kv_policy is not open to requests"),
        (prompt, {"kv_budget": 257}, {}, r"keep 257 of 1000 tokens .* allows 256"),
        (prompt, {}, {"mm_features": ["an image"]}, "both directions: send text"),
    ):
        with pytest.raises(VLLMValidationError, match=message):
            front.ask(tokens, extra, **changes)
    front.ask(2 * prompt, {"kv_budget": 257})
    front.processor.model_config.is_mm_prefix_lm = False
    front.ask(prompt, {}, mm_features=["an image"])


def test_templates_that_are_kept_by_default_count() -> None:
    """A client decides how long they are; those that the operator asks for stay."""
    prompt, short, long = [1] * 4000, [0, 500], [0, 500, 600, 900]

    def kept(spans: list[int], extra: dict[str, Any], **settings: Any) -> Any:
        front = Front(kv_max_request_budget="25%", **settings)
        return front.ask(prompt, extra, spans=spans).sampling_params.extra_args[TEMPLATE_KEY]

    assert kept(short, {}) == short, "500 tokens, and 12 % of 3500"
    assert kept(long, {}) is None
    assert kept(short, {"kv_budget": "25%"}) is None
    assert kept(short, {"kv_keep": [1000, 1200]}) is None
    turns = {"kv_session": "a"}
    assert kept(long, turns) == long, "of which turns keep the first span"
    assert kept([0, 900], turns) is None
    assert kept(long, {}, kv_keep="template") == long
    assert kept([0, 3000], {}, kv_request_overrides="none") is None
    with pytest.raises(VLLMValidationError, match=r"keep 1040 of 4000 .* allows 1000 "):
        kept(short, {"kv_budget": "26%"})
