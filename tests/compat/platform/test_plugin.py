# SPDX-License-Identifier: Apache-2.0
"""Our platform is offered where vLLM would run on the CPU, or finds nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from vllm_pyramid.compat import platform

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
    for name in ("VLLM_TARGET_DEVICE", platform.ACTIVE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_offered_on_a_bare_machine(bare: pytest.MonkeyPatch) -> None:
    bare.delenv(platform.NO_GPU_KERNELS, raising=False)
    assert platform.cpu_platform_plugin() == CUDA_WHEEL
    assert os.environ[platform.NO_GPU_KERNELS] == "1"


def test_offered_beside_a_cpu_build_for_engines_with_a_policy(bare: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    bare.setitem(vllm.platforms.builtin_platform_plugins, "cpu", lambda: "some.CpuPlatform")
    before = dict(os.environ)
    assert platform.cpu_platform_plugin() is None
    assert dict(os.environ) == before
    bare.setenv(platform.ACTIVE, "1")
    assert platform.cpu_platform_plugin() == CPU_BUILD


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0"])
def test_not_offered_to_another_version(bare: pytest.MonkeyPatch, version: str) -> None:
    from vllm_pyramid.compat import versions

    bare.setattr(versions, "vllm_version", lambda: version)
    assert platform.cpu_platform_plugin() is None


def test_the_platform_changes_with_a_policy_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object that vLLM's modules keep stays the same."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    from vllm_pyramid.compat.platform import cpu_platform

    stock = CpuPlatform()
    monkeypatch.setattr(vllm.platforms, "_current_platform", stock)
    monkeypatch.setattr(cpu_platform, "_Stock", CpuPlatform)
    monkeypatch.setattr(vllm.platforms, "vllm_version_matches_substr", lambda text: True)
    for _ in range(2):
        cpu_platform.activate()
        assert type(stock) is cpu_platform.PyramidCpuPlatform and stock.ray_device_key == "GPU"
    for _ in range(2):
        cpu_platform.deactivate()
        assert type(stock) is CpuPlatform and not stock.ray_device_key

    # Without kernels for the CPU, and of another package: left alone.
    monkeypatch.setattr(vllm.platforms, "vllm_version_matches_substr", lambda text: False)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    cpu_platform.activate()
    assert type(stock) is CpuPlatform

    class OtherPlatform(CpuPlatform):
        pass

    other = OtherPlatform()
    monkeypatch.setattr(vllm.platforms, "_current_platform", other)
    monkeypatch.delenv("VLLM_TARGET_DEVICE")
    cpu_platform.activate()
    assert type(other) is OtherPlatform


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
