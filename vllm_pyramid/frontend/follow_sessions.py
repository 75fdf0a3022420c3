# SPDX-License-Identifier: Apache-2.0
"""Put the turns of a named session (`kv_session`) into a request, as if its client had sent them.

A request names its session in `vllm_xargs` or with the header `X-KV-Session`. Its `kv_turns` are
known when its prompt has been tokenised, and travel to the scheduler as a client's own would.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from vllm_pyramid.compat.input_processor import api_servers
from vllm_pyramid.frontend.sessions import Found, Key, Prompt, Sessions
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.request import ServedRequest, check_request
from vllm_pyramid.policy.served_settings import DEFAULT_SESSION_TTL, ServedSettings

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor

HEADER = "x-kv-session"
# The header of the HTTP request that the running task answers (`SessionHeader`).
_HEADER: ContextVar[str | None] = ContextVar("vllm_pyramid_session", default=None)
_SESSIONS: WeakKeyDictionary[InputProcessor, Sessions] = WeakKeyDictionary()


class SessionHeader:
    """ASGI middleware that remembers the header for the checks of the request's prompts."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        headers = scope.get("headers", ()) if scope["type"] == "http" else ()
        name = next((value for key, value in headers if key == HEADER.encode()), None)
        token = _HEADER.set(None if name is None else name.decode("latin-1"))
        try:
            await self._app(scope, receive, send)
        finally:
            _HEADER.reset(token)


def header_session() -> str | None:
    """Return the session that the header of the running task's request names; None without one."""
    return _HEADER.get()


def with_header(params: Any) -> Any:
    """Return a request's parameters with the session that its header names.

    Raises:
        ValueError: `vllm_xargs` names another one.
    """
    name = header_session()
    if name is None:
        return params
    extra = params.extra_args or {}
    if extra.get("kv_session") not in (None, name):
        raise ValueError(
            f"the request names two sessions, {quoted(name)} in X-KV-Session and "
            f"{quoted(extra['kv_session'])} in kv_session: leave one of them out"
        )
    params = copy.copy(params)  # the object may be the client's
    params.extra_args = {**extra, "kv_session": name}
    return params


def sessions_of(processor: InputProcessor) -> Sessions | None:
    """Return the sessions of an engine; None before its first request, or without a policy."""
    return _SESSIONS.get(processor)


class FollowedTurn(NamedTuple):
    """A prompt as a turn of its session.

    Attributes:
        served: how the request is served, its turns included.
        key: of the session. length: tokens of the prompt. found: what the session knew of it.
    """

    served: ServedRequest
    key: Key
    length: int
    found: Found


class SessionFollower:
    """Follows the sessions of one engine's requests.

    Args:
        settings: the served policy's. sessions: what is remembered.
        num_ranks: replicas among which a session's requests go to one.
        why_none: why this server cannot follow sessions; None if it can.
    """

    def __init__(
        self,
        settings: ServedSettings | None,
        sessions: Sessions,
        num_ranks: int = 1,
        why_none: str | None = None,
    ) -> None:
        self._settings, self._sessions = settings, sessions
        self._num_ranks, self._why_none = num_ranks, why_none

    @classmethod
    def of(cls, processor: InputProcessor, settings: ServedSettings | None) -> SessionFollower:
        """Return what follows the sessions of an engine."""
        sessions = Sessions(settings.session_ttl_s if settings else DEFAULT_SESSION_TTL)
        _SESSIONS[processor] = sessions
        parallel = getattr(processor.vllm_config, "parallel_config", None)
        if parallel is None:
            return cls(settings, sessions)
        return cls(settings, sessions, parallel.data_parallel_size, _why_none(parallel))

    def begin(self, params: Any) -> Any:
        """Return parameters that can be checked before the prompt is known: turns, still empty.

        Raises:
            ValueError: the request also has turns of its own, or no session can be followed.
        """
        extra = params.extra_args
        if not extra or extra.get("kv_session") is None:
            return params
        if extra.get("kv_turns") is not None:
            raise ValueError(
                "the request has both kv_session and kv_turns: with a session the server knows "
                "where its turns ended; leave one of them out"
            )
        if self._why_none is not None:
            raise ValueError(f"kv_session does not work on this server: {self._why_none}")
        params = copy.copy(params)  # the object may be the client's
        params.extra_args = {**extra, "kv_turns": []}
        return params

    def follow(self, request: Any, name: str) -> FollowedTurn:
        """Put the turns that the prompt continues into the engine's request.

        Args:
            request: vLLM's `EngineCoreRequest`, whose prompt has been tokenised.
            name: of the session.

        Raises:
            ValueError: the request does not work with the turns, or has no tokens.
        """
        settings = self._settings
        assert settings is not None
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ValueError(
                "kv_session finds turns by their tokens, and the prompt is given as embeddings: "
                "send kv_turns"
            )
        key = self._sessions.key(name, request.cache_salt)
        prompt = Prompt(
            request.prompt_token_ids,
            tuple((part.mm_position.offset, part.identifier) for part in request.mm_features or ()),
            request.lora_request.lora_name if request.lora_request else "",
        )
        found = self._sessions.find(key, prompt)
        params = request.sampling_params
        params.extra_args = {**params.extra_args, "kv_turns": list(found.turns)}
        reason, mode = settings.why_no_turns, settings.turn_mode
        served = check_request(settings.policy, params, reason, mode)
        if request.data_parallel_rank is None and self._num_ranks > 1:
            request.data_parallel_rank = key.replica(self._num_ranks)
        return FollowedTurn(served, key, len(prompt.tokens), found)

    def record(self, turn: FollowedTurn) -> None:
        """Remember a turn whose request has passed all checks."""
        self._sessions.record(turn.key, turn.length, turn.found)


def _why_none(parallel: Any) -> str | None:
    """Return why a server cannot follow sessions; None if it can."""
    if (servers := api_servers(parallel)) > 1:
        return (
            f"it has {servers} API servers, each of which would remember turns of its own; start "
            "it with --api-server-count 1, or send kv_turns"
        )
    if parallel.data_parallel_size > 1 and parallel.local_engines_only:
        return (
            "its replicas have front ends of their own, each of which would remember turns of its "
            "own; send kv_turns, and the requests of a conversation to one replica"
        )
    return None
