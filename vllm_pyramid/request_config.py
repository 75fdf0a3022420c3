# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for, and what then holds for it.

A request may carry `kv_policy`, `kv_budget`, `kv_application` and `kv_top_n` in
`SamplingParams.extra_args` (`vllm_xargs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm_pyramid.config import refuse_misspelt
from vllm_pyramid.policy import Budget, Policy, load_policy

FULL_POLICY = "full"
MAX_NAME = 256
REQUEST_KEYS = ("kv_policy", "kv_budget", "kv_application", "kv_top_n")
# What the scheduler adds to a request for the workers; a client's is refused.
SHARES_KEY = "vllm_pyramid_shares"


@dataclass(frozen=True)
class RequestOverride:
    """What a single request asks for.

    Attributes:
        policy: `full` to opt out of eviction, or the served policy's own name; None for that.
        budget: the request's own budget; None for the policy's.
        application: whose average of sampled budgets it shares (`sample_first`, `sample_share`).
        top_n: keys that it fetches V of, for a policy with `swap_v`; None for the policy's.
    """

    policy: str | None = None
    budget: Budget | None = None
    application: str = ""
    top_n: int | None = None

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestOverride | None:
        """Read `SamplingParams.extra_args`; None if it holds nothing of ours.

        Whether the values suit the served policy is for `resolve` to say.

        Raises:
            ValueError: wrong type or range, or a key that is nearly one of ours.
        """
        if not extra_args:
            return None
        refuse_misspelt(extra_args, REQUEST_KEYS, "the request's vllm_xargs")
        if not any(key in extra_args for key in REQUEST_KEYS):
            return None
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
        if value is None:
            given = policy or application or top_n
            return cls(policy, None, application, top_n) if given else None
        try:
            return cls(policy, Budget.parse(value), application, top_n)
        except ValueError as error:
            raise ValueError(f"kv_budget of the request: {error}") from None


def refuse_internal(extra_args: Mapping[str, Any] | None) -> None:
    """Raise ValueError if a client sends what only the scheduler may."""
    if extra_args and SHARES_KEY in extra_args:
        raise ValueError(f"{SHARES_KEY} is not for requests to set: leave it out")


def refuse_prompt_logprobs(policy: Policy, prompt_logprobs: int | None) -> None:
    """Raise ValueError if a request wants what a policy that thins prompts never computes."""
    if policy.thinner is not None and prompt_logprobs is not None:
        raise ValueError(
            f"prompt_logprobs with policy {policy.name!r}: tokens of the prompt leave the forward "
            'pass before they have any; leave them out, or send {"kv_policy": "full"} along'
        )


@lru_cache(maxsize=1)
def _full_policy() -> Policy:
    return load_policy(FULL_POLICY)


def resolve(policy: Policy, override: RequestOverride | None) -> tuple[Policy, Budget | None]:
    """The policy and the budget (None: the policy's own) that hold for a request.

    Args:
        policy: the served policy. override: what the request asks for.

    Raises:
        ValueError: a policy that is not served, or a budget that this policy cannot work with.
    """
    if override is None:
        return policy, None
    chosen = policy
    if override.policy == FULL_POLICY:
        chosen = _full_policy() if policy.name != FULL_POLICY else policy
    elif override.policy not in (None, policy.name):
        possible = list(dict.fromkeys((policy.name, FULL_POLICY)))
        raise ValueError(
            f"kv_policy {override.policy!r} is not served here: a request may ask for "
            f"{' or '.join(repr(name) for name in possible)}"
        )
    if override.budget is not None:
        chosen.check_budget(override.budget)
    if override.top_n is not None:
        if not chosen.swap_v:
            raise ValueError(
                f"kv_top_n has no effect on policy {chosen.name!r}, which keeps V on the device "
                "or attends to all of it: leave it out"
            )
        chosen = _with_top_n(chosen, override.top_n)
    return chosen, override.budget


@lru_cache(maxsize=256)
def _with_top_n(policy: Policy, top_n: int) -> Policy:
    return policy.model_copy(update={"top_n": top_n})


@lru_cache(maxsize=4096)
def with_shares(policy: Policy, shares: tuple[float, ...]) -> Policy:
    """The policy with fixed shares in place of its solver."""
    return policy.model_copy(update={"allocator": {"kind": "shares", "shares": shares}})


def settle(
    policy: Policy, extra_args: Mapping[str, Any] | None
) -> tuple[Policy, Budget | None, str | None]:
    """`resolve` for the engine, which has no one to answer: policy, budget, and what was wrong.

    Where something was wrong, the served policy holds until the scheduler has ended the request.
    Shares that the scheduler has sent along take the place of the policy's solver.
    """
    try:
        chosen, budget = resolve(policy, RequestOverride.parse(extra_args))
        if extra_args and SHARES_KEY in extra_args:
            chosen = with_shares(chosen, tuple(extra_args[SHARES_KEY]))
        return chosen, budget, None
    except ValueError as error:
        return policy, None, str(error)
