# SPDX-License-Identifier: Apache-2.0
"""A process that is killed under load takes the server with it, and every request gets an error."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.plumbing.one_device import LENGTHS, check_death, client_of, complete, flags
from tests.plumbing.server import members, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANKS = ("--tensor-parallel-size", "2")
STAGES = ("--pipeline-parallel-size", "2")
CORE_DIED, WORKER_DIED = "EngineDeadError", "died unexpectedly"


@pytest.mark.parametrize(
    ("parallel", "killed", "reason"),
    [
        ((), "VLLM::EngineCore", CORE_DIED),
        ((), "VLLM::Worker", WORKER_DIED),
        (RANKS, "VLLM::EngineCore", CORE_DIED),
        (RANKS, "VLLM::Worker_TP0", WORKER_DIED),
        (RANKS, "VLLM::Worker_TP1", WORKER_DIED),
        # The other stage waits for its hidden states, or sends it some.
        (STAGES, "VLLM::Worker_PP0", WORKER_DIED),
        (STAGES, "VLLM::Worker_PP1", WORKER_DIED),
    ],
)
def test_killing_a_process_ends_the_server(
    random_model: Path, tmp_path: Path, parallel: tuple[str, ...], killed: str, reason: str
) -> None:
    command = (*flags(tmp_path / "trace"), *parallel)
    with serving(random_model, *command, log=tmp_path / "server.log") as server:
        client = client_of(server)
        report = complete(client, random_model, LENGTHS[0]).kv_transfer_params
        assert report["evicted_tokens"] > 0
        processes = {name: pid for pid, name in members(server.process.pid)}
        assert killed in processes, processes
        pid = processes[killed]
        log = check_death(server, client, random_model, lambda: os.kill(pid, signal.SIGKILL))
    assert reason in log, log[-3000:]
