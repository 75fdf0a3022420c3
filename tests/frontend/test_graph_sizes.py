# SPDX-License-Identifier: Apache-2.0
"""For how many requests CUDA graphs are captured: more with a policy that evicts."""

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

pytestmark = pytest.mark.cpu

STOCK = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's, for 256 requests and more


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch, random_model: Path) -> Any:
    """Start an engine on a pretended device; return the sizes that it captures."""
    from vllm_pyramid.frontend import engine_config, features, graphs

    of_cuda(monkeypatch, (9, 0))
    monkeypatch.setattr(engine_config, "_install_front_end", lambda: None)
    monkeypatch.setattr(engine_config, "warn_unless_run", lambda device: None)

    def start(
        policy: str = "pyramidkv",
        requests: int = 1024,
        device: str = "cuda",
        tokens: int = 8192,
        drafts: int = 0,
        found: list[int] = STOCK,
        **given: Any,
    ) -> list[int]:
        pretended = SimpleNamespace(device_type=device, get_device_name=lambda: "NVIDIA H100")
        for module in (engine_config, features, graphs):
            monkeypatch.setattr(module, "current_platform", pretended)
        hooks = PolicyConfig(KVSettings(policy))
        hooks.prepare_args(EngineArgs(str(random_model), **given))
        config = resolved_config(
            **model_config(LLAMA),
            num_speculative_tokens=drafts,
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
        if device == "cpu":
            monkeypatch.setattr(engine_config, "take_cpu_backend", lambda config: None)
        hooks.finish_config(config)
        compilation = config.compilation_config
        assert compilation.max_cudagraph_capture_size == max(
            compilation.cudagraph_capture_sizes, default=0
        )
        captured: list[int] = compilation.cudagraph_capture_sizes
        return captured

    return start


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
