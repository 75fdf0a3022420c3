# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: namespaces of the kernel, joined by a cable that can be pulled.

Each host has its own network, processes, shared memory, name and /tmp, so nothing reaches another
host but through the cable. The file system is shared, as a network drive would be: both read the
model there. A test talks to a server through a Unix socket on it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import openai
import pytest

from tests.plumbing.server import VLLM

ROOT = Path(__file__).parents[2]
INTERFACE = "eth0"
_NAMESPACES = ("--net", "--mount", "--pid", "--ipc", "--uts")
_USER = () if os.geteuid() == 0 else ("--user",)
# Makes the host's own /tmp, in which the folders that lie below the old one and are named stay;
# then becomes its first process, which ends with the test that holds its standard input.
_BOOT = """
set -e
trap '' CHLD
hostname "$1"; shift
new=$(mktemp -d)
mount -t tmpfs tmpfs "$new"
for kept; do
    mkdir -p "$new/${kept#/tmp/}"
    mount --rbind "$kept" "$new/${kept#/tmp/}"
done
mount --move "$new" /tmp
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec cat > /dev/null
"""


class Host:
    """A host that runs until it is killed.

    Attributes:
        address: of its end of the cable.
    """

    def __init__(self, name: str, address: str, shared: Path, beside: Host | None = None) -> None:
        self.address = address
        within = [*_enter(beside.first, *_USER)] if beside and _USER else []
        user = ["--user", "--map-root-user"] if _USER and not beside else []
        folders = {shared, ROOT, Path(sys.prefix), Path(sys.base_prefix)}
        kept = [str(folder) for folder in folders if Path("/tmp") in folder.parents]
        fork = ["--fork", "--kill-child", "--mount-proc"]
        self._process = subprocess.Popen(
            [
                *(*within, "unshare", *user, *_NAMESPACES, *fork),
                *("sh", "-c", _BOOT, "sh", name, *kept),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        if self._process.stdout.readline() != "ready\n":
            raise OSError(f"namespaces cannot be made: {self._process.communicate()[1].strip()}")
        pid = self._process.pid
        self.first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        # Its network stays while this is open, or the other end of the cable would vanish with it.
        self._network = os.open(f"/proc/{self.first}/ns/net", os.O_RDONLY)

    def start(
        self, *command: str, log: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program on the host; the process is `nsenter`, which ends with it."""
        with log.open("w") as file:
            return subprocess.Popen(
                [*_enter(self.first, *_USER, *_NAMESPACES), *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "VLLM_LOGGING_LEVEL": "INFO",
                    "VLLM_HOST_IP": self.address,
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    **(environment or {}),
                },
                cwd=ROOT,
            )

    def processes(self) -> dict[int, str]:
        """Programs that run on the host, by process id: what they call themselves."""
        own, found = os.readlink(f"/proc/{self.first}/ns/pid"), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(self.first):
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns" / "pid") == own:
                        title = (entry / "cmdline").read_text().replace("\0", " ").strip()
                        found[int(entry.name)] = title
        return {pid: title for pid, title in found.items() if title}

    def clear(self) -> None:
        """Kill all programs; the host runs on."""
        for _ in range(100):
            if not (left := self.processes()):
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        raise AssertionError(f"processes that cannot be killed: {left}")

    def ip(self, *arguments: str) -> None:
        """Run `ip` on the host's network."""
        command = [*_enter(self.first, *_USER, "--net"), "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def kill(self) -> None:
        """Stop the host: the kernel ends all its programs at once and closes their connections.

        A power cut closes none; a host that lost its power looks like one whose cable is cut.
        """
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        """Kill it, and let its network go."""
        self.kill()
        os.close(self._network)


def _enter(first: int, *namespaces: str) -> list[str]:
    keep = ["--preserve-credentials"] if "--user" in namespaces else []
    return ["nsenter", f"--target={first}", *keep, *namespaces]


class Cable:
    """Joins two hosts."""

    def __init__(self, one: Host, other: Host) -> None:
        self._one, self._other = one, other
        peer = ("peer", "name", INTERFACE, "netns", str(other.first))
        one.ip("link", "add", "name", INTERFACE, "type", "veth", *peer)
        for host in (one, other):
            host.ip("address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.ip("link", "set", INTERFACE, "up")

    def pull(self) -> None:
        """Cut it: the first host has no carrier, and what it sends is lost."""
        self._other.ip("link", "set", INTERFACE, "down")


@contextlib.contextmanager
def two_hosts(shared: Path) -> Iterator[tuple[Host, Host, Cable]]:
    """Two hosts that reach each other; killed afterwards.

    Args:
        shared: a folder that both have under this path.

    Raises:
        OSError: namespaces cannot be made here.
    """
    with contextlib.ExitStack() as stack:
        one = Host("one", "10.77.0.1", shared)
        stack.callback(one.end)
        other = Host("other", "10.77.0.2", shared, beside=one)
        stack.callback(other.end)
        try:
            cable = Cable(one, other)
        except subprocess.CalledProcessError as error:
            raise OSError(f"a cable cannot be made: {error.stderr.strip()}") from error
        yield one, other, cable


@cache
def reason_without() -> str | None:
    """Why two hosts cannot be made here; None: they can."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"needs the program `{program}`"
    try:
        with two_hosts(ROOT):
            return None
    except OSError as error:
        return f"needs namespaces of the kernel, as root or a user who may make them: {error}"


def needs_two_hosts() -> list[pytest.MarkDecorator]:
    """Return the marks of a test file with engines on two hosts; skipped where none can be made."""
    reason = reason_without()
    return [
        pytest.mark.engine,
        pytest.mark.slow,
        pytest.mark.skipif(reason is not None, reason=str(reason)),
    ]


class ServerOnHost:
    """`vllm serve` on a host, or one of its parts that answers no client (`--headless`).

    Attributes:
        process: ends with the server. log: what it wrote.
    """

    def __init__(
        self,
        host: Host,
        model: Path,
        *flags: str,
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        # Its path may have 107 characters.
        self._socket = log.parent / f"{log.stem}.sock"
        self._socket.unlink(missing_ok=True)
        place = () if "--headless" in flags else ("--uds", str(self._socket))
        self.process = host.start(
            *VLLM, "serve", str(model), *place, *flags, log=log, environment=environment
        )

    def http(self, seconds: float = 60) -> httpx.Client:
        """A client of the server's HTTP."""
        transport = httpx.HTTPTransport(uds=str(self._socket))
        return httpx.Client(transport=transport, base_url="http://server", timeout=seconds)

    def client(self, seconds: float = 60) -> openai.OpenAI:
        """A client of its completions."""
        return openai.OpenAI(
            base_url="http://server/v1",
            api_key="none",
            max_retries=0,
            http_client=self.http(seconds),
        )

    def wait_until_ready(self, *parts: ServerOnHost, seconds: float = 400) -> None:
        """Return when `/health` answers; fail with the logs of all parts if it never does."""
        end = time.monotonic() + seconds
        with self.http(5) as http:
            while time.monotonic() < end and self.process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    http.get("/health").raise_for_status()
                    return
                time.sleep(0.25)
        logs = "\n\n".join(
            "\n".join(re.findall(r".*ERROR.*|.*Error: .*", part.log.read_text())[:80])
            + part.log.read_text()[-2000:]
            for part in (self, *parts)
        )
        raise AssertionError(f"the server did not come up:\n{logs}")
