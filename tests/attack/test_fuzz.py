# SPDX-License-Identifier: Apache-2.0
"""A short run of `make fuzz`: other requests in every run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.attack.bodies import KINDS
from tests.attack.findings import report
from tests.attack.fuzz import FLAGS, attack_server
from tests.plumbing.server import serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS = 600  # of the few that cost something; most are answered in a millisecond


def test_fuzz(random_model: Path, tmp_path: Path, seed: int) -> None:
    log = tmp_path / "server.log"
    with serving(random_model, *FLAGS, log=log) as server:
        run = attack_server(server, str(random_model), seed, range(REQUESTS), seconds=120)
        findings = asyncio.run(run)
        text = report(findings, server.url, seed, tmp_path, log.read_text(errors="replace"))
    print(text)
    assert findings.good(), text
    assert findings.sent == REQUESTS
    assert findings.counts.keys() == KINDS.keys(), "a kind of request was never sent"
