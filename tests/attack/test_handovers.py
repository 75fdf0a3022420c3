# SPDX-License-Identifier: Apache-2.0
"""Hundreds of requests through two engines, of which much goes wrong (`handovers.py`)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.attack.handovers import FATES, LEAVES, Router, two_engines
from tests.engine.models import write_model
from tests.engine.support import random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]

CASES: dict[str, tuple[bool, bool, int]] = {
    # policy: over TCP, asynchronous scheduling, longest prompt
    "pyramidkv": (True, False, 2000),
    "auto": (False, True, 8000),
    "snapkv": (True, True, 2000),
    "streaming-llm": (False, False, 2000),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("mistral", tmp_path_factory.mktemp("mistral"))


def _run(policy: str, model: Path, folder: Path, seed: int, requests: int, longest: int) -> Router:
    tcp, asynchronous, _ = CASES[policy]
    source = random.Random(f"{seed}/{policy}")
    lengths = [
        source.choice([source.randrange(20, 300), source.randrange(20, min(longest, 2000))])
        for _ in range(requests)
    ]
    if longest > 2000:
        lengths[:3] = longest, longest - 1000, longest - 1
    most = longest + 112
    own: dict[str, Any] = {
        "kv_policy": policy,
        "max_model_len": most,
        "async_scheduling": asynchronous,
        "enable_prefix_caching": not tcp,
        "kv_admission": "prompt" if tcp else "forecast",
    }
    blocks = 4 * -(-most // 16) * 11 // 10
    with two_engines(model, None if tcp else folder, blocks=blocks, **own) as (prefill, decode):
        router = Router(prefill, decode, f"{seed}/{policy}")
        router.run(random_prompts(lengths, seed=seed))
        router.check_nothing_left()
    print(f"{policy}: {requests} requests, {dict(router.seen)}")
    return router


def test_a_few_requests(model: Path, tmp_path: Path, seed: int) -> None:
    seen = _run("snapkv", model, tmp_path / "states", seed, 16, 400).seen
    assert seen["loaded"], seen


@pytest.mark.slow
@pytest.mark.parametrize("policy", CASES)
def test_many_requests(model: Path, tmp_path: Path, seed: int, policy: str) -> None:
    """Both engines answer as one engine does, and nothing is left on either side."""
    seen = _run(policy, model, tmp_path / "states", seed, 60, CASES[policy][2]).seen
    assert seen["loaded"] > 10, seen
    assert seen["preempted"] or not CASES[policy][0], "the pool never ran out"
    assert sum(bool(seen[fate]) for fate in FATES) >= 3, seen
    assert sum(bool(seen[f"left {phase}"]) for phase in LEAVES) >= 3, seen
