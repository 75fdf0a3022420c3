# SPDX-License-Identifier: Apache-2.0
"""The worker for the CPU when it sizes its cache, with stand-ins for vLLM's worker and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
from types import SimpleNamespace
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_pyramid.worker import cpu_worker

calls = []
class Memory:
    def check_room(self, cache_bytes, free):
        calls.append(("room", cache_bytes, free))
    def reserve(self, available, is_fixed):
        calls.append(("reserve", available, is_fixed))
        return available // 2

cpu_worker.available_host_memory = lambda: 7000
CPUWorker.determine_available_memory = lambda self: 5000
worker = object.__new__(cpu_worker.PyramidCpuWorker)
worker.adapter = SimpleNamespace(pyramid=SimpleNamespace(memory=Memory()))
for size in (None, 5000):
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=size)
    assert worker.determine_available_memory() == 2500
print(calls)
"""


@pytest.mark.long
def test_a_cache_whose_size_the_user_has_set_must_leave_room_for_evictions() -> None:
    calls = [("reserve", 5000, False), ("room", 5000, 7000), ("reserve", 5000, True)]
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().splitlines()[-1] == str(calls)
