# SPDX-License-Identifier: Apache-2.0
"""Two hosts serve one model, started as docs/parallel.md says, until one of them is lost.

The hosts are namespaces of the kernel, joined by a cable; everything computes on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.plumbing.hosts import Cable, Host, RayOnHosts, ServerOnHost, reason_without, two_hosts
from tests.plumbing.one_device import (
    LENGTHS,
    Answers,
    answers_of_one_device,
    complete,
    flags,
    kept,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(reason_without() is not None, reason=str(reason_without())),
]
# A step may take this long, and so may a worker wait for another: docs/parallel.md.
SECONDS = 20
BOUNDS = ("--distributed-timeout-seconds", str(SECONDS))
ENVIRONMENT = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(SECONDS)}
# Who starts the workers, how the model is split, what happens under load, what the log says then.
LAUNCHES = {
    "ray-tensor-killed": "died unexpectedly|timed out|Connection closed",
    "ray-pipeline-cut": "died unexpectedly|timed out|Connection closed",
    "nodes-tensor-cut": "timed out|Connection closed",
    "nodes-pipeline-killed": "timed out|Connection closed",
}


@dataclass(frozen=True)
class Served:
    """A model that two hosts serve.

    Attributes:
        parts: servers on the other host.
    """

    name: str
    one: Host
    other: Host
    cable: Cable
    server: ServerOnHost
    parts: tuple[ServerOnHost, ...]
    trace: Path

    def lose(self) -> None:
        """Let happen what the name says."""
        if self.name.endswith("killed"):
            self.other.kill()
        else:
            self.cable.pull()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def one_device(random_model: Path, folder: Path) -> Answers:
    return answers_of_one_device(random_model, folder / "one")


@contextlib.contextmanager
def _serving(name: str, model: Path, folder: Path, shared: Path) -> Iterator[Served]:
    """A model that is served as the name says; ended with its hosts."""
    folder.mkdir()
    common = (*flags(folder / "trace"), *BOUNDS)
    with two_hosts(shared) as (one, other, cable):
        starter, split, _ = name.split("-")
        parts: tuple[ServerOnHost, ...] = ()
        environment = dict(ENVIRONMENT)
        own: tuple[str, ...]
        if starter == "ray":
            environment |= RayOnHosts(one, other, folder).environment
            own = ("--distributed-executor-backend", "ray")
            own = (f"--{split}-parallel-size", "2", *own)
        elif starter == "nodes":
            both = ("--nnodes", "2", "--master-addr", one.address)
            common = (*common, f"--{split}-parallel-size", "2", *both)
            own, others = ("--node-rank", "0"), ("--node-rank", "1", "--headless")
        else:
            both = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
            meet = ("--data-parallel-address", one.address, "--data-parallel-rpc-port", "13345")
            common = (*common, *both, *meet)
            own, others = (
                ("--api-server-count", "1"),
                (
                    "--data-parallel-start-rank",
                    "1",
                    "--headless",
                ),
            )
        log = folder / "server.log"
        server = ServerOnHost(one, model, *common, *own, log=log, environment=environment)
        if starter != "ray":
            log = folder / "other.log"
            part = ServerOnHost(other, model, *common, *others, log=log, environment=environment)
            parts = (part,)
        server.wait_until_ready(*parts)
        yield Served(name, one, other, cable, server, parts, folder / "trace")


@pytest.fixture(scope="module", params=LAUNCHES)
def split(
    request: pytest.FixtureRequest,
    random_model: Path,
    folder: Path,
    one_device: Answers,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    name = request.param
    if name.startswith("ray") and importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra `ray`: make ray")
    with _serving(name, random_model, folder / name, tmp_path_factory.getbasetemp()) as running:
        yield running


def test_two_hosts_do_what_one_does(
    split: Served, random_model: Path, folder: Path, one_device: Answers
) -> None:
    client = split.server.client()
    for host in (split.one, split.other):
        print(sorted(host.processes().values()))
    for length in LENGTHS:
        answer = complete(client, random_model, length)
        assert (answer.choices[0].token_ids, answer.kv_transfer_params) == one_device[length]
    assert kept(split.trace) == kept(folder / "one")


def test_losing_a_host_is_an_error_in_bounded_time(split: Served, random_model: Path) -> None:
    """The last test of these hosts."""
    # Eight answers at once take longer than a busy machine takes to lose a host.
    many = {"max_tokens": 1500, "n": 8, "temperature": 1}
    client = split.server.client(seconds=6 * SECONDS)
    stream = complete(client, random_model, LENGTHS[0], stream=True, **many)
    for _ in range(3):
        next(iter(stream))
    start = time.monotonic()
    split.lose()
    with pytest.raises((openai.APIError, httpx.HTTPError)) as caught:
        list(stream)
    print(f"the request ended {time.monotonic() - start:.1f} s later with {caught.value!r}")
    split.server.process.wait(120)
    print(f"the server ended {time.monotonic() - start:.1f} s later")
    log = split.server.log.read_text()
    print(log[-3000:])
