# SPDX-License-Identifier: Apache-2.0
"""Hand-overs between engines of two ranks, and under vLLM's second model runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import models
from tests.engine.support import random_prompts
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# As in `test_runner_v2.py`: the interpreter takes its time.
SHAPE = (
    "Llama",
    {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 4 << 20,
    "block_size": 16,
    "additional_config": {"kv_policy": "pyramidkv", "kv_budget": 24, "kv_min_tokens": 0},
}
LENGTHS, ANSWER = (70, 100, 64), 12


def _waves() -> list[list[Any]]:
    """Answers of one engine, then hand-overs to itself beside a request of its own."""
    prompts = random_prompts(LENGTHS)
    count = len(prompts)
    return [
        [[prompt, greedy(ANSWER)] for prompt in prompts],
        [],
        [[prompt, greedy(1, kv_transfer_params={"do_remote_decode": True})] for prompt in prompts],
        [],
        [[prompts[0], greedy(ANSWER)]],
        [[prompt, greedy(ANSWER, ticket_of=count + at)] for at, prompt in enumerate(prompts)],
    ]


def _check(outputs: list[dict[str, Any]]) -> None:
    count = len(LENGTHS)
    alone, handed = outputs[:count], outputs[-count:]
    for one, other, length in zip(handed, alone, LENGTHS, strict=True):
        assert one["report"].pop("handed") == {"tokens": length}
        assert one["token_ids"] == other["token_ids"]
        assert one["report"] == other["report"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(models.SHAPES, "transfer", SHAPE)
    return models.write_model("transfer", tmp_path / "model")


def _hand_over(
    folder: Path, model: Path, triton: str | None = None, *, own: dict[str, Any], **env: str
) -> dict[str, Any]:
    """Run the waves in a process of its own, and check what they answer."""
    connector = {
        "kv_connector": "PyramidConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder / "states")},
    }
    llm = {"model": str(model), **SETTINGS, "kv_transfer_config": connector, **own}
    child = Child(
        folder / "child",
        (llm, _waves()),
        triton=triton,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        **env,
    )
    try:
        (result,) = child.results()
    finally:
        child.kill()
    _check(result["outputs"])
    result["left"] = sorted(path.name for path in (folder / "states").iterdir())
    return result


def test_two_ranks(tmp_path: Path, model: Path) -> None:
    """Each rank sends and fetches its own heads' part of every block."""
    own = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    result = _hand_over(tmp_path, model, own=own, VLLM_CPU_OMP_THREADS_BIND="nobind")
    assert len(result["ranks"]) == 2
    assert not result["left"], "both parts are fetched once"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_second_runner(tmp_path: Path, model: Path, asynchronous: bool) -> None:
    """It takes the first token as a part of what is prefilled, without an addition of ours."""
    result = _hand_over(
        tmp_path,
        model,
        "attention",
        own={"async_scheduling": asynchronous, "enable_prefix_caching": asynchronous},
        TRITON_INTERPRET="1",
        VLLM_USE_BREAKABLE_CUDAGRAPH="0",
        VLLM_USE_V2_MODEL_RUNNER="1",
    )
    assert "vllm_pyramid.worker.adapter_v2.AdapterV2" in result["runner"]
    assert not result["left"]
