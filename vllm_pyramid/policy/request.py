# SPDX-License-Identifier: Apache-2.0
"""The policy and budget of a single request, from its settings and the served policy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from vllm_pyramid.plan import Plan
from vllm_pyramid.plan.cache import cached_by_bytes
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy import AUTO, RECOMMENDED, Budget, Policy, load_policy
from vllm_pyramid.policy.capabilities import (
    Feature,
    Used,
    asked,
    refusal_of,
    refusals,
    refuse,
    why_not,
)
from vllm_pyramid.policy.kept_spans import Spans, beside_budget, merged, only_leading, parse_spans
from vllm_pyramid.policy.limits import CACHE_BYTES
from vllm_pyramid.policy.request_keys import AUTO_MODE, EXACT, RequestKeys, check_names

FULL_POLICY = "full"
# Settings of a request that keeps everything, for which no method of the served policy is asked.
KEEP_EVERYTHING = {"kv_policy": FULL_POLICY}
# The scheduler adds this key to a request for the workers: an allocator in place of the policy's.
ALLOCATOR_KEY = "vllm_pyramid_allocator"
# The front end adds this key to a chat: the spans of its template that the server keeps, or None if
# the operator's limit has no room for them.
TEMPLATE_KEY = "vllm_pyramid_keep"
# What requests cannot have together, whatever the policy.
TOGETHER = refusals(
    {
        (Feature.INNER_SPANS, Feature.KV_TURNS): (
            "the conversation is evicted more than once, and behind an eviction each KV head holds "
            "other tokens",
            Feature.INNER_SPANS.fix,
        ),
        (Feature.PROMPT_LOGPROBS, Feature.LATER_TURN): (
            "they would be those of an evicted cache, since the prompt is evicted from where its "
            "earlier turns ended"
        ),
    }
)


class ServedRequest(NamedTuple):
    """The policy and the budget of one request.

    Attributes:
        policy: the served policy, perhaps with parts changed by the request, or `full`.
        budget: the request's own, perhaps with its own floor; None: the policy's.
        keep: spans that stay in every layer and head, in order and apart: the request's own, and
            those of a chat's template (`--kv-keep`). template: the template's alone.
        leaves_out_template: whether the operator's limit has no room for a template.
        exact: whether the prompt keeps what it would keep if it had no turns (`EXACT`).
        auto: whether the scheduler may leave earlier turns out (`AUTO_MODE`).
        why_exact: why a turn in `AUTO_MODE` can only be exact; empty if it has a choice.
        error: what is wrong with the settings, in a worker, which cannot answer the client: the
            served policy then holds until the scheduler has ended the request.
    """

    policy: Policy
    budget: Budget | None = None
    application: str = ""
    turns: tuple[int, ...] | None = None
    keep: Spans = ()
    exact: bool = False
    auto: bool = False
    error: str | None = None
    session: str | None = None
    template: Spans = ()
    leaves_out_template: bool = False
    why_exact: str = ""

    @property
    def resumed_turns(self) -> tuple[int, ...] | None:
        """The turns at whose ends the prompt is evicted; None if no later one resumes it."""
        return None if self.exact else self.turns

    def check(self, params: Any = None) -> None:
        """Raise ValueError if settings or vLLM's `SamplingParams`, if given, do not go together."""
        if self.turns is not None or self.keep or params is not None:
            refuse(self.policy, self._used(params), TOGETHER)

    def in_auto_mode(self, why_no_turns: str | None) -> ServedRequest:
        """Return the request as it is served where its turns may be resumed or exact."""
        used = self._used()
        if why_no_turns is not None:
            why = f"{used[Feature.KV_TURNS]} does not work on this server: {why_no_turns}"
        else:
            row = refusal_of(self.policy, used, TOGETHER)
            if row is None or Feature.KV_TURNS not in row.features:
                return self._replace(auto=True)
            why = row.why(self.policy, used)
        return self._replace(exact=True, why_exact=why)

    def _used(self, params: Any = None) -> Used:
        turns = self.resumed_turns
        used = {
            Feature.KV_TURNS: turns is not None,
            Feature.LATER_TURN: bool(turns),
            Feature.KV_KEEP: bool(self.keep),
            Feature.INNER_SPANS: only_leading(self.keep) != self.keep,
            Feature.PROMPT_LOGPROBS: params is not None and params.prompt_logprobs is not None,
        }
        words = asked(*(feature for feature, is_used in used.items() if is_used))
        if turns is not None and self.session is not None:
            words[Feature.KV_TURNS] = "kv_session"
        return words

    def check_turns(self, prompt_len: int) -> None:
        if self.turns and self.turns[-1] >= prompt_len:
            raise ValueError(
                f"kv_turns of the request ends at {self.turns[-1]} tokens, and its prompt has "
                f"{prompt_len}: earlier turns end inside the prompt; leave out those that the "
                "prompt does not continue"
            )

    def plan(self, prompt_len: int, num_layers: int, block_size: int) -> Plan:
        """Return `Policy.plan` of the request, whose turns have been checked."""
        turns = self.resumed_turns or ()
        return self.policy.plan(prompt_len, num_layers, block_size, self.budget, turns, self.keep)

    def protected_tokens(self, prompt_len: int) -> int:
        """Return how many tokens of a prompt stay beside the budget; 0 if no token is dropped."""
        return beside_budget(self.keep, prompt_len, self.policy) if self.policy.evicts else 0

    @property
    def share_floor(self) -> int | None:
        """The floor of a percentage budget; None for other budgets, or without a floor."""
        budget = (self.budget or self.policy.budget).with_floor(self.policy.min_tokens)
        is_share = budget.percent is not None and self.policy.has_budget
        return (budget.min_tokens or None) if is_share else None


# A client may name the policy as the server's flag did.
_AUTO = (AUTO, RECOMMENDED)


@lru_cache(maxsize=1)
def _full_policy() -> Policy:
    return load_policy(FULL_POLICY)


def resolve(
    policy: Policy, keys: RequestKeys, turn_mode: str = AUTO_MODE, why_no_turns: str | None = None
) -> ServedRequest:
    """Return the policy and the budget of a request with these settings, under the served policy.

    `turn_mode` is of a request with turns that does not say one. In `AUTO_MODE` a request whose
    turns cannot be resumed is served exactly, here or by `why_no_turns` (see `ServedSettings`).

    Raises:
        ValueError: a policy that is not served, or a value that it cannot work with.
    """
    chosen = policy
    if keys.policy == FULL_POLICY:
        chosen = _full_policy() if policy.name != FULL_POLICY else policy
    elif keys.policy not in (None, policy.name) and (keys.policy, policy.name) != _AUTO:
        possible = list(dict.fromkeys((policy.name, FULL_POLICY)))
        raise ValueError(
            f"kv_policy {quoted(keys.policy)} is not served here: a request may ask for "
            f"{' or '.join(repr(name) for name in possible)}"
        )
    budget = keys.budget
    if budget is not None:
        chosen.check_budget(budget)
    if keys.min_tokens is not None:
        if keys.min_tokens and not chosen.has_budget:
            why = "gives each KV head a length of its own" if chosen.evicts else "keeps every token"
            raise ValueError(
                f"kv_min_tokens has no effect on policy {chosen.name!r}, which {why}: leave it out"
            )
        tokens = (budget or chosen.budget).tokens
        if keys.min_tokens and tokens is not None:
            raise ValueError(
                f"kv_min_tokens is a floor of percentage budgets, and the budget is {tokens} "
                "tokens: leave it out"
            )
        budget = (budget or chosen.budget).with_floor(keys.min_tokens)
    if keys.application and not chosen.allocator.samples:
        raise ValueError(
            f"kv_application has no effect on policy {chosen.name!r}, which averages no lengths "
            "over requests (sample_first, sample_share): leave it out"
        )
    own = {"kv_top_n": keys.top_n, "kv_attend_budget": keys.attend_budget}
    if given := tuple((key, value) for key, value in own.items() if value is not None):
        chosen = _with_keys(chosen, given)
    if keys.session is not None and keys.turns is None:
        raise ValueError(
            "kv_session of a request is answered by the front end, which adds kv_turns, and this "
            "request came another way: send kv_turns"
        )
    mode = (keys.turn_mode or turn_mode) if keys.turns is not None else None
    how = keys.application, keys.turns, keys.keep, mode == EXACT
    served = ServedRequest(chosen, budget, *how, session=keys.session)
    if mode == AUTO_MODE:
        served = served.in_auto_mode(why_no_turns)
    served.check()
    return served


# Of a key that no part of a policy takes: what the policy does.
_WHY_NO_EFFECT = {
    "kv_top_n": "keeps V on the device or reads all of it",
    "kv_attend_budget": "attends to everything that it keeps",
}


@cached_by_bytes(CACHE_BYTES)
def _with_keys(policy: Policy, given: tuple[tuple[str, Any], ...]) -> Policy:
    """Return the policy with parts changed by a request; some part must accept each key."""
    keys = dict(given)
    parts = {part.section: part.for_request(keys) for part in policy.parts}
    if keys:
        raise ValueError(
            f"{', '.join(keys)} has no effect on policy {policy.name!r}, which "
            f"{' and '.join(_WHY_NO_EFFECT[key] for key in keys)}: leave it out"
        )
    return policy.model_copy(update={name: part.model_dump() for name, part in parts.items()})


@cached_by_bytes(CACHE_BYTES)
def with_allocator(policy: Policy, fields: tuple[tuple[str, Any], ...]) -> Policy:
    """Return the policy with another allocator, given by its fields (lists as tuples)."""
    return policy.model_copy(update={"allocator": dict(fields)})


def hashable(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a part as `with_allocator` takes them."""
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value) for key, value in fields.items()
    )


def with_template(served: ServedRequest, extra_args: Mapping[str, Any] | None) -> ServedRequest:
    """Return the request with the spans of its chat's template, which the front end has found.

    Where a request evicts more than once, only the part up to the first message is kept.
    """
    if not extra_args or TEMPLATE_KEY not in extra_args:
        return served
    if extra_args[TEMPLATE_KEY] is None:
        return served._replace(leaves_out_template=True)
    spans = parse_spans(extra_args[TEMPLATE_KEY], "the chat's template")
    used = () if served.resumed_turns is None else (Feature.KV_TURNS,)
    if why_not((*TOGETHER, *served.policy.refusals), Feature.INNER_SPANS, used) is not None:
        spans = only_leading(spans)
    served = served._replace(keep=merged((*served.keep, *spans)), template=merged(spans))
    served.check()
    return served


def check_request(
    policy: Policy, params: Any, why_no_turns: str | None = None, turn_mode: str = AUTO_MODE
) -> ServedRequest:
    """Check the settings of a client's request, in the front end; ValueError: a mistake."""
    check_names(params.extra_args)
    if params.extra_args and ALLOCATOR_KEY in params.extra_args:
        raise ValueError(f"{ALLOCATOR_KEY} cannot be set by requests: leave it out")
    served = resolve(policy, RequestKeys.parse(params.extra_args), turn_mode, why_no_turns)
    served = with_template(served, params.extra_args)
    if served.resumed_turns is not None and why_no_turns is not None:
        key = "kv_turns" if served.session is None else "kv_session"
        raise ValueError(
            f"{key} does not work on this server: {why_no_turns}; {Feature.KV_TURNS.fix}"
        )
    served.check(params)
    return served


def for_request(
    policy: Policy,
    extra_args: Mapping[str, Any] | None,
    turn_mode: str = AUTO_MODE,
    why_no_turns: str | None = None,
) -> ServedRequest:
    """Resolve a request's settings in a worker, which reports mistakes as `ServedRequest.error`.

    An allocator that the scheduler sends with the request replaces the policy's.
    """
    try:
        served = resolve(policy, RequestKeys.parse(extra_args), turn_mode, why_no_turns)
        served = with_template(served, extra_args)
        if extra_args and ALLOCATOR_KEY in extra_args:
            fields = hashable(extra_args[ALLOCATOR_KEY])
            served = served._replace(policy=with_allocator(served.policy, fields))
        return served
    except (ValueError, TypeError, AttributeError) as error:
        return ServedRequest(policy, error=str(error))
