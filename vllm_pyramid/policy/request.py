# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for, and what then holds for it.

A request may carry `kv_policy`, `kv_budget`, `kv_min_tokens`, `kv_application`, `kv_top_n` and
`kv_turns` in `SamplingParams.extra_args` (`vllm_xargs`). They are read once on each side: in the
front end, which answers a mistake with 400, in the scheduler and in each worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from vllm_pyramid.plan import Plan
from vllm_pyramid.policy import AUTO, RECOMMENDED, Budget, Policy, load_policy
from vllm_pyramid.policy.checks import parse_min_tokens, refuse_misspelt

FULL_POLICY = "full"
MAX_NAME = 256
MAX_TURNS = 512  # of a conversation; each is planned in the scheduler and in the workers
REQUEST_KEYS = (
    *("kv_policy", "kv_budget", "kv_min_tokens", "kv_application", "kv_top_n", "kv_turns"),
)
# What the scheduler adds to a request for the workers: an allocator in place of the policy's. A
# client's is refused.
ALLOCATOR_KEY = "vllm_pyramid_allocator"


@dataclass(frozen=True)
class RequestKeys:
    """What a single request asks for, with types and ranges checked.

    Attributes:
        policy: `full` to opt out of eviction, or the served policy's own name; None for that.
        budget: the request's own budget; None for the policy's.
        min_tokens: the least that a share of its prompt comes to; None for the policy's.
        application: whose average of sampled budgets it shares (`sample_first`, `sample_share`).
        top_n: keys that it takes V of, with V in host memory; None for the policy's.
        turns: tokens at which the prompts of its conversation's earlier turns ended; empty for the
            first turn, None for a request that leaves nothing to a next one.
    """

    policy: str | None = None
    budget: Budget | None = None
    min_tokens: int | None = None
    application: str = ""
    top_n: int | None = None
    turns: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestKeys:
        """Read `SamplingParams.extra_args`.

        Whether the values suit the served policy is for `resolve` to say.

        Raises:
            ValueError: wrong type or range, or a key that is nearly one of ours.
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
        least = parse_min_tokens(extra_args.get("kv_min_tokens"), "kv_min_tokens of a request")
        turns = _parse_turns(extra_args.get("kv_turns"))
        return cls(policy, budget, least, application, top_n, turns)


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


class ServedRequest(NamedTuple):
    """What holds for a request.

    Attributes:
        policy: the served one, perhaps with parts of its own, or `full`.
        budget: its own, perhaps with a floor of its own; None: the policy's.
        application, turns: see `RequestKeys`.
        error: what was wrong, where there is nobody to answer: the served policy then holds until
            the scheduler has ended the request.
    """

    policy: Policy
    budget: Budget | None = None
    application: str = ""
    turns: tuple[int, ...] | None = None
    error: str | None = None

    def check_turns(self, prompt_len: int) -> None:
        """Raise ValueError if an earlier turn ended behind the request's prompt."""
        if self.turns and self.turns[-1] >= prompt_len:
            raise ValueError(
                f"kv_turns of the request ends at {self.turns[-1]} tokens, and its prompt has "
                f"{prompt_len}: earlier turns end inside the prompt; leave out those that it does "
                "not go on from"
            )

    def plan(self, prompt_len: int, num_layers: int, block_size: int) -> Plan:
        """`Policy.plan` of the request, whose turns have been checked."""
        return self.policy.plan(prompt_len, num_layers, block_size, self.budget, self.turns or ())

    @property
    def least_of_share(self) -> int | None:
        """The floor of its share of the prompt; None where there is no share, or no floor."""
        budget = (self.budget or self.policy.budget).with_floor(self.policy.min_tokens)
        is_share = budget.percent is not None and self.policy.evicts
        return (budget.min_tokens or None) if is_share else None


# A client may say what the server was told.
_AUTO = (AUTO, RECOMMENDED)


@lru_cache(maxsize=1)
def _full_policy() -> Policy:
    return load_policy(FULL_POLICY)


def resolve(policy: Policy, keys: RequestKeys) -> ServedRequest:
    """The policy and the budget that hold for a request.

    Args:
        policy: the served policy. keys: what the request asks for.

    Raises:
        ValueError: a policy that is not served, or a value that this policy cannot work with.
    """
    chosen = policy
    if keys.policy == FULL_POLICY:
        chosen = _full_policy() if policy.name != FULL_POLICY else policy
    elif keys.policy not in (None, policy.name) and (keys.policy, policy.name) != _AUTO:
        possible = list(dict.fromkeys((policy.name, FULL_POLICY)))
        raise ValueError(
            f"kv_policy {keys.policy!r} is not served here: a request may ask for "
            f"{' or '.join(repr(name) for name in possible)}"
        )
    budget = keys.budget
    if budget is not None:
        chosen.check_budget(budget)
    if keys.min_tokens is not None:
        if keys.min_tokens and not chosen.evicts:
            raise ValueError(
                f"kv_min_tokens has no effect on policy {chosen.name!r}, which keeps every token: "
                "leave it out"
            )
        tokens = (budget or chosen.budget).tokens
        if keys.min_tokens and tokens is not None:
            raise ValueError(
                f"kv_min_tokens is a floor of shares, and the budget is {tokens} tokens: leave it "
                "out"
            )
        budget = (budget or chosen.budget).with_floor(keys.min_tokens)
    if keys.top_n is not None:
        chosen = _with_keys(chosen, (("kv_top_n", keys.top_n),))
    if keys.turns is not None and (reason := chosen.not_resumable) is not None:
        raise ValueError(
            f"kv_turns does not go with policy {chosen.name!r} yet: {reason}; leave it out"
        )
    return ServedRequest(chosen, budget, keys.application, keys.turns)


@lru_cache(maxsize=256)
def _with_keys(policy: Policy, given: tuple[tuple[str, Any], ...]) -> Policy:
    """The policy with parts as a request wants them; each key must be somebody's."""
    keys = dict(given)
    parts = {part.section: part.for_request(keys) for part in policy.parts}
    if keys:
        raise ValueError(
            f"{', '.join(keys)} has no effect on policy {policy.name!r}, which keeps V on the "
            "device or attends to all of it: leave it out"
        )
    return policy.model_copy(update={name: part.model_dump() for name, part in parts.items()})


@lru_cache(maxsize=4096)
def with_allocator(policy: Policy, fields: tuple[tuple[str, Any], ...]) -> Policy:
    """The policy with another allocator, given by its fields (lists as tuples)."""
    return policy.model_copy(update={"allocator": dict(fields)})


def hashable(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Fields of a part for `with_allocator`."""
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value) for key, value in fields.items()
    )


def check_request(policy: Policy, params: Any, no_turns: str | None = None) -> ServedRequest:
    """What holds for a request that has just come from a client.

    Args:
        params: vLLM's `SamplingParams`. no_turns: see `ServedSettings`.

    Raises:
        ValueError: a wrong key or value, or something that a part of the policy cannot give.
    """
    if params.extra_args and ALLOCATOR_KEY in params.extra_args:
        raise ValueError(f"{ALLOCATOR_KEY} is not for requests to set: leave it out")
    served = resolve(policy, RequestKeys.parse(params.extra_args))
    if served.turns is not None and no_turns is not None:
        raise ValueError(f"kv_turns does not work on this server: {no_turns}; leave it out")
    if served.turns and params.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs would be those of an evicted cache: the prompt is evicted from where "
            "its earlier turns ended (kv_turns); leave one of them out"
        )
    for part in served.policy.parts:
        part.check_request(served.policy, params)
    return served


def for_request(policy: Policy, extra_args: Mapping[str, Any] | None) -> ServedRequest:
    """`resolve` for a worker, which has no one to answer.

    An allocator that the scheduler has sent along takes the place of the policy's.
    """
    try:
        served = resolve(policy, RequestKeys.parse(extra_args))
        if extra_args and ALLOCATOR_KEY in extra_args:
            fields = hashable(extra_args[ALLOCATOR_KEY])
            served = served._replace(policy=with_allocator(served.policy, fields))
        return served
    except (ValueError, TypeError, AttributeError) as error:
        return ServedRequest(policy, error=str(error))
