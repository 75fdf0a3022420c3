# SPDX-License-Identifier: Apache-2.0
"""One warning where an engine with a policy starts on a GPU for which no run is on record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.frontend.test_engine_config import LLAMA, model_config, of_cuda, resolved_config
from vllm_pyramid.version import __version__

pytestmark = pytest.mark.cpu


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Finish the configuration of an engine on a pretended device; return what is warned of."""
    from vllm_pyramid.frontend import engine_config, features, gpu_runs
    from vllm_pyramid.frontend.settings import KVSettings

    of_cuda(monkeypatch, (9, 0))
    device = SimpleNamespace(device_type="cuda", get_device_name=lambda: "NVIDIA H100")
    for module in (engine_config, features):
        monkeypatch.setattr(module, "current_platform", device)
    monkeypatch.setattr(engine_config, "_install_front_end", lambda: None)
    monkeypatch.setattr(gpu_runs, "vllm_version", lambda: "0.32.0+cu129")
    warned: list[str] = []
    monkeypatch.setattr(
        gpu_runs.logger, "warning_once", lambda line, *values: warned.append(line % values)
    )

    def finish(*runs: tuple[str, str]) -> list[str]:
        found = tuple(gpu_runs.GpuRun(*pair, "NVIDIA A100") for pair in runs)
        monkeypatch.setattr(gpu_runs, "RUNS", found)
        warned.clear()
        settings = KVSettings("pyramidkv")
        config = resolved_config(
            **model_config(LLAMA),
            num_speculative_tokens=0,
            additional_config=settings.to_additional_config(),
            **{
                "compilation_config.cudagraph_mode": None,
                "scheduler_config.async_scheduling": True,
                "scheduler_config.max_num_batched_tokens": 2048,
                "scheduler_config.max_num_scheduled_tokens": None,
                "scheduler_config.long_prefill_token_threshold": 0,
            },
        )
        engine_config.finish_config(config, settings, {})
        assert config.parallel_config.worker_cls.endswith("PyramidGpuWorker")  # it starts
        return list(warned)

    return finish


def test_one_warning_names_the_pair_and_the_command(start: Any) -> None:
    (line,) = start()
    assert f"vllm-pyramid {__version__} with vLLM 0.32.0 has not passed" in line
    assert "scripts/gpu_check.sh --json result.json" in line and "NVIDIA H100" in line


def test_no_warning_once_the_pair_was_run(start: Any) -> None:
    assert start((__version__, "0.32.0")) == []


@pytest.mark.parametrize("other", [(__version__, "0.33.0"), ("0.0.9", "0.32.0")])
def test_a_run_of_another_pair_does_not_count(start: Any, other: tuple[str, str]) -> None:
    assert len(start(other)) == 1
