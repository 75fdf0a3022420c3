# SPDX-License-Identifier: Apache-2.0
"""Parse the settings that a request carries in `SamplingParams.extra_args` (`vllm_xargs`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm_pyramid.plan import Budget
from vllm_pyramid.policy.checks import parse_min_tokens, refuse_misspelt

MAX_NAME = 256
MAX_TURNS = 512  # of a conversation; each is planned in the scheduler and in the workers
REQUEST_KEYS = (
    *("kv_policy", "kv_budget", "kv_min_tokens", "kv_application", "kv_top_n", "kv_turns"),
)


@dataclass(frozen=True)
class RequestKeys:
    """The settings in a request, with types and ranges checked.

    Attributes:
        policy: `full` to opt out of eviction, or the served policy's own name, or None.
        budget: the request's own budget; None for the policy's.
        min_tokens: the floor of a percentage budget; None for the policy's.
        application: requests with the same name share an average of sampled budgets
            (`sample_first`, `sample_share`).
        top_n: keys whose V is read from host memory; None for the policy's.
        turns: tokens at which the prompts of the conversation's earlier turns ended; empty for the
            first turn, None for a request that no later one resumes.
    """

    policy: str | None = None
    budget: Budget | None = None
    min_tokens: int | None = None
    application: str = ""
    top_n: int | None = None
    turns: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestKeys:
        """Parse `SamplingParams.extra_args`; `resolve` checks them against the served policy.

        Raises:
            ValueError: wrong type or range, or a key that nearly matches one of ours.
        """
        if not extra_args:
            return cls()
        refuse_misspelt(extra_args, REQUEST_KEYS, "the request's vllm_xargs")
        policy = extra_args.get("kv_policy")
        if policy is not None and not (isinstance(policy, str) and policy):
            raise ValueError(f"kv_policy of a request must be a policy's name, not {policy!r}")
        application = extra_args.get("kv_application")
        if application is None:
            application = ""
        if not isinstance(application, str) or len(application) > MAX_NAME:
            raise ValueError(
                f"kv_application of a request must be a name of at most {MAX_NAME} characters, not "
                f"{application!r}"
            )
        top_n = extra_args.get("kv_top_n")
        if top_n is not None and not (type(top_n) is int and 1 <= top_n < 2**31):
            raise ValueError(f"kv_top_n of a request must be a number of keys, not {top_n!r}")
        value = extra_args.get("kv_budget")
        try:
            budget = None if value is None else Budget.parse(value)
        except ValueError as error:
            raise ValueError(f"kv_budget of the request: {error}") from None
        floor = parse_min_tokens(extra_args.get("kv_min_tokens"), "kv_min_tokens of a request")
        turns = _parse_turns(extra_args.get("kv_turns"))
        return cls(policy, budget, floor, application, top_n, turns)


def _parse_turns(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    how = (
        "give the `prompt_tokens` of the conversation's earlier requests, in order, such as "
        "[812, 1630], or [] in its first turn"
    )
    if not isinstance(value, list | tuple) or any(type(end) is not int for end in value):
        raise ValueError(
            f"kv_turns of a request must be a list of whole numbers, not {value!r}: {how}"
        )
    if any(later <= before for before, later in pairwise((0, *value))):
        raise ValueError(f"kv_turns of a request must rise from at least 1, not {value!r}: {how}")
    if len(value) > MAX_TURNS:
        raise ValueError(
            f"kv_turns of a request has {len(value)} turns, and at most {MAX_TURNS} are followed: "
            "leave it out"
        )
    return tuple(value)
