# SPDX-License-Identifier: Apache-2.0
"""Read a request's settings from its HTTP headers, and the session that its client names anyway.

Names that clients send for other reasons (`X-Session-ID`, `prompt_cache_key`) name a session only
with `--kv-session-from`. vLLM makes the engine's request in a task of its own: a context variable
carries the settings there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_pyramid.compat.request_bodies import Body
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.checks import looks_like_ours
from vllm_pyramid.policy.kinds import did_you_mean
from vllm_pyramid.policy.request import FULL_POLICY
from vllm_pyramid.policy.request_keys import REQUEST_KEYS, is_session_name
from vllm_pyramid.policy.session_sources import BODY_NAMES, HEADERS_OF

_PREFIX = "x-kv-"
_LISTS = ("kv_turns", "kv_keep")
# The headers by name, as clients write it.
HEADERS = {
    "X-KV-" + "-".join(part.capitalize() for part in key.split("_")[1:]): key
    for key in REQUEST_KEYS
    if key not in _LISTS
}
_KEYS = {header.lower(): (header, key) for header, key in HEADERS.items()}


@dataclass
class HttpSettings:
    """What an HTTP request says of its settings outside `vllm_xargs`.

    Attributes:
        given: values of headers, by key of `vllm_xargs`. mistake: what is wrong with them, or None.
        names: sessions by the source that names them: headers, then the body.
        client: which of the server's API keys it has; empty where there is only one.
        alone: whether no session may follow it: its beams would be turns.
    """

    given: dict[str, str] = field(default_factory=dict)
    mistake: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    client: str = ""
    alone: bool = False


_CURRENT: ContextVar[HttpSettings | None] = ContextVar("vllm_pyramid_http", default=None)


def current() -> HttpSettings | None:
    """Return the settings of the HTTP request that the running task answers; None without one."""
    return _CURRENT.get()


class SettingsInHeaders:
    """ASGI middleware that remembers the headers for the checks of the request's prompts."""

    def __init__(
        self, app: Any, session_from: Sequence[str] = (), api_keys: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._sources = {
            header: source
            for source in session_from
            for header in HEADERS_OF.get(source, (source,))
        }
        self._api_keys = frozenset(api_keys) if len(api_keys) > 1 else frozenset()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        found = None
        if scope["type"] == "http":
            headers = [
                (key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]
            ]
            found = self._read(headers)
        token = _CURRENT.set(found)
        try:
            await self._app(scope, receive, send)
        finally:
            _CURRENT.reset(token)

    def _read(self, headers: Iterable[tuple[str, str]]) -> HttpSettings:
        found = HttpSettings()
        for name, value in headers:
            if name.startswith(_PREFIX):
                found.mistake = found.mistake or _take(name, value, found.given)
            elif (source := self._sources.get(name)) is not None and value:
                found.names.setdefault(source, _session_name(value))
            elif name == "authorization" and self._api_keys:
                api_key = value.partition(" ")[2]
                if api_key in self._api_keys:
                    found.client = sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()
        return found


def _take(name: str, value: str, given: dict[str, str]) -> str | None:
    """Take a header of ours; return what is wrong with it, or None."""
    if name not in _KEYS:
        key = "kv_" + name.removeprefix(_PREFIX).replace("-", "_")
        if key in _LISTS:
            return f"{key} is a list, which no header holds: send it in vllm_xargs"
        header = did_you_mean(name, list(_KEYS), cutoff=0.75)
        return (
            f"unknown header {quoted(name)}{header}; the headers of vllm-pyramid are: "
            f"{', '.join(HEADERS)}"
        )
    header, key = _KEYS[name]
    if given.setdefault(key, value) != value:
        return f"{header} is sent twice, as {quoted(given[key])} and {quoted(value)}"
    return None


_XARGS, _EXTRA_BODY = "vllm_xargs", "extra_body"


def check_body(body: Body) -> None:
    """Refuse settings at the wrong place, and settings of a beam search.

    Raises:
        VLLMValidationError: naming the right place.
    """
    unknown = body.unknown
    if misplaced := next(filter(looks_like_ours, unknown), None):
        raise VLLMValidationError(
            f"{quoted(misplaced)} stands at the top level of the body, where it has no effect: put "
            f'it into {_XARGS}, as in {{"{_XARGS}": {{"kv_budget": "25%"}}}}',
            parameter=_XARGS,
        )
    inner = unknown.get(_EXTRA_BODY)
    if isinstance(inner, Mapping) and any(key == _XARGS or looks_like_ours(key) for key in inner):
        raise VLLMValidationError(
            f"{_EXTRA_BODY} is an argument of OpenAI's Python client, which puts its keys into the "
            f"body; in a body it has no effect: send {_XARGS} at the top level",
            parameter=_XARGS,
        )
    read_body(body.names, beams=body.beams)
    if not body.beams:
        return
    if setting := next(filter(looks_like_ours, body.xargs), None):
        raise VLLMValidationError(
            f"{quoted(setting)} does not work with beam search, whose beams are requests of their "
            "own and take the server's policy: leave it out, or leave use_beam_search out",
            parameter=_XARGS,
        )
    settings = current()
    if settings is not None and settings.given:
        key, value = next(iter(settings.given.items()))
        header = next(header for header, own in HEADERS.items() if own == key)
        raise VLLMValidationError(
            f"{quoted(value)} in {header} does not work with beam search, whose beams are requests "
            "of their own: leave the header out",
            parameter="use_beam_search",
        )


def with_headers(params: Any) -> Any:
    """Return a request's parameters with the settings in its headers.

    Raises:
        ValueError: a header that is none of ours or is wrong, or a key with another value.
    """
    settings = current()
    if settings is None:
        return params
    if settings.mistake is not None:
        raise ValueError(settings.mistake)
    if not settings.given:
        return params
    extra = dict(params.extra_args or {})
    for key, value in settings.given.items():
        if extra.get(key) is not None and str(extra[key]) != value:
            header = next(header for header, own in HEADERS.items() if own == key)
            raise ValueError(
                f"the request has two values, {quoted(value)} in {header} and "
                f"{quoted(extra[key])} in {key} of vllm_xargs: leave one of them out"
            )
        is_number = key == "kv_top_n" and value.isascii() and value.isdigit() and len(value) < 12
        extra[key] = int(value) if is_number else value
    params = copy.copy(params)  # the object may be the client's
    params.extra_args = extra
    return params


def with_session(params: Any, session_from: Sequence[str]) -> Any:
    """Return a request's parameters with the session that its client names anyway.

    It is left out where the request names one itself, carries its turns, keeps everything, asks for
    `prompt_logprobs`, or is a beam search.
    """
    settings = current()
    if settings is None or settings.alone or not settings.names:
        return params
    extra = params.extra_args or {}
    if extra.get("kv_session") is not None or extra.get("kv_turns") is not None:
        return params
    if extra.get("kv_policy") == FULL_POLICY or params.prompt_logprobs is not None:
        return params
    source = next((source for source in session_from if source in settings.names), None)
    if source is None:
        return params
    params = copy.copy(params)
    params.extra_args = {**extra, "kv_session": settings.names[source]}
    return params


def _session_name(given: str) -> str:
    """Return the session that a client names anyway.

    The client may not know that the name counts here, so one that cannot be a session's is not
    refused: its hash is the name.
    """
    if is_session_name(given):
        return given
    return f"sha256:{sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()}"


def read_body(names: Mapping[str, Any], *, beams: bool) -> None:
    """Remember what a body says of its session: its values of `BODY_NAMES`, and its beams."""
    if (settings := current()) is None:
        return
    settings.alone = beams
    for source in BODY_NAMES:
        if isinstance(value := names.get(source), str) and value:
            # As in vLLM, the body comes before the header.
            settings.names[source] = _session_name(value)
