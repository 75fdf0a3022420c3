# SPDX-License-Identifier: Apache-2.0
"""A Ray head of a test's own: as small as it gets, on free ports, ended by its process ids."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.plumbing.server import free_port, members


class RayHead:
    """`ray start --head`, in a session of its own, to which the workers that it starts belong.

    Attributes:
        environment: what a program needs to find it.
    """

    def __init__(self, log: Path, workers: int) -> None:
        # Its sockets lie here, whose paths may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.environment = {"RAY_AUTH_MODE": "disabled"}
        ports = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
        port, *others = (f"--{name}={free_port()}" for name in ports)
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                    *(f"--num-gpus={workers}", "--num-cpus=1", "--object-store-memory=80000000"),
                    *("--include-dashboard=false", "--disable-usage-stats"),
                    *(port, *others, f"--temp-dir={self._folder}", "--node-ip-address=127.0.0.1"),
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self._log = log

    def wait_until_ready(self, seconds: float = 90) -> None:
        """Return when it has said that it runs; fail with its log if it never does."""
        end = time.monotonic() + seconds
        address = self._folder / "ray_current_cluster"
        while time.monotonic() < end and self._process.poll() is None:
            # It says so a moment before it writes its address.
            written = address.read_text().strip() if address.exists() else ""
            if written and "Ray runtime started" in self._log.read_text():
                self.environment["RAY_ADDRESS"] = written
                return
            time.sleep(0.2)
        raise AssertionError(f"Ray did not start:\n{self._log.read_text()[-4000:]}")

    def workers(self) -> list[int]:
        """Processes of vLLM's workers that are alive."""
        return [pid for pid, name in members(self._process.pid) if "RayWorkerProc" in name]

    def end(self) -> None:
        """End it in good order, then whatever is left of it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid, _ in members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def ray_head(log: Path, workers: int) -> Iterator[RayHead]:
    """Start a head that has room for `workers` workers, and end it afterwards."""
    head = RayHead(log, workers)
    try:
        head.wait_until_ready()
        yield head
    finally:
        head.end()
