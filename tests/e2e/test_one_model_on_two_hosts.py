# SPDX-License-Identifier: Apache-2.0
"""One model on two hosts, without Ray, started as docs/parallel.md says, until a host is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import check_answers
from tests.plumbing.hosts import Cable, Host, ServerOnHost, needs_two_hosts, two_hosts
from tests.plumbing.one_device import LENGTHS, Answers, answers_of_one_device, complete, flags, kept

pytestmark = needs_two_hosts()

# A step that a host does not answer is an error after that time.
STEP_SECONDS = 20


@dataclass(frozen=True)
class Served:
    """Two hosts with half of a model each, and the server on the first."""

    other: Host
    cable: Cable
    server: ServerOnHost
    traces: Path


@pytest.fixture(scope="module")
def one_device(random_model: Path, folder: Path) -> Iterator[Answers]:
    """Compiles nothing, and neither do the hosts: their caches are empty, and it takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield answers_of_one_device(random_model, folder / "one")


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def served(request, random_model, folder, one_device, tmp_path_factory) -> Iterator[Served]:
    traces = folder / request.param
    with two_hosts(tmp_path_factory.getbasetemp()) as (one, other, cable):
        both = (
            *flags(traces),
            *(f"--{request.param}-parallel-size", "2"),
            *("--nnodes", "2", "--master-addr", one.address),
        )
        environment = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_SECONDS)}
        server, part = (
            ServerOnHost(
                host,
                random_model,
                *both,
                *place,
                log=folder / f"{request.param}-{name}.log",
                environment=environment,
            )
            for name, host, place in (
                ("one", one, ("--node-rank", "0")),
                ("other", other, ("--node-rank", "1", "--headless")),
            )
        )
        server.wait_until_ready(part)
        yield Served(other, cable, server, traces)


def test_two_hosts_do_what_one_device_does(served, random_model, folder, one_device) -> None:
    assert any("Worker" in name for name in served.other.processes().values())
    check_answers(served.server.client(), random_model, one_device)
    assert kept(served.traces) == kept(folder / "one")


def test_a_host_that_is_lost_ends_the_server(served: Served, random_model: Path) -> None:
    """The last test of these hosts: one loses its cable, the other kind its power."""
    many = {"max_tokens": 1500, "n": 8, "temperature": 1}
    client = served.server.client(6 * STEP_SECONDS)
    stream = complete(client, random_model, LENGTHS[0], stream=True, **many)
    for _ in range(3):
        next(iter(stream))
    start = time.monotonic()
    if served.traces.name == "tensor":
        served.cable.pull()
    else:
        served.other.kill()
    with pytest.raises((openai.APIError, httpx.TransportError)):
        list(stream)
    print(f"the request ended after {time.monotonic() - start:.1f} s")
    served.server.process.wait(6 * STEP_SECONDS)
    print(f"the server ended after {time.monotonic() - start:.1f} s")
    assert time.monotonic() - start < 6 * STEP_SECONDS
    log = served.server.log.read_text()
    assert "timed out" in log or "died" in log or "EngineDeadError" in log, log[-3000:]
