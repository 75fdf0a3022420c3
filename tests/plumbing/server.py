# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`, in processes of its own.

Its imports are those of `prepared.py` and its engine core and workers are forked, unless it is
`fresh`: then every process is a new Python, as a user's would be.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.plumbing.prepared import SPAWN, popen

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
_SAMPLE = re.compile(
    r"^(vllm_pyramid:\w+|vllm:prefix_cache_\w+|vllm:prompt_tokens_total)\{(.*)\} (\S+)$"
)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those that the system gives by itself."""
    while True:
        first = random.randrange(20000, 32768 - count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def members(session: int) -> list[tuple[int, str]]:
    """The processes of a session that are alive, by what they call themselves."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                title = (entry / "cmdline").read_text().replace("\0", " ").strip()
                found.append((int(entry.name), title))
    return found


class Server:
    """A server that was started and is being waited for.

    Attributes:
        url: of its root. process: the front end, leader of a process group of its own.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        log: Path,
        unset: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        command: tuple[str, ...] = (*VLLM, "serve"),
        fresh: bool = False,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        place = ("--host", "127.0.0.1", "--port", str(port))
        own = {"VLLM_LOGGING_LEVEL": "INFO", **({SPAWN: "1"} if fresh else {})}
        with log.open("w") as file:
            self.process = popen(
                [*command, str(model), *place, *flags],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **{name: os.environ[name] for name in os.environ if name not in unset},
                    **own,
                    **(environment or {}),
                },
                start_new_session=True,
            )

    def wait_until_ready(self, seconds: float) -> None:
        """Return when `/health` answers; fail with the end of the log if it never does."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.25)
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def metrics(self) -> dict[str, dict[int, float]]:
        """As `metrics_by_engine`, of a server with one engine."""
        (samples,) = self.metrics_by_engine().values()
        return samples

    def metrics_text(self) -> str:
        """What `/metrics` answers."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def metrics_by_engine(self) -> dict[int, dict[str, dict[int, float]]]:
        """Our samples of `/metrics` and some of vLLM's: engine to name to layer to value.

        The layer is -1 where there is none.
        """
        text = self.metrics_text()
        samples: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for line in text.splitlines():
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                engine = re.search(r'engine="(\d+)"', labels)
                layer = re.search(r'layer="(\d+)"', labels)
                assert engine, line
                of_engine = samples[int(engine.group(1))]
                of_engine[name][int(layer.group(1)) if layer else -1] = float(value)
        return samples

    def group(self) -> list[int]:
        """The processes of the server that are alive."""
        return [pid for pid, _ in members(self.process.pid)]

    def stop(self, how: signal.Signals, seconds: float) -> float:
        """Send the signal to the front end; the seconds until it had ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        start = time.monotonic()
        self.process.send_signal(how)
        self.process.wait(seconds)
        return time.monotonic() - start

    def kill(self) -> None:
        """End whatever is left."""
        for pid in self.group():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(model: Path, *flags: str, seconds: float = 400, **settings: Any) -> Iterator[Server]:
    """A server that answers; whatever is left of it afterwards is killed. As for `Server`."""
    server = Server(model, *flags, **settings)
    try:
        server.wait_until_ready(seconds)
        yield server
    finally:
        server.kill()
