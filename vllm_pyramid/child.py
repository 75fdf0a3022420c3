# SPDX-License-Identifier: Apache-2.0
"""Runs an engine in a process of its own, so that its memory is gone before the next one starts.

The child is `python -m MODULE`. It reads one JSON object from standard input and prints messages,
JSON objects on lines that begin with `MARK`; other lines are vLLM's and are ignored.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

MARK = "@vllm-pyramid "
# The end of a failed process's log that is shown; the reason stands in the last lines.
_LOG_TAIL_LINES = 25


class ChildError(RuntimeError):
    """A child process failed; the message is for the user and holds the end of its log."""


def say(**message: Any) -> None:
    """Called in the child: send a message to the parent."""
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def read_task() -> dict[str, Any]:
    """Called in the child: what the parent wants."""
    task: dict[str, Any] = json.load(sys.stdin)
    return task


def run_child(
    module: str, task: Mapping[str, Any], what: str, *, offline: bool
) -> Generator[dict[str, Any], None, None]:
    """Run `module` on `task`; yields its messages as they come.

    Close the iterator (or let it run out) to be sure that every process it started has ended.

    Args:
        what: names the run in error messages. offline: nothing is to be fetched from a hub.

    Raises:
        ChildError: the process failed.
    """
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
        **os.environ,
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # a process group of its own, with the engine's processes
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            # A process that dies before it reads must be reported with its log, not as a broken
            # pipe.
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(json.dumps(task))
            for line in process.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
            status = process.wait()
        finally:
            _end_group(process)
        if status != 0:
            log.seek(0)
            tail = "".join(log.readlines()[-_LOG_TAIL_LINES:])
            raise ChildError(f"{what} failed with exit status {status}; its log ends:\n\n{tail}")


def _end_group(process: subprocess.Popen[str]) -> None:
    """End the child and every process it started, also after an interruption."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is not None and sign == signal.SIGTERM:
            continue  # it has ended: only what it left behind is to be killed
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)


@contextmanager
def orderly_termination() -> Iterator[None]:
    """Let SIGTERM unwind the stack: otherwise it would leave the engine's processes behind."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
