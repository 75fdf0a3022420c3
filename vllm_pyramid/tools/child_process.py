# SPDX-License-Identifier: Apache-2.0
"""Runs an engine or a server in a process, which frees its memory when it ends.

The child reads tasks from standard input, one JSON object a line. It prints messages to standard
output, one JSON object a line, each line beginning with `MARK`; all other lines are vLLM's and are
ignored. `run_child` gives a child one task. A `Child` stays and gets further tasks; the last
message of an answer has `done`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

MARK = "@vllm-pyramid "
# The end of a failed process's log that is shown; the reason stands in the last lines.
_LOG_TAIL_LINES = 25
# What nanobind prints where a process that has imported Triton ends by an error: more lines than
# are shown, and none says why.
_LEAKS = ("nanobind: ", " - leaked ", " - ... skipped remainder")


class ChildError(RuntimeError):
    """A child process failed; the message is for the user and holds the end of its log."""


def say(**message: Any) -> None:
    """Send a message from the child to its parent."""
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def read_task() -> dict[str, Any]:
    """Return, in the child, the one task that its parent gives."""
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    return task


def read_tasks() -> Iterator[dict[str, Any]]:
    """Yield the parent's tasks, in the child, until it closes the pipe; wait asleep for each."""
    for line in iter(sys.stdin.readline, ""):
        yield json.loads(line)


class Child:
    """A process that waits for tasks, with the protocol at the top of this file.

    Its log is part of error messages. It ends with its `with` statement.

    Args:
        what: its name in error messages.
        offline: whether nothing may be fetched from a hub.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        what: str,
        *,
        offline: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.what = what
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                "VLLM_LOGGING_LEVEL": "WARNING",
                "TOKENIZERS_PARALLELISM": "false",
                "VLLM_NO_USAGE_STATS": "1",
                # Huge pages. PyTorch reads it once, at its first allocation, so an engine with a
                # policy can ask for them in its own processes alone, not in this one.
                "THP_MEM_ALLOC_ENABLE": "1",
                **({"HF_HUB_OFFLINE": "1"} if offline else {}),
                **os.environ,
                **(environment or {}),
            },
            start_new_session=True,  # a process group of its own, with the engine's processes
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end_group(self._process)
        self._log.close()

    def error(self) -> ChildError:
        """Return the status and the end of the log of a process that has ended or is about to."""
        status = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log if not line.startswith(_LEAKS)]
        tail = "".join(lines[-_LOG_TAIL_LINES:])
        return ChildError(f"{self.what} failed with exit status {status}; its log ends:\n\n{tail}")

    def ask(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Give it a task, and yield messages up to one that has `done`; ChildError: it ended."""
        self._send(task)
        for message in self._messages():
            yield message
            if "done" in message:
                return
        raise self.error()

    def finish(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Give it its last task, and yield its messages until it ends; ChildError: it failed."""
        self._send(task)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        yield from self._messages()
        if self._process.wait() != 0:
            raise self.error()

    def _send(self, task: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # A process that died before it read must be reported with its log, not as a broken pipe.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))


def run_child(
    module: str, task: Mapping[str, Any], what: str, *, offline: bool
) -> Generator[dict[str, Any], None, None]:
    """Run `python -m module` on one task, and yield its messages as they come.

    Every process that it started has ended when the iterator is closed or exhausted.

    Raises:
        ChildError: it failed.
    """
    with Child([sys.executable, "-m", module], what, offline=offline) as child:
        yield from child.finish(task)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process that leads a group, and the processes that it started."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is not None and sign == signal.SIGTERM:
            continue  # it has ended: only what it left behind is to be killed
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)


@contextmanager
def orderly_termination() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the engine's processes end too.

    Further signals are ignored (`timeout` sends two): they would interrupt the unwinding.
    """

    def unwind(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
