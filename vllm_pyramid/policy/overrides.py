# SPDX-License-Identifier: Apache-2.0
"""What the operator lets requests change: which settings, and how much a prompt may keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_pyramid.plan import Budget
from vllm_pyramid.policy.kept_spans import Spans, beside_budget
from vllm_pyramid.policy.kinds import did_you_mean
from vllm_pyramid.policy.request_keys import REQUEST_KEYS

if TYPE_CHECKING:
    from vllm_pyramid.plan import Plan
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.policy.request import ServedRequest

_PREFIX = "kv_"
OVERRIDES = tuple(key.removeprefix(_PREFIX) for key in REQUEST_KEYS)
_NONE = "none"
_RAISES_KEPT = frozenset(("policy", "budget", "min_tokens", "keep"))


def parse_overrides(value: object) -> tuple[str, ...]:
    """Parse `kv_request_overrides`: names of settings, as a list or separated by commas, or `none`.

    ValueError: an unknown name, `none` with others, or neither text nor a list.
    """
    how = f"give none, or some of {','.join(OVERRIDES)}"
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"kv_request_overrides must be a list of settings, not {value!r}: {how}")
    if list(names) == [_NONE]:
        return ()
    for name in names:
        if name == _NONE:
            raise ValueError(f"kv_request_overrides names none and other settings: {how}")
        if name not in OVERRIDES:
            hint = did_you_mean(name.removeprefix(_PREFIX), OVERRIDES)
            raise ValueError(
                f"kv_request_overrides names {name!r}, which is no setting of a request{hint}; "
                f"{how}"
            )
    return tuple(name for name in OVERRIDES if name in names)


class Layers(NamedTuple):
    """The layers that evict: how many, and the tokens of a block (the largest if they differ)."""

    number: int
    block_size: int


@dataclass(frozen=True)
class RequestOverrides:
    """What requests may change of the served policy; by default every setting, without a limit.

    Attributes:
        allowed: settings that requests may give, from `OVERRIDES`.
        max_budget: the most that a request may have its prompt keep, in tokens or as a share, or
            what the served policy keeps of it, if that is more. None: no limit.
    """

    allowed: tuple[str, ...] = OVERRIDES
    max_budget: int | str | None = None

    @cached_property
    def _limit(self) -> Budget | None:
        return None if self.max_budget is None else Budget.parse(self.max_budget)

    def check_policy(self, policy: Policy, *, keeps_tools: bool) -> None:
        """Raise ValueError for a limit that can have no effect on the served policy.

        `keeps_tools` says whether chats with tools keep their templates without `--kv-keep`.
        """
        if self._limit is None:
            return
        reason = None
        if not policy.evicts:
            reason = f"policy {policy.name!r} keeps every token"
        elif policy.budget.percent == 100:
            reason = f"the budget of policy {policy.name!r} is 100% already"
        elif not keeps_tools and not _RAISES_KEPT.intersection(self.allowed):
            reason = (
                "kv_request_overrides lets no request change its policy, budget, floor or spans, "
                "and chats with tools keep nothing by default"
            )
        if reason is not None:
            raise ValueError(f"kv_max_request_budget would have no effect: {reason}; leave it out")

    def check_keys(self, extra_args: Mapping[str, Any] | None) -> None:
        """Raise ValueError for a setting that the operator has forbidden.

        A request that names its session gets `kv_turns` from the front end, which refuses both from
        a client. So a client that may name a session needs no right to give turns.
        """
        if not extra_args:
            return
        for name in OVERRIDES:
            if name in self.allowed or extra_args.get(_PREFIX + name) is None:
                continue
            if name == "turns" and "session" in self.allowed and extra_args.get("kv_session"):
                continue
            names = ", ".join(_PREFIX + allowed for allowed in self.allowed)
            may = f"may only give {names}" if names else "may give no settings of their own"
            raise ValueError(
                f"{_PREFIX}{name} is not open to requests on this server, which {may} "
                "(--kv-request-overrides): leave it out"
            )

    def lacks_room(self, served: ServedRequest, policy: Policy, prompt_len: int) -> bool:
        """Return whether a prompt keeps more than the limit, its template's spans included."""
        if self._limit is None or policy.schedule.keeps_prompts:
            return False
        return self._over(served, policy, prompt_len, ()) is not None

    def check_kept(
        self,
        served: ServedRequest,
        policy: Policy,
        prompt_len: int,
        max_tokens: int,
        layers: Layers | None,
    ) -> None:
        """Raise ValueError for a request that would keep more than the operator allows.

        A prompt may keep what the server (`policy`) keeps of it by itself, or `max_budget` if that
        is more, beside its template's spans, which the front end has left out where they count and
        `lacks_room`. `layers` are those that evict; None where only the scheduler knows them, which
        then checks what a prompt holds behind its turns.
        """
        if self._limit is None:
            return
        # A policy that also evicts generated tokens holds a whole sequence to its budget, or the
        # answer alone where every prompt stays.
        lengths = [prompt_len, prompt_len + (max_tokens if policy.schedule.every else 0)]
        if policy.schedule.keeps_prompts:
            lengths, served = [max_tokens], served._replace(keep=(), template=())
        for length in lengths:
            if (over := self._over(served, policy, length, served.template)) is not None:
                kept, most, usual = over
                spans = served.protected_tokens(length)
                theirs = f", {spans} of them for its spans" if spans else ""
                template = beside_budget(served.template, length, policy)
                beside = f" beside {template} of the chat's template" if template else ""
                raise ValueError(
                    f"this request would keep {kept} of {length} tokens in each layer{theirs} (its "
                    f"kv_policy, kv_budget, kv_min_tokens or kv_keep), and this server allows "
                    f"{most} (--kv-max-request-budget {self.max_budget}{beside}; its own policy "
                    f"keeps {usual}): ask for less, or leave the settings out"
                )
        if served.resumed_turns and layers is not None:
            self._check_held(served, policy, prompt_len, layers, self._limit)

    def _over(
        self, served: ServedRequest, policy: Policy, length: int, beside: Spans
    ) -> tuple[int, int, int] | None:
        """Return what a sequence keeps, may keep, and keeps by the server's policy; None if it may.

        The last two count the spans of `beside`.
        """
        assert self._limit is not None
        kept = _kept(served.policy, served.budget, length, served.keep)
        usual = _kept(policy, None, length, beside)
        most = max(usual, _limited(policy, self._limit, length, beside))
        return (kept, most, usual) if kept > most else None

    def _check_held(
        self, served: ServedRequest, policy: Policy, prompt_len: int, layers: Layers, limit: Budget
    ) -> None:
        """Refuse a prompt that holds more behind its turns than the server's own policy would.

        Turns' ends evict only at a distance, so a prompt may hold more than its budget. What the
        server's policy would hold with the same turns, at its own budget and at the limit, is
        allowed.
        """
        count, block_size = layers
        turns, spans = served.resumed_turns or (), served.template
        held = _held(served.plan(prompt_len, count, block_size))
        allowed = count * max(
            _kept(policy, None, prompt_len, spans), _limited(policy, limit, prompt_len, spans)
        )
        for budget in (None, limit):
            if budget is not None:
                try:
                    policy.check_budget(budget)
                except ValueError:  # the policy has another form of budget, or a larger window
                    continue
            plan = policy.plan(prompt_len, count, block_size, budget, turns, spans)
            allowed = max(allowed, _held(plan))
        # Evictions of two budgets may fall on different turns, less than that apart, and each layer
        # gives up whole blocks.
        slack = policy.min_turn - 1 + block_size - 1
        if held > allowed + count * slack:
            raise ValueError(
                f"this request would hold {-(-held // count)} of {prompt_len} tokens in each layer "
                f"behind its {len(turns)} turns (its kv_budget, kv_min_tokens or kv_keep), and "
                f"this server allows {allowed // count + slack} (--kv-max-request-budget "
                f"{self.max_budget}; what its own policy holds with the same turns, if that is "
                "more): ask for less, or leave the settings or turns out"
            )


def _held(plan: Plan) -> int:
    """Return the tokens that all layers together hold behind a prompt's end."""
    end = plan.estimate().end
    return int((end.computed - end.skip).sum())


def _kept(policy: Policy, budget: Budget | None, length: int, spans: Spans) -> int:
    """Return the tokens that a layer keeps of a sequence, on average."""
    if not policy.evicts:
        return length
    budget = (budget or policy.budget).with_floor(policy.min_tokens)
    return _limited(policy, budget, length, spans)


def _limited(policy: Policy, budget: Budget, length: int, spans: Spans) -> int:
    """Return the tokens of spans, and the budget of the others."""
    protected = beside_budget(spans, length, policy)
    return protected + budget.tokens_for(length - protected, policy.min_budget)
