# SPDX-License-Identifier: Apache-2.0
"""A Python that has imported vLLM, and forks for each program that `prepared.py` asks it to run.

    python tests/plumbing/prepared_python.py SOCKET

`SOCKET` is the number of a socket that is open here. A request is JSON: `argv` (what stands behind
`python`: `-m MODULE`, `-c CODE` or a script, and arguments), `environment`, `folder`; with it come
four open files: the program's input, output and errors, and where its exit status is written. The
answer is the program's process id. A program leads a session of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

# What a server imports, its engine core and its worker. Of vllm_pyramid only what these find.
PRELOADED = (
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.llama",
)
MOST_BYTES = 1 << 20


class Forks:
    """The programs that run, and the socket that asks for more."""

    def __init__(self, place: socket.socket) -> None:
        self._place = place
        self._status: dict[int, int] = {}  # where a program's exit status is to be written
        self._ended, wake = os.pipe()
        for end in (self._ended, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake = wake

    def serve(self) -> dict[str, Any] | None:
        """Return the request in the process that is to run it, and None when no more can come."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._place, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._ended in ready:
                    os.read(self._ended, 4096)
                    self._report()
                if self._place in ready:
                    data, files, *_ = socket.recv_fds(self._place, MOST_BYTES, 4)
                    if not data:
                        return None
                    request: dict[str, Any] = json.loads(data)
                    pid = os.fork()
                    if not pid:
                        self._become(files)
                        return request
                    *given, self._status[pid] = files
                    for file in given:
                        os.close(file)
                    self._place.send(str(pid).encode())

    def _report(self) -> None:
        for pid in list(self._status):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                end = self._status.pop(pid)
                os.write(end, str(status).encode())
                os.close(end)

    def _become(self, files: list[int]) -> None:
        """Take the request's files, and nothing of what belongs to the process that forks."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        for end in (*files, self._ended, self._wake, *self._status.values()):
            os.close(end)
        self._place.close()


def run(request: dict[str, Any]) -> None:
    """Run a program in this process as if Python had been started for it."""
    os.chdir(request["folder"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in before
    ]
    random.seed()
    from vllm.logger import _configure_vllm_root_logger

    _configure_vllm_root_logger()
    kind, *arguments = request["argv"]
    if kind == "-m":
        sys.argv = arguments
        sys.path[:1] = [request["folder"], *paths]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path[:1] = ["", *paths]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [kind, *arguments]
        sys.path[:1] = [os.path.dirname(os.path.abspath(kind)), *paths]
        runpy.run_path(kind, run_name="__main__")


def prepare() -> None:
    """Import what programs import, with Triton's interpreter if it is to take a device's place."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from child import interpret_triton

        interpret_triton()
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # it has another name in the other vLLM
            importlib.import_module(name)
    import setproctitle
    from garbage import spare_collections

    setproctitle.getproctitle()  # which looks for it beside the variables, and these move
    spare_collections()


if __name__ == "__main__":
    prepare()
    asked = Forks(socket.socket(fileno=int(sys.argv[1]))).serve()
    if asked is not None:
        run(asked)
