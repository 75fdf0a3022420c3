# SPDX-License-Identifier: Apache-2.0
"""An engine that starts on a GPU: the sizes of its CUDA graphs, and what it warns of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs

from tests.frontend.test_engine_config import LLAMA, model_config, of_cuda, resolved_config
from vllm_pyramid.frontend.entry import PolicyConfig
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.version import __version__

STOCK = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's, for 256 requests and more


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, random_model: Path) -> Any:
    """Start an engine on a pretended device; return its finished configuration."""
    from vllm_pyramid.frontend import engine_config, features, graphs

    of_cuda(monkeypatch, (9, 0))
    monkeypatch.setattr(engine_config, "_install_front_end", lambda: None)
    monkeypatch.setattr(engine_config, "take_cpu_backend", lambda config: None)

    def start(
        policy: str = "pyramidkv",
        requests: int = 1024,
        device: str = "cuda",
        tokens: int = 8192,
        drafts: int = 0,
        found: list[int] = STOCK,
        **given: Any,
    ) -> Any:
        pretended = SimpleNamespace(device_type=device, get_device_name=lambda: "NVIDIA H100")
        for module in (engine_config, features, graphs):
            monkeypatch.setattr(module, "current_platform", pretended)
        settings = KVSettings(policy)
        hooks = PolicyConfig(settings)
        hooks.prepare_args(EngineArgs(str(random_model), **given))
        config = resolved_config(
            **model_config(LLAMA),
            num_speculative_tokens=drafts,
            additional_config=settings.to_additional_config(),
            **{
                "compilation_config.cudagraph_mode": None,
                "compilation_config.cudagraph_capture_sizes": [*found],
                "compilation_config.max_cudagraph_capture_size": max(found, default=0),
                "scheduler_config.async_scheduling": True,
                "scheduler_config.max_num_seqs": requests,
                "scheduler_config.max_num_batched_tokens": tokens,
                "scheduler_config.max_num_scheduled_tokens": None,
                "scheduler_config.long_prefill_token_threshold": 0,
            },
        )
        hooks.finish_config(config)
        return config

    return start


@pytest.fixture
def sizes(start: Any) -> Any:
    """Start an engine; return the sizes that it captures."""

    def captured(**how: Any) -> list[int]:
        compilation = start(**how).compilation_config
        found: list[int] = compilation.cudagraph_capture_sizes
        assert compilation.max_cudagraph_capture_size == max(found, default=0)
        return found

    return captured


@pytest.mark.parametrize(
    ("requests", "more"),
    [
        (1024, [*range(528, 1025, 16)]),
        (4096, [*range(528, 1025, 16)]),
        (600, [*range(528, 600, 16), 600]),
        (520, [520]),
        (512, []),
        (256, []),
    ],
)
def test_as_many_requests_as_may_run_up_to_1024(sizes: Any, requests: int, more: list[int]) -> None:
    assert sizes(requests=requests) == [*STOCK, *more]


@pytest.mark.parametrize(
    "given",
    [
        {"policy": "full"},  # evicts nothing
        {"device": "cpu"},
        {"drafts": 3},
        {"found": []},  # eager
        {"cudagraph_capture_sizes": STOCK},
        {"max_cudagraph_capture_size": 512},
        {"compilation_config": CompilationConfig(cudagraph_capture_sizes=STOCK)},
        {"compilation_config": CompilationConfig(max_cudagraph_capture_size=512)},
    ],
)
def test_where_vllms_or_the_users_sizes_stay(sizes: Any, given: dict[str, Any]) -> None:
    assert sizes(**given) == given.get("found", STOCK)


def test_no_step_has_more_tokens_than_vllm_schedules(sizes: Any) -> None:
    assert sizes(tokens=544)[-2:] == [528, 544]


def test_one_warning_where_no_run_of_the_pair_is_on_record(monkeypatch, start) -> None:
    """It names the versions of both, and the command."""
    from vllm_pyramid.frontend import gpu_runs

    warned: list[str] = []
    logger = gpu_runs.logger
    monkeypatch.setattr(logger, "warning_once", lambda line, *values: warned.append(line % values))
    monkeypatch.setattr(gpu_runs, "vllm_version", lambda: "0.32.0+cu129")
    for runs, count in (
        ([], 1),
        ([(__version__, "0.32.0")], 0),
        ([(__version__, "0.33.0"), ("0.0.9", "0.32.0")], 1),
    ):
        known = tuple(gpu_runs.GpuRun(*pair, "NVIDIA A100") for pair in runs)
        monkeypatch.setattr(gpu_runs, "RUNS", known)
        warned.clear()
        assert start().parallel_config.worker_cls.endswith("PyramidGpuWorker")  # it starts
        assert len(warned) == count
    assert f"vllm-pyramid {__version__} with vLLM 0.32.0 has not passed" in warned[0]
    assert "scripts/gpu_check.sh --json result.json" in warned[0] and "NVIDIA H100" in warned[0]
