# SPDX-License-Identifier: Apache-2.0
"""The base of all hooks in a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from vllm_pyramid.step.step import Step
    from vllm_pyramid.step.trace import TraceWriter


class WorkerHooks:
    """What one part of a policy does in a worker: the base of the four protocols.

    Attributes:
        name: of the method; `SchedulerHooks` of the same name receive its reports.
        trace: writes kept positions; None without a trace.
        asks_ranks: whether a call of these hooks asks the other tensor-parallel ranks
            (`WorkerContext.ranks`), which may wait inside it where it raises in one: the worker
            then ends.
    """

    name: str = ""
    trace: TraceWriter | None = None
    asks_ranks: ClassVar[bool] = False

    def may_fail(self, step: Step) -> bool:
        """Return whether a request may have failed in a step because of these hooks.

        The ranks then tell one another, so all of them must return the same. Asked at the end of a
        step, of hooks that work in steps without evictions.
        """
        return True

    @property
    def label(self) -> str:
        """What messages call the method."""
        return self.name or type(self).__qualname__
