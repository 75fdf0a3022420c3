# SPDX-License-Identifier: Apache-2.0
"""Python programs that start without importing vLLM again: forked from one that has.

There is one such process for each environment on which imports depend, started for the first
program that needs it.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).with_name("prepared_python.py")
# Seconds that `prepared_python.py` takes at most to import everything on a busy machine.
PATIENCE = 180.0
# Variables that imports read.
OF_IMPORTS = (
    *("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE", "TRITON_INTERPRET"),
    "VLLM_USE_BREAKABLE_CUDAGRAPH",
)
# Set to 1 in what starts as a user would start it, and in processes of its engines.
SPAWN = "PYRAMID_TEST_SPAWN"
_Popen = subprocess.Popen


class PreparedPopen(subprocess.Popen[Any]):
    """A program of this Python, whose process is forked. It always leads a session of its own."""

    _status: int

    def _execute_child(self, args: Any, *others: Any) -> None:
        """Start it, in the place of `fork` and `exec`."""
        cwd, env, (source, _, _, output, _, errors) = others[4], others[5], others[9:15]
        given = enumerate((source, output, errors))
        files = [number if file == -1 else file for number, file in given]
        self._status, status = os.pipe()
        environment = dict(os.environ if env is None else env)
        place = _prepared(tuple(environment.get(name) for name in OF_IMPORTS))
        request = {
            "argv": [os.fspath(arg) for arg in args[1:]],
            "environment": environment,
            "folder": os.fspath(cwd or Path.cwd()),
        }
        socket.send_fds(place, [json.dumps(request).encode()], [*files, status])
        os.close(status)
        answer = place.recv(64)
        assert answer, "the process that forks has ended"
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(*others[9:15])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return its process id and status; zero for an id while it runs."""
        os.set_blocking(self._status, not wait_flags & os.WNOHANG)
        try:
            status = os.read(self._status, 64)
        except BlockingIOError:
            return 0, 0
        assert status, "the process that forks has ended"
        os.close(self._status)
        return self.pid, int(status)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def popen(args: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
    """Start a program; its process is forked if it is one of this Python and may be."""
    env: Mapping[str, str] = settings.get("env") or os.environ
    is_python = not isinstance(args, str) and args[0] == sys.executable
    is_program = is_python and (args[1] in ("-m", "-c") or not args[1].startswith("-"))
    # A fork computes in one thread.
    may_fork = env.get("OMP_NUM_THREADS") == "1" and "PYTHONOPTIMIZE" not in env
    if is_program and may_fork and env.get(SPAWN) != "1":
        return PreparedPopen(args, **settings)
    return _Popen(args, **settings)


class EitherPopen(subprocess.Popen[Any]):
    """`popen` as a class: packages that are imported meanwhile, such as Ray, inherit from Popen."""

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        return popen(*args, **settings) if cls is EitherPopen else super().__new__(cls)


@cache
def environment() -> dict[str, str]:
    """Return this process's variables as they were at the first call."""
    return dict(os.environ)


@cache
def _prepared(of_imports: tuple[str | None, ...]) -> socket.socket:
    """Start a process that forks, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE)
    own = dict(zip(OF_IMPORTS, of_imports, strict=True))
    variables = {**environment(), **own}
    process = _Popen(
        [sys.executable, str(PYTHON), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={name: value for name, value in variables.items() if value is not None},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # it does not end by what a terminal sends
    )
    theirs.close()
    atexit.register(_end, ours, process)
    return ours


def _end(place: socket.socket, process: subprocess.Popen[bytes]) -> None:
    place.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
