# SPDX-License-Identifier: Apache-2.0
"""Eviction beside caches with a scale for each token and KV head, as vLLM's Triton kernels write.

The attention and the kernels are those of CUDA devices, interpreted, in processes of their own (see
`test_runner_v2.py`). The oracle is the CPU's engine with a cache of float32, into which only
numbers are written that such a row can hold: what attention and scorers then see is what they are
to see in the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import models
from tests.engine.drafts import write_eagle
from tests.engine.families import make_family
from tests.engine.support import Engine, Job, random_prompts
from tests.engine.support import greedy as greedy_params
from tests.engine.test_fp8 import Written
from tests.engine.test_runner_v2 import BESIDE as OF_RUNNERS_BESIDE
from tests.engine.test_runner_v2 import DRAFTS, EAGLE, HYBRID, SETTINGS, SHAPE, variables
from tests.engine.test_runner_v2 import POLICIES as OF_RUNNERS
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DTYPES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
SNAPKV = {"kv_policy": "snapkv", "kv_budget": 24}
# Policies by what they look at: attention of a window, all layers' at once, attention that
# accumulates, keys, values; evictions inside the prompt; beside layers that do not evict.
POLICIES: dict[str, dict[str, Any]] = {
    "pyramidkv": {"kv_policy": "pyramidkv", "kv_budget": 24},
    "xkv": {"kv_policy": "xkv", "kv_budget": 24},
    "h2o": {"kv_policy": "h2o", "kv_budget": 24, "kv_policy_args": {"interval": 4}},
    "values": {"kv_policy": "snapkv-expected", "kv_budget": 40, "kv_policy_args": {"window": 16}},
    "inside": {
        **SNAPKV,
        "kv_policy_args": {"chunk": {"tokens": 32, "keep": 24, "scorer": "keydiff"}},
    },
    "thinned": {**OF_RUNNERS["thinned"], "kv_min_tokens": 24},
    "hybrid": SNAPKV,
    "readers": SNAPKV,
    "drafts": SNAPKV,
    "eagle": SNAPKV,
}
BESIDE = {"drafts": {"speculative_config": DRAFTS}, "thinned": OF_RUNNERS_BESIDE["thinned"]}
# Name: vLLM's runner, the cache, policies.
ENGINES = {
    "second": ("2", "int8_per_token_head", ("pyramidkv", "xkv", "h2o", "thinned", "eagle")),
    "first": (
        "1",
        "fp8_per_token_head",
        ("values", "inside", "thinned", "hybrid", "readers", "drafts"),
    ),
    # Graphs are captured on two caches, one after the other.
    "graphs": ("2", "int8_per_token_head", ("pyramidkv",)),
}
RUNS = [(name, policy) for name, (*_, policies) in ENGINES.items() for policy in policies]
# Prompt length, generated tokens, step of arrival; the last prompt begins as the first one does.
REQUESTS = [(70, 6, 0), (20, 8, 0), (100, 3, 4)]


class RoundedRows(Written):
    """The kernels over a cache of float32 into which only what rows can hold is written."""

    def __init__(self, ops: Any, dtype: torch.dtype) -> None:
        super().__init__(ops)
        self._dtype = dtype

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        most = 127.0 if self._dtype == torch.int8 else 448.0
        scale = (x.abs().amax(dim=-1, keepdim=True) / most).clamp(min=1e-6)
        number = x * (1.0 / scale)
        if self._dtype == torch.int8:  # halves away from zero
            number = (number.abs() + 0.5).floor() * number.sign()
        return number.clamp(-most, most).to(self._dtype).float() * scale

    def reshape_and_cache(self, key: Any, value: Any, *args: Any, **scales: float) -> None:
        assert set(scales.values()) == {1.0}
        self._ops.reshape_and_cache(self._rounded(key), self._rounded(value), *args)


def prompts() -> list[list[int]]:
    made = random_prompts([length for length, *_ in REQUESTS])
    return [*made[:-1], [*made[0], *made[-1]][: REQUESTS[-1][0]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each policy."""
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        for name, shape in (("llama-tiny", SHAPE), ("gemma-tiny", HYBRID)):
            patch.setitem(models.SHAPES, name, shape)
            found[name] = models.write_model(name, tmp_path_factory.mktemp(name))
    own = {"hybrid": found["gemma-tiny"]}
    own["readers"] = make_family("gemma3n", tmp_path_factory.mktemp("gemma3n"))
    found["eagle head"] = write_eagle(tmp_path_factory.mktemp("eagle"), found["llama-tiny"])
    return found | dict.fromkeys(POLICIES, found["llama-tiny"]) | own


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def children(model, traces, tmp_path_factory) -> Iterator[dict[str, Child]]:
    """The processes, side by side."""
    folder, running = tmp_path_factory.mktemp("scaled-rows"), {}
    for name, (runner, dtype, policies) in ENGINES.items():
        waves: list[list[Any]] = [[], [], []]
        for prompt, (_, tokens, arrival) in zip(prompts(), REQUESTS, strict=True):
            waves[arrival // 2].append([prompt, greedy(tokens)])
        eagle = {"speculative_config": {**EAGLE, "model": str(model["eagle head"])}}
        engines = [
            (
                {
                    "model": str(model[policy]),
                    **SETTINGS,
                    "kv_cache_dtype": dtype,
                    **(eagle if policy == "eagle" else BESIDE.get(policy, {})),
                    "additional_config": {
                        **POLICIES[policy],
                        "kv_trace": str(traces / f"{name}-{policy}"),
                    },
                },
                waves,
            )
            for policy in policies
        ]
        running[name] = Child(
            folder / name,
            *engines,
            triton="attention",
            kernels=True,
            graphs="FULL_DECODE_ONLY" if name == "graphs" else None,
            **variables(runner, name == "graphs"),
        )
    yield running
    for child in running.values():
        child.kill()


def kept_in(folder: Path) -> list[tuple[int, list[list[list[int]]]]]:
    """Of each eviction the tokens computed before it, and the positions kept by layer and head."""
    found = []
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            number = int(file["prompt_len" if "prompt_len" in file else "computed"])
            layers = len(file["held"])
            found.append((number, [file[f"kept_{layer}"].tolist() for layer in range(layers)]))
    return sorted(found)


def run_oracle(engine: Engine, dtype: torch.dtype) -> list[tuple[list[int], dict[str, Any], int]]:
    """Of each request its tokens, its report, and the tokens of a prefix that it found."""
    for layer in engine.attention_layers():
        layer.impl.ops = RoundedRows(layer.impl.ops, dtype)
    jobs = [
        Job(prompt, greedy_params(tokens), arrival)
        for prompt, (_, tokens, arrival) in zip(prompts(), REQUESTS, strict=True)
    ]
    outcomes = engine.run(jobs)
    return [(outcome.token_ids, outcome.report, outcome.cached) for outcome in outcomes]


@pytest.mark.parametrize(("name", "policy"), RUNS)
def test_kept_positions_and_tokens(children, engines, model, traces, name, policy) -> None:
    _, dtype, policies = ENGINES[name]
    folder = traces / f"oracle-{name}-{policy}"
    engine = engines.get(model[policy], **SETTINGS, **POLICIES[policy], kv_trace=str(folder))
    expected = run_oracle(engine, DTYPES[dtype])
    engines.close()
    result = children[name].results()[policies.index(policy)]
    assert "vllm_pyramid.attention.backend_triton" in result["modules"]
    ours, right = kept_in(traces / f"{name}-{policy}"), kept_in(folder)
    assert ours == right and len(right) >= 2
    found = [(one["token_ids"], one["report"], one["cached"]) for one in result["outputs"]]
    assert found == expected
    assert [report["evicted_tokens"] > 0 for _, report, _ in expected] == [True, False, True]
    assert expected[-1][2] > 0 or policy in (
        "h2o",
        "readers",
        "thinned",
    )  # it begins as the first one
    if name == "graphs":
        assert result["counts"]["full replays"] > 1 and result["counts"]["profiled captures"] == 2
    if policy not in ("h2o", "inside", "thinned", "hybrid", "readers"):  # which count otherwise
        block = 16 * 2 * 2 * (16 + 4)  # tokens, heads, K and V; numbers and a scale
        blocks = SETTINGS["kv_cache_memory_bytes"] // block
        tokens = blocks // result["groups"] * 16
        # Scores that wait for the last layer take a part of the memory.
        assert result["kv_cache_tokens"] == tokens or policy == "xkv"
        assert result["kv_cache_tokens"] <= tokens
