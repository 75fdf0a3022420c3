# SPDX-License-Identifier: Apache-2.0
"""The engine as it is shipped: in a process of its own, from stock vLLM; and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support import EnginePool, Job, greedy, is_cpu_build, random_prompts

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture
def compiler_cache(engines: EnginePool, tmp_path: Path) -> Iterator[None]:
    """Compiled engines in the test begin with an empty cache."""
    engines.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        yield
        engines.close()


THINNED: dict[str, Any] = {
    **SETTINGS,
    "kv_policy": "pyramidinfer",
    "kv_policy_args": {"decay_ratio": 0.5, "interval": 1, "min_context": 24, "piece_tokens": 128},
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_cache")
def test_compiled_where_prompts_are_thinned(engines, tiny_model, monkeypatch) -> None:
    """Steps that thin a prompt run without torch.compile, others with it, and the log says so."""
    from vllm_pyramid.compat import thin_forward

    def jobs() -> list[Job]:
        prompts = random_prompts([300, 57, 130], seed=9)
        return [Job(prompt, greedy(16, logprobs=1), 8 * i) for i, prompt in enumerate(prompts)]

    path = tiny_model("llama-mha")
    eager = engines.get(path, **THINNED).run(jobs())

    said: list[str] = []
    monkeypatch.setattr(thin_forward.logger, "info", lambda text, *args: said.append(text % args))
    engine = engines.get(path, enforce_eager=False, **THINNED)
    assert engine.core.vllm_config.compilation_config.mode.name != "NONE"
    assert said == ["kv-policy pyramidinfer: steps that thin a prompt run without torch.compile"]
    inner = engine.core.model_executor.driver_worker.worker.model_runner.get_model().model
    ways: list[str] = []

    def note(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ways.append(way)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(thin_forward, "_forward", note("thinned", thin_forward._forward))
    monkeypatch.setattr(inner, "aot_compiled_fn", note("compiled", inner.aot_compiled_fn))
    steps: list[int] = []
    runs = engine.run(jobs(), lambda engine: steps.append(len(engine.scheduler.running)))
    engine.check_whole()
    # Pieces of 128, 128, 44, 57, 128 and 2 tokens; the other steps decode.
    assert ways.count("thinned") == 6 and ways.count("compiled") == len(steps) - 6 > 16
    for ours, theirs in zip(runs, eager, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.report == theirs.report and ours.report["evicted_tokens"] > 0
        # The prompt was not compiled in either engine; norms and rotary are vLLM's kernels in one
        # and PyTorch's in the other.
        assert ours.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=1e-5)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_small_weights_on_a_processor_with_amx(engines, tiny_model, monkeypatch, name) -> None:
    """vLLM multiplies with small weights (routers, small vocabularies) by other operators there.

    They run without AMX too, so its answer is forced. The CUDA wheel has none of them, and vLLM
    does not ask for them there (`compat.small_gemm`); nor has a build for AVX2 alone.
    """
    from vllm.model_executor.layers import utils

    if name == "mixtral" and not is_cpu_build():
        pytest.skip("the CUDA wheel has no experts for the CPU")
    if is_cpu_build() and not hasattr(torch.ops._C, "convert_weight_packed"):
        pytest.skip("this processor's build of vLLM (AVX2) has no operators for small weights")
    asked: list[tuple[int, int]] = []

    def as_with_amx(n: int, k: int, dtype: Any) -> bool:
        asked.append((n, k))
        return n < 16 or (k % 32 == 0 and n % 16 == 0)

    path = tiny_model(name)
    settings: dict[str, Any] = {"kv_policy": "pyramidkv", "kv_budget": 48, "dtype": "bfloat16"}
    tokens = {}
    for amx in (False, True):
        if amx:
            monkeypatch.setattr(utils, "check_cpu_sgl_kernel", as_with_amx)
        engine = engines.get(path, seed=int(amx), **settings)  # another seed: another engine
        (run,) = engine.generate(random_prompts([300]), greedy(8))
        assert run.report["evicted_tokens"] > 0
        tokens[amx] = run.token_ids
    assert tokens[False] == tokens[True]
    assert asked or not is_cpu_build()
    if name == "mixtral":
        assert (4, 128) in asked  # the router: 4 experts, hidden size 128
