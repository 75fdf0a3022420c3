# SPDX-License-Identifier: Apache-2.0
"""Put the turns of a named session (`kv_session`) into a request, as its client might have done."""

from __future__ import annotations

import copy
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from vllm.v1.engine.input_processor import InputProcessor

from vllm_pyramid.compat.input_processor import api_servers
from vllm_pyramid.frontend.http_settings import current
from vllm_pyramid.frontend.sessions import Found, Key, Prompt, Sessions
from vllm_pyramid.policy.request import ServedRequest, check_request
from vllm_pyramid.policy.resumed import SETTINGS, WHY_KEY
from vllm_pyramid.policy.served_settings import DEFAULT_SESSION_TTL, ServedSettings

_SESSIONS: WeakKeyDictionary[InputProcessor, Sessions] = WeakKeyDictionary()


def sessions_of(processor: InputProcessor) -> Sessions | None:
    """Return the sessions of an engine; None before its first request, or without a policy."""
    return _SESSIONS.get(processor)


class FollowedTurn(NamedTuple):
    """A prompt as a turn of its session.

    Attributes:
        served: how the request is served, its turns included.
        found: what the session knew of the prompt.
        terms: what its cache depends on apart from the tokens.
    """

    served: ServedRequest
    key: Key
    prompt: Prompt
    found: Found
    terms: bytes


class SessionFollower:
    """Follows the sessions of one engine's requests.

    Args:
        num_ranks: replicas; all requests of a session go to one.
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
        return cls(settings, sessions, parallel.data_parallel_size, why_no_sessions(parallel))

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
        """Put the turns that the prompt continues into vLLM's `EngineCoreRequest`."""
        settings = self._settings
        assert settings is not None
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ValueError(
                "kv_session finds turns by their tokens, and the prompt is given as embeddings: "
                "send kv_turns"
            )
        http = current()
        client = "" if http is None else http.client
        key = self._sessions.key(name, request.cache_salt, client)
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
        terms = _terms_of(served)
        why = found.why or ((SETTINGS,) if found.terms not in (None, terms) else ())
        if why:
            params.extra_args[WHY_KEY] = list(why)
        if request.data_parallel_rank is None and self._num_ranks > 1:
            request.data_parallel_rank = key.replica(self._num_ranks)
        return FollowedTurn(served, key, prompt, found, terms)

    def record(self, turn: FollowedTurn) -> None:
        """Remember a turn whose request has passed all checks."""
        self._sessions.record(turn.key, turn.prompt, turn.found, turn.terms)


def _terms_of(served: ServedRequest) -> bytes:
    """Return a hash of what a request's cache depends on apart from its tokens and turns."""
    policy = served.policy
    budget = (served.budget or policy.budget).with_floor(policy.min_tokens)
    how = f"{served.exact} {budget} {served.keep} {policy.model_dump_json()}"
    return blake2b(how.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def why_no_sessions(parallel: Any) -> str | None:
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
