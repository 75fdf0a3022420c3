# SPDX-License-Identifier: Apache-2.0
"""Two replicas on two hosts (namespaces of the kernel) behind one server, until one is lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import check_answers
from tests.plumbing.hosts import Host, ServerOnHost, needs_two_hosts, two_hosts
from tests.plumbing.one_device import LENGTHS, complete, flags, kept

pytestmark = needs_two_hosts()


@dataclass(frozen=True)
class Served:
    """A replica on each host, and the server of both on the first."""

    one: Host
    other: Host
    server: ServerOnHost


_LISTEN = "import socket; one, _ = socket.create_server(('{}', 99)).accept(); one.sendall(b'hello')"
_ASK = "import socket; print(socket.create_connection(('{}', 99), 3).recv(5).decode())"


def test_only_the_cable_joins_the_hosts(tmp_path: Path) -> None:
    """Or the other tests would pass through what the hosts share."""
    with two_hosts(tmp_path) as (one, other, cable):
        heard = []
        for _ in range(2):
            other.start(sys.executable, "-c", _LISTEN.format(other.address), log=tmp_path / "a")
            end = time.monotonic() + 10
            ask, log = _ASK.format(other.address), tmp_path / "b"
            while time.monotonic() < end:
                asking = one.start(sys.executable, "-c", ask, log=log)
                if asking.wait(10) == 0 or heard:
                    break
            heard.append(log.read_text())
            cable.pull()
        assert heard[0] == "hello\n"
        assert "TimeoutError" in heard[1]


@pytest.fixture(scope="module")
def replicas(random_model, folder, one_device, tmp_path_factory) -> Iterator[Served]:
    with two_hosts(tmp_path_factory.getbasetemp()) as (one, other, _):
        both = (
            *flags(folder / "two"),
            *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
            *("--data-parallel-address", one.address, "--data-parallel-rpc-port", "13345"),
        )
        first = ("--api-server-count", "1")
        server = ServerOnHost(one, random_model, *both, *first, log=folder / "server.log")
        second = ("--headless", "--data-parallel-start-rank", "1")
        part = ServerOnHost(other, random_model, *both, *second, log=folder / "other.log")
        server.wait_until_ready(part)
        yield Served(one, other, server)


def _of(replica: int) -> dict[str, str]:
    return {"X-data-parallel-rank": str(replica)}


def test_each_host_does_what_one_device_does(replicas, random_model, folder, one_device) -> None:
    assert "VLLM::EngineCore_DP0" in replicas.one.processes().values()
    assert "VLLM::EngineCore_DP1" in replicas.other.processes().values()
    client = replicas.server.client()
    for replica in (0, 1):
        check_answers(client, random_model, one_device, extra_headers=_of(replica))
    expected = kept(folder / "one")
    assert kept(folder / "two") == {length: heads * 2 for length, heads in expected.items()}


def test_the_other_replica_goes_on(replicas, random_model, one_device) -> None:
    """The last test here: vLLM does not see the loss, so its requests end when clients give up."""
    many = {"max_tokens": 1500, "n": 8, "temperature": 1}
    lost, client = replicas.server.client(10), replicas.server.client()
    stream = complete(lost, random_model, LENGTHS[0], stream=True, extra_headers=_of(1), **many)
    for _ in range(3):
        next(iter(stream))
    replicas.other.kill()
    start = time.monotonic()
    with pytest.raises((openai.APITimeoutError, httpx.TimeoutException)):
        list(stream)
    print(f"the client gave up after {time.monotonic() - start:.1f} s")
    assert replicas.server.process.poll() is None
    check_answers(client, random_model, one_device, extra_headers=_of(0))
