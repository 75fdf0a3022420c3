# SPDX-License-Identifier: Apache-2.0
"""Parse the settings that a request carries in `SamplingParams.extra_args` (`vllm_xargs`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm_pyramid.plan import Budget
from vllm_pyramid.plan.budget import MAX_TOKENS
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.checks import parse_min_tokens, refuse_unknown
from vllm_pyramid.policy.kept_spans import Spans, merged, parse_spans
from vllm_pyramid.policy.limits import MAX_KEYS, MAX_NAME, MAX_SESSION_NAME, MAX_TOP_N, MAX_TURNS

REQUEST_KEYS = (
    *("kv_policy", "kv_budget", "kv_min_tokens", "kv_application", "kv_top_n", "kv_turns"),
    "kv_keep",
    "kv_attend_budget",
    "kv_turn_mode",
    "kv_session",
)
# How a later turn of a conversation continues: with the evicted state of the turn before; with the
# KV of the whole prompt, evicted again as if it had never been; or as it computes fewer tokens.
AUTO_MODE, RESUME, EXACT = "auto", "resume", "exact"
TURN_MODES = (AUTO_MODE, RESUME, EXACT)
_HALVES = re.compile("[\ud800-\udfff]")  # which no metric and no JSON answer can write
_SESSION = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@/+=~-]{{0,{MAX_SESSION_NAME - 1}}}")


@dataclass(frozen=True)
class RequestKeys:
    """The settings in a request, with types and ranges checked; None: the policy's or the server's.

    Attributes:
        policy: `full` to opt out of eviction, or the served policy's own name, or None.
        application: requests with the same name share an average of sampled budgets.
        top_n: keys whose V is read from host memory. attend_budget: what a generated token reads in
            a layer.
        turns: tokens at which the prompts of the conversation's earlier turns ended; empty for the
            first turn, None for a request that no later one resumes.
        keep: spans of the prompt that every layer and head keeps (`kept_spans`).
        session: the name under which the front end remembers `turns`; None if the client does.
    """

    policy: str | None = None
    budget: Budget | None = None
    min_tokens: int | None = None
    application: str = ""
    top_n: int | None = None
    turns: tuple[int, ...] | None = None
    keep: Spans = ()
    attend_budget: Budget | None = None
    turn_mode: str | None = None
    session: str | None = None

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestKeys:
        """Parse our keys of `SamplingParams.extra_args`; ValueError: wrong type or range.

        Only our keys are looked up, so the cost does not depend on the others.
        """
        if not extra_args:
            return cls()
        policy = extra_args.get("kv_policy")
        if policy is not None and not (isinstance(policy, str) and 0 < len(policy) <= MAX_NAME):
            raise ValueError(
                f"kv_policy of a request must be a policy's name, of at most {MAX_NAME} "
                f"characters, not {quoted(policy)}"
            )
        application = extra_args.get("kv_application")
        if application is None:
            application = ""
        is_name = isinstance(application, str) and not _HALVES.search(application[:MAX_NAME])
        if not is_name or len(application) > MAX_NAME:
            raise ValueError(
                f"kv_application of a request must be a name of at most {MAX_NAME} characters, "
                f"none of them half a surrogate pair, not {quoted(application)}"
            )
        top_n = extra_args.get("kv_top_n")
        if top_n is not None and not (type(top_n) is int and 1 <= top_n <= MAX_TOP_N):
            raise ValueError(
                f"kv_top_n of a request must be a number of keys from 1 to {MAX_TOP_N}, not "
                f"{quoted(top_n)}"
            )
        budget = _parse_budget(extra_args, "kv_budget")
        attend_budget = _parse_budget(extra_args, "kv_attend_budget")
        floor = parse_min_tokens(extra_args.get("kv_min_tokens"), "kv_min_tokens of a request")
        turns = _parse_turns(extra_args.get("kv_turns"))
        mode = parse_turn_mode(extra_args.get("kv_turn_mode"), "kv_turn_mode of a request")
        session = _parse_session(extra_args.get("kv_session"))
        if mode is not None and turns is None and session is None:
            raise ValueError(
                "kv_turn_mode of a request says how kv_turns are continued, and there are none: "
                "leave it out, or send kv_turns or kv_session"
            )
        keep = merged(parse_spans(extra_args.get("kv_keep"), "kv_keep of a request"))
        return cls(
            policy, budget, floor, application, top_n, turns, keep, attend_budget, mode, session
        )


def _parse_budget(extra_args: Mapping[str, Any], key: str) -> Budget | None:
    value = extra_args.get(key)
    try:
        return None if value is None else Budget.parse(value)
    except ValueError as error:
        raise ValueError(f"{key} of the request: {error}") from None


def check_names(extra_args: Mapping[str, Any] | None) -> None:
    """Raise ValueError for too many keys, or an unknown one that looks like ours."""
    if not extra_args:
        return
    if len(extra_args) > MAX_KEYS:
        raise ValueError(
            f"the request's vllm_xargs has {len(extra_args)} keys, and a server with a KV policy "
            f"takes at most {MAX_KEYS}: send fewer"
        )
    refuse_unknown(extra_args, REQUEST_KEYS, "the request's vllm_xargs")


def parse_turn_mode(value: object, name: str) -> str | None:
    """Parse a mode of later turns, or None; ValueError, with `name`, for anything else."""
    if value is None:
        return None
    if value not in TURN_MODES:
        raise ValueError(f"{name} must be auto, resume or exact, not {quoted(value)}")
    assert isinstance(value, str)
    return value


def is_session_name(value: object) -> bool:
    """Return whether a value may be a session's name."""
    return isinstance(value, str) and _SESSION.fullmatch(value) is not None


def _parse_session(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not is_session_name(value):
        raise ValueError(
            f"kv_session of a request must be a name of 1 to {MAX_SESSION_NAME} letters, digits "
            f"and ._:@/+=~-, a letter or digit first, not {quoted(value)}"
        )
    return value


def _parse_turns(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    how = (
        "give the `prompt_tokens` of the conversation's earlier requests, in order, such as "
        "[812, 1630], or [] in its first turn"
    )
    if isinstance(value, list | tuple) and len(value) > MAX_TURNS:
        raise ValueError(
            f"kv_turns of a request has {len(value)} turns, and at most {MAX_TURNS} are followed: "
            "leave it out"
        )
    if not isinstance(value, list | tuple) or any(type(end) is not int for end in value):
        raise ValueError(
            f"kv_turns of a request must be a list of whole numbers, not {quoted(value)}: {how}"
        )
    if any(later <= before for before, later in pairwise((0, *value))):
        raise ValueError(
            f"kv_turns of a request must rise from at least 1, not {quoted(value)}: {how}"
        )
    if value and value[-1] > MAX_TOKENS:
        raise ValueError(
            f"kv_turns of a request ends at {quoted(value[-1])} tokens, and no prompt has more "
            f"than {MAX_TOKENS}: {how}"
        )
    return tuple(value)
