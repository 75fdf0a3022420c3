# SPDX-License-Identifier: Apache-2.0
"""Our platform is offered only where vLLM finds nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_pyramid import platform

pytestmark = pytest.mark.cpu
OURS = "vllm_pyramid.platform.cpu.PyramidCpuPlatform"


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
    assert platform.cpu_platform_plugin() == OURS


@pytest.mark.parametrize("name", ["cuda", "rocm", "tpu", "xpu", "cpu"])
def test_not_offered_where_vllm_finds_a_device_or_brings_cpu_kernels(
    bare: pytest.MonkeyPatch, name: str
) -> None:
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
