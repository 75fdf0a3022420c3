# SPDX-License-Identifier: Apache-2.0
"""The engine as it is shipped: in a process of its own, from stock vLLM; and compiled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import EnginePool, greedy, random_prompts

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}


def _prompts() -> list[list[int]]:
    return random_prompts([500, 30, 333], seed=9, vocab_size=2048)


@pytest.fixture(scope="module")
def eager_tokens(engines: EnginePool, random_model: Path) -> list[list[int]]:
    engine = engines.get(random_model, kv_policy="pyramidkv", kv_budget=48, **SETTINGS)
    return [run.token_ids for run in engine.generate(_prompts(), greedy(16))]


def test_stock_llm_with_the_engine_in_its_own_process(
    engines: EnginePool,
    random_model: Path,
    eager_tokens: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`vllm.LLM(additional_config=...)`; reports and traces cross the process boundary."""
    from vllm import LLM
    from vllm.exceptions import VLLMValidationError

    engines.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    # The threads of this process must not be forked.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    llm = LLM(
        str(random_model),
        enforce_eager=True,
        seed=0,
        additional_config={
            "kv_policy": "pyramidkv",
            "kv_budget": 48,
            "kv_trace": str(tmp_path),
        },
        **SETTINGS,
    )
    try:
        assert not hasattr(llm.llm_engine.engine_core, "engine_core"), "it runs in this process"
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in _prompts()]
        with pytest.raises(VLLMValidationError, match="too small"):
            llm.generate(prompts[:1], greedy(16, kv_budget=2), use_tqdm=False)
        outputs = llm.generate(prompts, greedy(16), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == eager_tokens
        reports = [output.kv_transfer_params for output in outputs]
        assert [report["evicted_tokens"] > 0 for report in reports] == [True, False, True]
        traces = {}
        for path in tmp_path.glob("*.npz"):
            with np.load(path) as file:
                traces[int(file["prompt_len"])] = file["held"].tolist()
        assert traces == {report["prompt_tokens"]: report["kept_tokens"] for report in reports}
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_compiled(
    engines: EnginePool,
    random_model: Path,
    eager_tokens: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.compile, from an empty cache: the same tokens, and the evictions happen."""
    engines.close()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    begin = time.perf_counter()
    engine = engines.get(
        random_model, kv_policy="pyramidkv", kv_budget=48, enforce_eager=False, **SETTINGS
    )
    print(f"compiled engine started in {time.perf_counter() - begin:.1f} s")
    assert engine.core.vllm_config.compilation_config.mode.name != "NONE"
    runs = engine.generate(_prompts(), greedy(16))
    assert [run.token_ids for run in runs] == eager_tokens
    assert [run.report["evicted_tokens"] > 0 for run in runs] == [True, False, True]
    engine.check_whole()
    engines.close()
