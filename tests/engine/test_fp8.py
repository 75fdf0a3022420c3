# SPDX-License-Identifier: Apache-2.0
"""Eviction beside a KV cache of 8-bit floats.

The oracle is Transformers with keys and values that are rounded as the cache rounds them: divided
by a layer's scale, to 8 bits, and multiplied again. A number that lies in the middle of two of 8
bits is rounded to either by float noise, and layers above see the difference. So the oracle rounds
what the engine was about to write, once that has been seen to be its own, up to float noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conversations import Rows
from tests.engine.families import make_family
from tests.engine.matrix import CASES
from tests.engine.oracles import EvictedModel, check_evictions, held_at_evictions
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Models,
    Outcome,
    Start,
    count_preemptions,
    greedy,
    random_prompts,
)
from tests.engine.test_right_tokens import check
from vllm_pyramid.compat.cache_specs import scales_of

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Written:
    """The kernels of a layer; keeps the rows that are written, K and V side by side."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.rows: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def reshape_and_cache(self, key: Any, value: Any, *args: Any, **scales: float) -> None:
        self.rows.append(torch.cat([key.flatten(1), value.flatten(1)], dim=1))
        self._ops.reshape_and_cache(key, value, *args, **scales)


class QuantisedModel(EvictedModel):
    """Transformers' model with K and V as they come out of the engine's cache."""

    def __init__(self, path: Path, engine: Engine, fp8: torch.dtype) -> None:
        super().__init__(str(path))
        self.fp8 = fp8
        self.written = []
        for layer in engine.attention_layers():
            layer.impl.ops = Written(getattr(layer.impl.ops, "_ops", layer.impl.ops))
            self.written.append(layer.impl.ops)

    def forget(self) -> None:
        """What was written before does not matter: the same tokens come again."""
        for written in self.written:
            written.rows.clear()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ours = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (key, value)], dim=1)
        written = torch.cat(self.written[layer].rows)
        nearest = written[torch.cdist(ours, written).argmin(dim=1)]
        # The last token of all is never written.
        torch.testing.assert_close(nearest[:-1], ours[:-1], rtol=1e-3, atol=1e-3)
        ours[:-1] = nearest[:-1]
        most = torch.finfo(self.fp8).max
        rounded = (
            (x / of_layer).clamp(-most, most).to(self.fp8).float() * of_layer
            for x, of_layer in zip(ours.chunk(2, dim=1), scales_of_layer(layer), strict=True)
        )
        heads = (x.unflatten(1, key.shape[1::2]).transpose(0, 1)[None] for x in rounded)
        return super().attend(layer, query, *heads, scale)


def scales_of_layer(layer: int) -> tuple[float, float]:
    """Of K and V: none is 1, no two are alike, and the largest keys are too large for e4m3."""
    return 0.011 + 0.001 * layer, 0.007 + 0.002 * layer


def give_scales(
    engine: Engine, scales: Callable[[int], tuple[float, float]] = scales_of_layer
) -> Engine:
    """Where vLLM puts a checkpoint's scales. It reads none for models in float32."""
    for index, layer in enumerate(engine.attention_layers()):
        layer._k_scale_float, layer._v_scale_float = scales(index)
    return engine


def settings(dtype: str, **changes: Any) -> dict[str, Any]:
    return {
        "kv_cache_dtype": dtype,
        "dtype": "float32",
        "max_num_batched_tokens": 100,
        "max_model_len": 1024,
        **changes,
    }


@pytest.mark.parametrize("dtype", list(FP8))
@pytest.mark.parametrize("policy", ["pyramidkv", "snapkv", "xkv", "streaming-llm"])
def test_kept_tokens_and_decoding(demo, random_model, tmp_path, dtype, policy) -> None:
    """In chunks of 100 tokens: what is kept, and what decoding makes of it."""
    engine = demo(
        **settings(dtype, kv_policy=policy, kv_budget=40, kv_policy_args={"fill_blocks": False}),
        kv_trace=str(tmp_path),
        enable_prefix_caching=False,  # every run writes all that it attends to
    )
    model = QuantisedModel(random_model, give_scales(engine), FP8[dtype])
    check(*(engine, tmp_path, model, policy, 2048), fill_blocks=False, before_run=model.forget)


@pytest.mark.parametrize("name", ["snapkv-expected", "keyformer"])
def test_scorers_in_pytorch_see_what_attention_does(demo, random_model, tmp_path, name) -> None:
    case = CASES[name]
    engine = demo(
        **settings("fp8", kv_policy=name, kv_budget=case.budget, kv_policy_args=case.args),
        kv_trace=str(tmp_path),
    )
    model, evicted = QuantisedModel(random_model, give_scales(engine), FP8["fp8_e4m3"]), 0
    prompts = random_prompts([130, 57, 401, 256], seed=3, vocab_size=2048)
    for outcome in engine.generate(prompts, greedy(20)):
        held = held_at_evictions(tmp_path, outcome, engine.kv_heads)
        model.decode([*outcome.job.prompt, *outcome.token_ids], held)
        policy = engine.scheduler.pyramid.policy
        evicted += check_evictions(policy, engine, model, outcome, held)
    assert evicted > 500, "hardly anything was evicted"


def powers_of_two(layer: int) -> tuple[float, float]:
    """Scales by which nothing is rounded."""
    return 2.0 ** (-6 - layer % 2), 2.0 ** (-5 - layer % 3)


class Rounded(Written):
    """The kernels over a cache of float32 into which only numbers of 8 bits are written."""

    def __init__(self, ops: Any, layer: int) -> None:
        super().__init__(ops)
        self._scales = powers_of_two(layer)

    def reshape_and_cache(self, key: Any, value: Any, *args: Any, **scales: float) -> None:
        assert set(scales.values()) == {1.0}
        key, value = (
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((key, value), self._scales, strict=True)
        )
        self._ops.reshape_and_cache(key, value, *args)


METHODS: dict[str, dict[str, Any]] = {
    "h2o": {"kv_budget": 64},
    "scissorhands": {"kv_budget": 64},
    "pyramidinfer": {"kv_policy_args": {"piece_tokens": 100}},
    "kcache": {"kv_policy_args": {"top_n": 24}},
    "keydiff": {"kv_budget": "30%"},
    "snapkv-expected": {"kv_budget": "30%"},
    "keydiff-chunked": {"kv_budget": 64},
    # Extremes of 8-bit numbers are such numbers: summaries of both caches hold the same.
    "quest": {"kv_policy_args": {"attend": {"budget": 96, "dense_layers": 1}}},
}


def run_alike(
    engines: EnginePool, model: Path, vocab_size: int, **options: Any
) -> tuple[list[Outcome], list[Outcome]]:
    """Answers of a cache of float32 with numbers of 8 bits, and of one of 8 bits: equal bits."""
    prompts = random_prompts([130, 57, 401, 256], seed=5, vocab_size=vocab_size)
    runs = []
    for dtype in ("auto", "fp8"):
        engine = engines.get(model, **settings(dtype, **options))
        if dtype == "auto":
            for index, layer in enumerate(engine.attention_layers()):
                layer.impl.ops = Rounded(layer.impl.ops, index)
        else:
            give_scales(engine, powers_of_two)
        runs.append(engine.generate(prompts, greedy(16, logprobs=1)))
        engine.check_whole()
        engines.close()
    for one, other in zip(*runs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        for key in ("kept_tokens", "evicted_tokens"):
            assert one.report.get(key) == other.report.get(key)
    return runs[0], runs[1]


@pytest.mark.parametrize("policy", list(METHODS))
def test_other_methods_see_the_same_numbers(engines, random_model, policy) -> None:
    runs = run_alike(engines, random_model, 2048, kv_policy=policy, **METHODS[policy])
    if policy == "kcache":  # of four bytes and of one
        for one, other in zip(*runs, strict=True):
            for key in ("v_bytes_written", "v_bytes_read", "v_bytes_read_per_token"):
                assert one.report[key] == 4 * other.report[key] > 0
    elif policy == "quest":
        read, seen = (
            [sum(outcome.report[key] for outcome in run) for run in runs]
            for key in ("pages_read", "pages_visible")
        )
        assert read[0] == read[1] < 0.8 * seen[0] and seen[0] == seen[1]
    elif policy != "pyramidinfer":
        assert sum(outcome.report["evicted_tokens"] for outcome in runs[1]) > 1000


@pytest.mark.parametrize("family", ["gemma3", "gemma3n", "llama4"])
def test_layers_that_slide_and_layers_that_read(engines, tmp_path, family) -> None:
    """Windows, chunks, and layers that attend to the cache of another, by its scales."""
    runs = run_alike(engines, make_family(family, tmp_path), 512, kv_policy="snapkv", kv_budget=64)
    assert sum(outcome.report["evicted_tokens"] for outcome in runs[1]) > 300


def test_prefixes_and_preemption(tiny: Start) -> None:
    """Blocks of bytes are shared, copied and computed again; tokens stay the same."""
    shared, *tails = random_prompts([160, *range(60, 160, 10)], seed=4)
    runs: list[list[list[int]]] = []
    for blocks, caching in ((2000, False), (2000, True), (230, True)):
        engine = tiny(
            "mistral",
            **settings("fp8", kv_policy="snapkv", kv_budget=64, max_model_len=512),
            enable_prefix_caching=caching,
            kv_admission="prompt",  # so that requests are preempted
            max_num_seqs=8,
            num_gpu_blocks_override=blocks,
        )
        engine.shuffle_blocks()
        rows = Rows(give_scales(engine))
        jobs = [Job([*shared, *tail], greedy(90), 2 * i) for i, tail in enumerate(tails)]
        with count_preemptions(engine) as preempted:
            outcomes = engine.run(jobs, rows)
        engine.check_whole()
        runs.append([outcome.token_ids for outcome in outcomes])
        assert (sum(outcome.cached for outcome in outcomes) > 500) == caching
        assert bool(preempted["evicted"]) == (blocks == 230), preempted
    assert runs[0] == runs[1] == runs[2]


def test_scales_of_a_checkpoint(engines: EnginePool, tiny_model: Models, tmp_path: Path) -> None:
    """They switch the cache on by themselves, and reach the kernels."""
    config = json.loads((tiny_model("llama-mha") / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {**scheme, "symmetric": True},
    }
    weights = load_file(tiny_model("llama-mha") / "model.safetensors")
    tokens = []
    for name, factor in (("right", 1.0), ("coarse", 64.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for layer in range(4):
            for which, scale in zip("kv", scales_of_layer(layer), strict=True):
                at = f"model.layers.{layer}.self_attn.{which}_scale"
                weights[at] = torch.tensor([scale * factor])
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        engine = engines.get(folder, kv_policy="snapkv", kv_budget=64, dtype="bfloat16")
        found = [scale for layer in engine.attention_layers() for scale in scales_of(layer)]
        assert found == pytest.approx([x * factor for i in range(4) for x in scales_of_layer(i)])
        assert {layer.kv_cache_dtype for layer in engine.attention_layers()} == {"fp8"}
        outcomes = engine.generate(random_prompts([130, 57, 300]), greedy(16))
        tokens.append([outcome.token_ids for outcome in outcomes])
    assert tokens[0] != tokens[1], "scales that are 64 times too large change nothing"
