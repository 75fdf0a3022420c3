# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a running bench."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from vllm_pyramid.command_parts import progress_bar

__all__ = ["Progress"]


class Progress:
    """Shows what is being done, and how many of `total` are; use it in a `with` statement."""

    def __init__(self, console: Any, total: int) -> None:
        self._bar = progress_bar(console)
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Say what is being done."""
        self._bar.update(self._task, description=text)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self._bar.advance(self._task, count)
