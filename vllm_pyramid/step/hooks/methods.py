# SPDX-License-Identifier: Apache-2.0
"""The hooks of all methods of a worker, sorted by what they override."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_pyramid.step.hooks.worker import (
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    StepHooks,
    WorkerHooks,
)

if TYPE_CHECKING:
    from vllm_pyramid.step.step import Step

H = TypeVar("H", bound=WorkerHooks)

# The functions that a back end calls, of which it names those that it does (`check_called`).
LAYER_HOOKS = frozenset({"after_write", "before_attention", "attend", "after_attention"})


class MethodHooks:
    """The hooks of a worker's methods: for each function the hooks that override it, in order.

    They are sorted once, so that a step and a layer loop over those alone that do something.

    Attributes:
        cache: the hooks that derive from `CacheHooks`, which are called at start-up.
        scorer, scorer_inside: score evictions at a prompt's end and later, and inside it; or None.
        decides: the hooks that decide the lengths of deferred evictions, or None.
        takes_scores: the hooks that take scores of requests that are not evicted, or None.
        in_layers: whether a step without evictions calls any hook around a layer's attention.
        in_evictions: whether an eviction calls any hook.

    Raises:
        ValueError: two methods want to score the same evictions, to decide their lengths, or to
            take scores.
    """

    def __init__(self, hooks: Iterable[WorkerHooks] = ()) -> None:
        self._all = tuple(hooks)
        for one in self._all:
            if not isinstance(one, (CacheHooks, StepHooks, LayerHooks, EvictionHooks)):
                raise ValueError(
                    f"{one.label} is none of CacheHooks, StepHooks, LayerHooks and EvictionHooks: "
                    "none of its functions would be called"
                )
        self.cache = tuple(one for one in self._all if isinstance(one, CacheHooks))
        self.begin_step = self._overriding(StepHooks, "begin_step")
        self.end_step = self._overriding(StepHooks, "end_step")
        self.without_graphs = self._overriding(StepHooks, "without_graphs")
        self.forget = self._overriding(StepHooks, "forget")
        self.copy_blocks = self._overriding(CacheHooks, "copy_blocks")
        self.after_write = self._overriding(LayerHooks, "after_write")
        self.before_attention = self._overriding(LayerHooks, "before_attention")
        self.attend = self._overriding(LayerHooks, "attend")
        self.after_attention = self._overriding(LayerHooks, "after_attention")
        self.in_layers = bool(self.before_attention or self.attend or self.after_attention)
        self._in_steps = (
            *(*self.begin_step, *self.after_write, *self.before_attention),
            *(*self.attend, *self.after_attention, *self.end_step),
        )
        self.before_compact = self._overriding(EvictionHooks, "before_compact")
        self.after_compact = self._overriding(EvictionHooks, "after_compact")
        self.after_eviction = self._overriding(EvictionHooks, "after_eviction")
        scorers = self._overriding(EvictionHooks, "score")
        self.scorer = _only((one for one in scorers if not one.inside), "score evictions")
        inside = _only((one for one in scorers if one.inside), "score evictions inside prompts")
        self.scorer_inside = inside or self.scorer
        deciding = self._overriding(EvictionHooks, "decide")
        self.decides = _only(deciding, "decide the lengths of deferred evictions")
        taking = self._overriding(EvictionHooks, "take_scores")
        self.takes_scores = _only(taking, "take scores")
        moving = self.before_compact or self.after_compact or self.after_eviction
        self.in_evictions = bool(moving or scorers or deciding)

    def __iter__(self) -> Iterator[WorkerHooks]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def may_fail(self, step: Step) -> bool:
        """Return whether requests may have failed in a step, the same on all ranks."""
        return any(one.may_fail(step) for one in self._in_steps)

    def _overriding(self, protocol: type[H], function: str) -> tuple[H, ...]:
        base: Callable[..., Any] = getattr(protocol, function)
        return tuple(
            one
            for one in self._all
            if isinstance(one, protocol) and getattr(type(one), function) is not base
        )

    def check_called(self, backend: str, called: frozenset[str]) -> None:
        """Raise ValueError for a method with a hook that an attention back end does not call.

        `called` are those of `LAYER_HOOKS` that it calls whenever its layers run.
        """
        for function in sorted(LAYER_HOOKS - called):
            for one in getattr(self, function):
                raise ValueError(
                    f"the method {one.label} has the hook `{function}`, which the attention back "
                    f"end {backend} does not call in every step of this policy: choose another "
                    "back end (--attention-backend) or policy; a part that attends, or works in "
                    "every step, says so (`Component.attends`, `works_in_every_step`)"
                )


def _only(hooks: Iterable[H], what: str) -> H | None:
    """Return the one of `hooks`, or None. Raises ValueError for two."""
    found = list(hooks)
    if len(found) > 1:
        raise ValueError(
            f"the methods {' and '.join(one.label for one in found)} both want to {what}: choose "
            "a policy with one of them"
        )
    return found[0] if found else None
