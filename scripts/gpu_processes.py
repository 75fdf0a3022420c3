# SPDX-License-Identifier: Apache-2.0
"""Processes that are ended with all that they have started, within a limit of time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from threading import Lock
from typing import Any

PATIENCE = 90  # seconds in which a process that is asked to end must have ended


def exit_when_asked() -> None:
    """Raise SystemExit where SIGTERM would end this process at once, and leave others behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def signal_group(process_id: int, sign: int) -> None:
    """Send a signal to a process that leads its group, and to the group; it may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_id, sign)


def end(process: subprocess.Popen[Any], patience: float | None = None) -> None:
    """End a process and what it has started, which would keep the device's memory.

    A bench's engines and servers are in sessions of their own: it ends them if it is asked to end,
    and could not if it were killed.
    """
    asked = PATIENCE if patience is None else patience
    for sign, seconds in ((signal.SIGTERM, asked), (signal.SIGKILL, None)):
        if sign == signal.SIGTERM and process.poll() is not None:
            continue
        signal_group(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


class Processes:
    """The processes that run."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()
        self._lock = Lock()
        self._is_over = False

    def start(self, line: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start one in a session of its own.

        Raises:
            OSError: there is no such program, or all were ended.
        """
        with self._lock:
            if self._is_over:
                raise OSError("the check was interrupted")
            process = subprocess.Popen(line, start_new_session=True, **options)
            self._running.add(process)
            return process

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End one, if it has not ended."""
        end(process)
        with self._lock:
            self._running.discard(process)

    def end_all(self) -> None:
        """End those that run, and start no others."""
        with self._lock:
            self._is_over, running = True, [*self._running]
        for process in running:  # all are asked before the first is waited for
            signal_group(process.pid, signal.SIGTERM)
        for process in running:
            self.end(process)
