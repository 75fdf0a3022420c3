# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel worker that is killed while it serves takes the server with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.one_device import LENGTHS, check_death, client_of, complete, flags
from tests.e2e.server import members, serving

pytestmark = pytest.mark.engine


def test_killing_a_worker_ends_the_server(random_model: Path, tmp_path: Path) -> None:
    command = (*flags(tmp_path / "trace"), "--tensor-parallel-size", "2")
    with serving(random_model, *command, log=tmp_path / "server.log") as server:
        client = client_of(server)
        report = complete(client, random_model, LENGTHS[0]).kv_transfer_params
        assert report["evicted_tokens"] > 0
        processes = {name: pid for pid, name in members(server.process.pid)}
        assert {"VLLM::Worker_TP0", "VLLM::Worker_TP1"} <= set(processes)
        worker = processes["VLLM::Worker_TP1"]
        log = check_death(server, client, random_model, lambda: os.kill(worker, signal.SIGKILL))
    assert "died unexpectedly" in log, log[-3000:]
