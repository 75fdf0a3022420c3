# SPDX-License-Identifier: Apache-2.0
"""Two ranks that Ray starts, behind one server."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import check_answers
from tests.plumbing.one_device import LENGTHS, Answers, check_death, flags, kept
from tests.plumbing.ray_head import RayHead, ray_head
from tests.plumbing.server import Server, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs the extra `ray`: make ray"
    ),
]


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[RayHead]:
    with ray_head(folder / "head.log", workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def server(random_model, folder, one_device, head) -> Iterator[Server]:
    ranks = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")
    with serving(
        random_model,
        *flags(folder / "two"),
        *ranks,
        log=folder / "server.log",
        environment=head.environment,
    ) as running:
        yield running


def test_two_ranks_do_what_one_device_does(client, random_model, folder, head, one_device) -> None:
    assert len(head.workers()) == 2
    check_answers(client, random_model, one_device)
    files = sorted(path.stem.partition("-rank")[2] for path in (folder / "two").glob("*.npz"))
    assert files == ["0"] * len(LENGTHS) + ["1"] * len(LENGTHS)
    assert kept(folder / "two") == kept(folder / "one")


def test_metrics_and_log(server: Server, one_device: Answers) -> None:
    metrics = server.metrics()
    reports = [report for _, report in one_device.values()]
    assert metrics["vllm_pyramid:evictions_total"] == {-1: 4}
    assert sum(metrics["vllm_pyramid:tokens_evicted_total"].values()) == sum(
        report["evicted_tokens"] for report in reports
    )
    log = server.log.read_text()
    assert "each worker of Ray has OMP_NUM_THREADS" in log
    assert "VLLM_CPU_OMP_THREADS_BIND" not in log


def test_killing_a_worker_ends_the_server(server, client, random_model, head) -> None:
    """The last test of this server. The other worker ends, too, and Ray stays."""
    workers = head.workers()
    log = check_death(server, client, random_model, lambda: os.kill(workers[-1], signal.SIGKILL))
    # As the thread that watches the workers says, or, if a step meets it first, Ray's error or
    # that of the other worker, whose connection is gone.
    broken = "Worker failed with error .*Connection (reset|closed)"
    assert re.search(f"died unexpectedly|ActorDiedError|{broken}", log), log[-3000:]
    end = time.monotonic() + 30
    while head.workers() and time.monotonic() < end:
        time.sleep(0.2)
    assert head.workers() == []
    head.wait_until_ready(1)
