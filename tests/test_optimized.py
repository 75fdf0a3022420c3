# SPDX-License-Identifier: Apache-2.0
"""Guards of results and of memory hold under `python -O`, which leaves `assert` out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import numpy as np
import torch

from vllm_pyramid.methods.solved.worker import best_lengths
from vllm_pyramid.methods.host_values.worker import HostPool
from vllm_pyramid.plan import PlanMismatchError
from vllm_pyramid.policy import load_policy
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

assert False, "asserts are on"  # left out, or this process ends here


def expect(name, error, message, function):
    try:
        function()
    except error as found:
        if message not in str(found):
            raise SystemExit(f"{name}: {found}")
    else:
        raise SystemExit(f"{name}: nothing was raised")
    print(name)


def step(policy, prompt, computed, scheduled):
    tracker = EvictionTracker(policy, 3, 4, 1)
    tracker.add("r", prompt, None)
    columns = (np.array([value], np.int32) for value in (prompt, computed, scheduled))
    return tracker, tracker.begin_step(["r"], *columns)


snapkv = load_policy("snapkv", 16, {"window": 6})
expect("short last chunk", PlanMismatchError, "fewer than the window",
       lambda: step(snapkv, 40, 38, 2))
expect("chunk across the eviction", PlanMismatchError, "crosses the eviction at 40",
       lambda: step(snapkv, 40, 20, 24))
expect("lengths that were not solved", RuntimeError, "were not decided",
       lambda: step(load_policy("xkv", 16, {"window": 6}), 40, 0, 40)[1].report())
expect("skips of an open plan", PlanMismatchError, "were not decided",
       lambda: step(load_policy("xkv", 16, {"window": 6}), 40, 40, 1))
expect("a host pool of another size", RuntimeError, "V would lie elsewhere",
       lambda: HostPool(6, 1024).values(torch.zeros(7, 2, 32, 8, dtype=torch.bfloat16)))
expect("too many tokens to choose", RuntimeError, "are to be chosen",
       lambda: best_lengths(torch.rand(3, 8), 25, sinks=0))
"""
GUARDS = re.findall(r'^expect\("(.+?)"', CHILD, re.MULTILINE)


@pytest.mark.long
def test_guards_hold_without_asserts() -> None:
    child = subprocess.run(
        [sys.executable, "-O", "-c", CHILD],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
    assert child.stdout.splitlines()[-len(GUARDS) :] == GUARDS
