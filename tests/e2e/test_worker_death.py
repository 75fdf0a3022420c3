# SPDX-License-Identifier: Apache-2.0
"""A worker that is killed while it serves takes the server with it, rank or pipeline stage."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.plumbing.one_device import LENGTHS, check_death, client_of, complete, flags
from tests.plumbing.server import members, serving

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("flag", "workers", "killed"),
    [
        ("--tensor-parallel-size", ["VLLM::Worker_TP0", "VLLM::Worker_TP1"], 1),
        # The other stage waits for its hidden states, or sends it some.
        ("--pipeline-parallel-size", ["VLLM::Worker_PP0", "VLLM::Worker_PP1"], 0),
        ("--pipeline-parallel-size", ["VLLM::Worker_PP0", "VLLM::Worker_PP1"], 1),
    ],
)
def test_killing_a_worker_ends_the_server(
    random_model: Path, tmp_path: Path, flag: str, workers: list[str], killed: int
) -> None:
    command = (*flags(tmp_path / "trace"), flag, "2")
    with serving(random_model, *command, log=tmp_path / "server.log") as server:
        client = client_of(server)
        report = complete(client, random_model, LENGTHS[0]).kv_transfer_params
        assert report["evicted_tokens"] > 0
        processes = {name: pid for pid, name in members(server.process.pid)}
        assert set(workers) <= set(processes)
        worker = processes[workers[killed]]
        log = check_death(server, client, random_model, lambda: os.kill(worker, signal.SIGKILL))
    assert "died unexpectedly" in log, log[-3000:]
