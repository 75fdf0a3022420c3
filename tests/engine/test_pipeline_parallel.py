# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages with half of the layers each keep and generate what one device does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import Job, Start, random_prompts
from tests.engine.support import greedy as greedy_params
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS, KV_HEADS, PAGE = 4, 4, 16 << 10  # bytes of a block of one layer
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 2048 * PAGE,
}
LENGTHS = (300, 40, 181, 212)
ARRIVALS = (0, 0, 2, 2)  # the later prompts come while the others decode
TOKENS = 90
TWO = {"pipeline_parallel_size": 2}
BOTH = {**TWO, "tensor_parallel_size": 2}
# Policy, its settings, the engine's.
ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "pyramidkv": ("pyramidkv", {"kv_budget": 64}, TWO),
    # Two layers of a prompt of the greatest length have 64 blocks.
    "snapkv-preempted": (
        "snapkv",
        {"kv_budget": 64, "kv_admission": "prompt"},
        {**TWO, "kv_cache_memory_bytes": 66 * PAGE},
    ),
    "h2o": ("h2o", {"kv_budget": 40, "kv_policy_args": {"interval": 16}}, TWO),
    "pyramidkv-chunked": (
        "pyramidkv",
        {
            "kv_budget": 64,
            "kv_policy_args": {"chunk.tokens": 64, "chunk.keep": 80, "chunk.scorer": None},
        },
        TWO,
    ),
    # Each stage summarises, selects and counts in its own layers; all but the lowest select.
    "select-evicted": (
        "select-evicted",
        {"kv_policy_args": {"attend": {"budget": 96, "dense_layers": 1, "sinks": 16}}},
        TWO,
    ),
    "pyramidkv-both": ("pyramidkv", {"kv_budget": 64}, BOTH),
}


# Streaming heads: all of those in the first stage; in the second some keep everything.
HEADS: dict[str, Any] = {
    "kv_policy": "duoattention",
    "kv_policy_args": {
        "mask": [[0] * 4, [0] * 4, [1, 0, 0, 1], [0, 1, 0, 0]],
        "share": 3 / 16,
        "heads.sinks": 8,
        "heads.recent": 40,
    },
}


def _settings(name: str, folder: Path) -> dict[str, Any]:
    policy, settings, _ = ENGINES[name]
    return {"kv_policy": policy, "kv_min_tokens": 0, **settings, "kv_trace": str(folder / name)}


def _jobs() -> list[Job]:
    return [
        Job(prompt, greedy_params(TOKENS), arrival)
        for prompt, arrival in zip(random_prompts(LENGTHS), ARRIVALS, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline-parallel")


@pytest.fixture(scope="module")
def stages(folder: Path, tiny_model: Any) -> Iterator[Child]:
    """All engines in turn, in one process and their workers, beside what one device does here."""
    waves: list[list[Any]] = [[], []]
    first = [[random_prompts(LENGTHS)[0], greedy(TOKENS)]]
    for prompt, arrival in zip(random_prompts(LENGTHS), ARRIVALS, strict=True):
        waves[arrival // 2].append([prompt, greedy(TOKENS)])
    common = {
        "model": str(tiny_model("llama-mha")),
        **SETTINGS,
        "distributed_executor_backend": "mp",
    }
    child = Child(
        folder / "child",
        *(
            ({**common, **engine, "additional_config": _settings(name, folder / "stages")}, waves)
            for name, (_, _, engine) in ENGINES.items()
        ),
        ({**common, **TWO, "additional_config": HEADS}, [*waves, [], first]),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    yield child
    child.kill()


ENDS = re.compile(r"(-stage\d)?(-rank\d)?$")


def read_traces(folder: Path) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """What was kept at each eviction, by prompt length and computed tokens; all stages and ranks.

    `kept_<layer>` has the heads of all ranks, and `files` the names' ends.
    """
    paths = (path for path in folder.glob("*.npz") if "~pages" not in path.name)
    files = {path.stem: dict(np.load(path)) for path in paths}
    lengths = {
        str(a["request_id"]): int(a["prompt_len"]) for a in files.values() if "prompt_len" in a
    }
    traces: dict[tuple[int, int], dict[str, Any]] = {}
    for stem, arrays in sorted(files.items()):
        request_id = str(arrays["request_id"])
        length = lengths[request_id]
        place = length, int(arrays.get("computed", length))
        known = traces.setdefault(place, {"held": arrays["held"], "files": []})
        known["files"].append(stem[len(ENDS.sub("", stem)) :])
        assert (known["held"] == arrays["held"]).all()
        assert arrays["layers"].tolist() == list(range(LAYERS))
        for name in filter(lambda name: name.startswith("kept_"), arrays):
            before = [known[name]] if name in known else []
            known[name] = np.concatenate([*before, arrays[name]])
    return traces


@pytest.mark.parametrize("name", ENGINES)
def test_two_stages(tiny: Start, stages: Child, folder: Path, name: str) -> None:
    engine = tiny("llama-mha", **SETTINGS, **_settings(name, folder / "one"))
    outcomes = engine.run(_jobs())
    result = stages.results(560)[list(ENGINES).index(name)]
    for output, outcome in zip(result["outputs"], outcomes, strict=True):
        assert output["token_ids"] == outcome.token_ids
        assert output["report"] == outcome.report
    assert result["prefix_caching"] == (name != "h2o")

    one, two = read_traces(folder / "one" / name), read_traces(folder / "stages" / name)
    assert one.keys() == two.keys()
    ends = ["-stage0", "-stage1"] if ENGINES[name][2].get("tensor_parallel_size") is None else None
    for place, whole in one.items():
        assert two[place]["files"] == (
            ends or [f"-stage{stage}-rank{rank}" for stage in (0, 1) for rank in (0, 1)]
        )
        for key in ("held", *(f"kept_{layer}" for layer in range(LAYERS))):
            assert (two[place][key] == whole[key]).all(), (place, key)
    assert sum((whole["held"] < n).any() for (n, _), whole in one.items()) >= 3

    if name == "select-evicted":
        reports = [outcome.report for outcome in outcomes]
        assert all(0 < one["pages_read"] <= one["pages_visible"] for one in reports)
        assert sum(one["pages_read"] < one["pages_visible"] for one in reports) >= 3

    # The pool of every stage is whole again, and was as large as its own layers could make it.
    page = PAGE // ENGINES[name][2].get("tensor_parallel_size", 1)
    page += 4 * KV_HEADS * 16 if name == "h2o" else 0  # what it gathers for each row of a page
    page += PAGE // 16 if name == "select-evicted" else 0  # summaries
    blocks = {**SETTINGS, **ENGINES[name][2]}["kv_cache_memory_bytes"] // page
    assert result["free_blocks"] == [blocks - 1] * 2
    whole = blocks * 16 / (LAYERS // 2)  # tokens, where a prompt is held whole at its end
    assert result["kv_cache_tokens"] >= whole - 1
    assert (result["kv_cache_tokens"] > whole) == ("chunked" in name)
    # Somebody was preempted after it had evicted.
    if "preempted" in name:
        assert result["evictions"] > 3


def test_two_stages_with_lengths_of_heads(tiny: Start, stages: Child) -> None:
    """With bundles of two kinds, one of which has blocks in the second stage alone."""
    engine = tiny("llama-mha", **SETTINGS, **HEADS, kv_min_tokens=None)
    outcomes = engine.run(_jobs())
    outcomes += engine.run(_jobs()[:1])
    result = stages.results(560)[len(ENGINES)]
    for output, outcome in zip(result["outputs"], outcomes, strict=True):
        assert output["token_ids"] == outcome.token_ids
        assert output["report"] == outcome.report
        assert output["cached"] == outcome.cached
    freed = (LENGTHS[0] - 8 - 40) // 64 * 64
    assert outcomes[-1].cached == freed > 0
    kept = np.array(outcomes[0].report["kept_tokens"]).reshape(LAYERS, KV_HEADS)
    assert (kept == LENGTHS[0]).sum(axis=1).tolist() == [0, 0, 2, 1]
    assert (kept == LENGTHS[0] - freed).sum(axis=1).tolist() == [4, 4, 2, 3]
    blocks = SETTINGS["kv_cache_memory_bytes"] // PAGE
    assert result["free_blocks"] == [blocks - 1] * 2
