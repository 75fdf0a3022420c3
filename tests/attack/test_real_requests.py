# SPDX-License-Identifier: Apache-2.0
"""A short soak of engines; `make soak` sends thousands of requests to each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.real_requests import PHASES, SETTINGS, Clients, model_of, settings_of
from tests.engine.support import EnginePool

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "150"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))


@pytest.fixture(scope="module")
def engines() -> Iterator[EnginePool]:
    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_left(engines: EnginePool, model: Path, name: str, seed: int) -> None:
    engine = engines.get(model, **settings_of(name))
    engine.shuffle_blocks(seed)
    clients = Clients(engine, f"{seed}/{name}")
    clients.run(REQUESTS, SECONDS)
    clients.check_nothing_left()
    print(f"{name}: {clients.sent} requests, {clients.steps} steps, {dict(clients.seen)}")
    happenings = ["preempted", "evicted", *(["turns"] if clients.has_turns else [])]
    happenings += ["spans"] if clients.has_spans else []
    happenings += ["resumed"] if clients.has_turns and REQUESTS >= 1000 else []
    assert not clients.seen["ended by error"], clients.seen
    assert all(clients.seen[happening] for happening in happenings), clients.seen
    # Some phases are short: a client that wants to leave in one may miss it.
    left = [phase for phase in PHASES if clients.seen[f"aborted {phase}"]]
    assert len(left) >= 3, clients.seen
