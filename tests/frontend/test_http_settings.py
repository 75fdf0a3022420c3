# SPDX-License-Identifier: Apache-2.0
"""Settings in headers, and sessions that clients name for other reasons."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from tests.frontend.test_sessions import FIRST, SECOND, THIRD, Front
from vllm_pyramid.compat import request_bodies
from vllm_pyramid.compat.request_bodies import Body
from vllm_pyramid.frontend.follow_sessions import sessions_of
from vllm_pyramid.frontend.http_settings import SettingsInHeaders, check_body
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy.request_keys import is_session_name
from vllm_pyramid.policy.resumed import WHY_KEY
from vllm_pyramid.policy.session_sources import parse_session_from

AGENTS = ("session_id", "x-claude-code-session-id", "prompt_cache_key")
ODD_NAMES = ("two words", "-a", "a" * 129, "naïve", "\ud800")


def http(
    front: Front,
    headers: dict[str, str] | list[tuple[str, str]],
    extra: dict[str, Any],
    names: dict[str, Any] | None = None,
    *,
    tokens: list[int] = FIRST,
    sources: tuple[str, ...] = (),
    api_keys: tuple[str, ...] = (),
    beams: bool = False,
) -> Any:
    """Send a request over HTTP; the settings with which it goes on."""
    sent: list[Any] = []

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        async def of_its_own() -> None:  # as vLLM runs it, in another task
            check_body(Body({}, {} if beams else extra, names or {}, beams))
            sent.append(front.ask(tokens, extra).sampling_params.extra_args)

        await asyncio.create_task(of_its_own())

    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    raw = [(key.lower().encode(), value.encode("latin-1")) for key, value in pairs]
    app = SettingsInHeaders(endpoint, sources, api_keys)
    asyncio.run(app({"type": "http", "headers": raw}, None, None))
    return {key: value for key, value in sent[0].items() if key != WHY_KEY}


def test_headers_say_what_keys_do() -> None:
    front = Front()
    named = {"kv_session": "a", "kv_turns": []}
    assert http(front, {"X-KV-Session": "a"}, {"other": 1}) == {"other": 1, **named}
    assert http(front, {"X-KV-Session": "a"}, {"kv_session": "a"}) == named
    assert http(front, {}, {"other": 1}) == {"other": 1}
    both = {"X-KV-Budget": "25%", "X-KV-Min-Tokens": "0"}
    assert http(front, both, {}) == {"kv_budget": "25%", "kv_min_tokens": "0"}
    assert http(front, {"X-KV-Policy": "full"}, {"kv_policy": "full"}) == {"kv_policy": "full"}
    assert http(front, {"X-KV-Budget": "64"}, {"kv_budget": 64}) == {"kv_budget": "64"}
    known = sessions_of(front.processor)
    assert known is not None and [row["session"] for row in known.listing()] == ["a"]


@pytest.mark.parametrize(
    ("headers", "extra", "message"),
    [
        ({"X-KV-Session": "a"}, {"kv_session": "b"}, "'a' in X-KV-Session and 'b' in kv_session"),
        ({"X-KV-Session": "a"}, {"kv_turns": []}, "both kv_session and kv_turns"),
        ({"X-KV-Session": "\xe9"}, {}, "a name of 1 to 128"),
        ({"X-KV-Session": ""}, {}, "a name of 1 to 128"),
        ({"X-KV-Budget": "a lot"}, {}, "kv_budget of the request"),
        ({"X-KV-Budget": ""}, {}, "kv_budget of the request"),
        ({"X-KV-Budget": "64"}, {"kv_budget": 65}, "'64' in X-KV-Budget and 65 in kv_budget"),
        ({"X-KV-Policy": "nonsense"}, {}, "'nonsense' is not served here"),
        ({"X-KV-Min-Tokens": "-1"}, {}, "kv_min_tokens of a request must be"),
        ({"X-KV-Top-N": "few"}, {}, "kv_top_n of a request must be"),
        ({"X-KV-Top-N": "8"}, {}, "kv_top_n has no effect"),
        ({"X-KV-Budgt": "64"}, {}, "unknown header 'x-kv-budgt' .did you mean 'x-kv-budget'"),
        ({"X-KV-Turns": "[]"}, {}, "kv_turns is a list, which no header holds: send it in vllm_x"),
        ([("X-KV-Budget", "64"), ("X-KV-Budget", "65")], {}, "sent twice, as '64' and '65'"),
    ],
)
def test_wrong_headers(headers: Any, extra: dict[str, Any], message: str) -> None:
    front = Front()
    with pytest.raises(VLLMValidationError, match=message):
        http(front, headers, extra)
    known = sessions_of(front.processor)
    assert known is not None and known.listing() == []


def test_the_operator_can_forbid_headers_as_keys() -> None:
    with pytest.raises(VLLMValidationError, match="kv_budget is not open to requests"):
        http(Front(kv_request_overrides="session"), {"X-KV-Budget": "64"}, {})


def test_names_that_clients_send_name_sessions_where_the_operator_says_so() -> None:
    headers = {"X-Session-ID": "s", "X-Claude-Code-Session-Id": "c"}
    body = {"session_id": None, "prompt_cache_key": "p"}
    assert http(Front(), headers, {}, body, sources=()) == {}

    def session(*sources: str, **how: Any) -> Any:
        front = Front(kv_session_from=",".join(sources), **how.pop("settings", {}))
        arguments = {"headers": headers, "extra": {}, "names": body, **how}
        return http(front, sources=sources, **arguments).get("kv_session")

    assert session(*AGENTS) == "s"
    assert session(*AGENTS[1:]) == "c"
    assert session(*AGENTS[2:]) == "p"
    assert session(*AGENTS, names={**body, "session_id": "b"}) == "b", "the body's comes first"
    assert session(*AGENTS, headers={"X-KV-Session": "own", **headers}) == "own"
    assert session(*AGENTS, extra={"kv_session": "own"}) == "own"
    assert session(*AGENTS, headers={}, names={}) is None
    assert session(*AGENTS, extra={"kv_policy": "full"}) is None, "it keeps everything"
    assert session(*AGENTS, extra={"kv_turns": []}) is None, "the client carries its turns"
    assert session(*AGENTS, beams=True) is None
    own = {"kv_request_overrides": "budget"}
    assert session(*AGENTS, settings=own) == "s", "the operator names it, not the request"
    hashed = {session("prompt_cache_key", names={"prompt_cache_key": key}) for key in ODD_NAMES}
    assert len(hashed) == len(ODD_NAMES) and all(map(is_session_name, hashed))


def test_a_body_is_read_once_for_all_its_prompts() -> None:
    """However many keys it has that vLLM does not know."""
    read: list[Body] = []
    checked = request_bodies._checked(read.append, beams=False)
    one, other = (CompletionRequest(prompt=[[1], [2]], own=number) for number in (1, 2))
    for body in (one, one, other, other, one):
        assert checked(lambda self: self, body) is body
    assert [body.unknown["own"] for body in read] == [1, 2, 1]


def test_beams_have_no_settings() -> None:
    with pytest.raises(VLLMValidationError, match="'a' in X-KV-Session does not work with beam se"):
        http(Front(), {"X-KV-Session": "a"}, {}, beams=True)


def test_clients_with_other_api_keys_do_not_share_names() -> None:
    front, keys = Front(), ("one", "two")

    def turns(key: str, tokens: list[int], api_keys: tuple[str, ...] = keys) -> Any:
        headers = {"X-KV-Session": "a", "Authorization": f"Bearer {key}"}
        return http(front, headers, {}, tokens=tokens, api_keys=api_keys)["kv_turns"]

    assert turns("one", FIRST) == []
    assert turns("two", SECOND) == []
    assert turns("one", SECOND) == [400]
    assert turns("two", THIRD) == [700]
    assert turns("three", THIRD) == [], "no key of the server's: it is refused elsewhere"
    known = sessions_of(front.processor)
    assert known is not None and len({row["tenant"] for row in known.listing()}) == 3
    assert turns("one", [*THIRD, 1], ("one",)) == [900], "one key is everybody's"


def test_the_flag() -> None:
    assert parse_session_from(None) == ()
    assert parse_session_from("Session_ID, x-a,x-a") == ("session_id", "x-a")
    for wrong, message in (
        ("", "must name headers"),
        ("a b", "not 'a b'"),
        ("authorization", "not 'authorization'"),
        ("X-KV-Session", "always names a session"),
        (",".join(f"x-{n}" for n in range(9)), "at most 8"),
        (5, "not 5"),
        ([1], "must name headers"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_session_from(wrong)
    with pytest.raises(ValueError, match="--kv-session-from has an effect with a policy alone"):
        KVSettings("none", kv_session_from="x-a")
    with pytest.raises(ValueError, match="does not work with --kv-session-from"):
        KVSettings("h2o", kv_session_from="x-a")
    assert KVSettings("h2o", kv_session_from="x-a", kv_turn_mode="exact").served() is not None
    settings = KVSettings("snapkv", kv_session_from="x-a,session_id")
    served = settings.served()
    assert served is not None and served.session_from == ("x-a", "session_id")
    assert KVSettings.from_additional_config(settings.to_additional_config()) == settings
