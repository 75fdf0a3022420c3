# SPDX-License-Identifier: Apache-2.0
"""Our platform is offered where vLLM would run on the CPU, or finds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_pyramid.compat import platform

pytestmark = pytest.mark.cpu
CPU_BUILD = "vllm_pyramid.compat.platform.cpu_platform.PyramidCpuPlatform"
CUDA_WHEEL = "vllm_pyramid.compat.platform.wheel.WheelCpuPlatform"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which none of vLLM's detections answers and no other package is installed."""
    import vllm.platforms

    nothing = {name: lambda: None for name in vllm.platforms.builtin_platform_plugins}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", nothing)
    monkeypatch.setattr(
        platform, "entry_points", lambda group: [SimpleNamespace(module=platform.__name__)]
    )
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    return monkeypatch


def test_offered_on_a_bare_machine(bare: pytest.MonkeyPatch) -> None:
    bare.setenv(platform.HUGE_PAGES, "0")  # what a user sets stays
    assert platform.cpu_platform_plugin() == CUDA_WHEEL
    assert os.environ[platform.HUGE_PAGES] == "0"
    for name in (platform.HUGE_PAGES, platform.NO_GPU_KERNELS):
        bare.delenv(name, raising=False)
    assert platform.cpu_platform_plugin() == CUDA_WHEEL
    assert os.environ[platform.HUGE_PAGES] == os.environ[platform.NO_GPU_KERNELS] == "1"


# As an engine in a user's own process comes to its memory: `hg` is the advice to use huge pages.
HUGE = """
from vllm_pyramid import LLM
from vllm.platforms import current_platform
assert current_platform.device_type == "cpu"
import torch
memory = torch.zeros(64 << 20, dtype=torch.int8)
address = memory.data_ptr()
inside = False
for line in open("/proc/self/smaps"):
    name = line.split()[0]
    if "-" in name and ":" not in name:
        begin, end = (int(text, 16) for text in name.split("-"))
        inside = begin <= address < end
    elif inside and name == "VmFlags:":
        print("advised" if "hg" in line.split() else "small pages")
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the system has no huge pages"
)
def test_memory_of_an_engine_in_this_process_is_in_huge_pages() -> None:
    environment = {name: os.environ[name] for name in os.environ if name != platform.HUGE_PAGES}
    made = subprocess.run(
        [sys.executable, "-c", HUGE], env=environment, capture_output=True, text=True, check=False
    )
    assert made.stdout.split("\n")[-2:] == ["advised", ""], made.stderr


def test_offered_beside_a_cpu_build(bare: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    bare.setitem(vllm.platforms.builtin_platform_plugins, "cpu", lambda: "some.CpuPlatform")
    assert platform.cpu_platform_plugin() == CPU_BUILD


@pytest.mark.parametrize("name", ["cuda", "rocm", "tpu", "xpu"])
def test_not_offered_where_vllm_finds_a_device(bare: pytest.MonkeyPatch, name: str) -> None:
    """vLLM's own detection decides: it also sees GPUs that are hidden from this process."""
    import vllm.platforms

    bare.setitem(vllm.platforms.builtin_platform_plugins, name, lambda: "some.Platform")
    assert platform.cpu_platform_plugin() is None


def test_not_offered_beside_another_platform_plugin(bare: pytest.MonkeyPatch) -> None:
    others = [SimpleNamespace(module=platform.__name__), SimpleNamespace(module="vllm_other")]
    bare.setattr(platform, "entry_points", lambda group: others)
    assert platform.cpu_platform_plugin() is None


def test_not_offered_where_the_target_is_said_to_be_cpu(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert platform.cpu_platform_plugin() is None
