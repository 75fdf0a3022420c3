# SPDX-License-Identifier: Apache-2.0
"""Two ranks with half of the KV heads each keep and generate what one rank does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import Job, Outcome, Start, random_prompts
from tests.engine.support import greedy as greedy_params
from tests.engine.test_pipeline_parallel import read_traces
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS, KV_HEADS = 4, 4
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 32 << 20,
}
LENGTHS = (300, 40, 181, 212)
ARRIVALS = (0, 0, 2, 2)
TOKENS = 40
POLICIES: dict[str, dict[str, Any]] = {
    "pyramidkv": {"kv_budget": 64},
    "xkv": {"kv_budget": 64},
    "kcache": {"kv_policy_args": {"top_n": 16}},
    "h2o": {"kv_budget": 40, "kv_policy_args": {"interval": 16}},
    "select": {"kv_policy_args": {"attend": {"budget": 96, "dense_layers": 1, "recent": 16}}},
    "pyramidkv-chunked": {
        "kv_budget": 64,
        "kv_policy_args": {"chunk.tokens": 64, "chunk.keep": 80, "chunk.scorer": None},
    },
    # Both stages: what is generated is thinned too.
    "pyramidinfer": {
        "kv_policy_args": {
            "piece_tokens": 100,
            "interval": 1,
            "decay_ratio": 0.5,
            "min_context": 16,
            "schedule": "thin_generated",
            "gen_window": 16,
            "gen_interval": 8,
            "fill_blocks": False,
        }
    },
}
# Which heads keep everything: those of the ranks agree; one of four keeps; they disagree in both
# lanes; none keeps.
MASK = [[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
ON_BOTH = [[1, 0, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
STREAMING: dict[str, Any] = {"heads.sinks": 8, "heads.recent": 24}
# With lengths of heads: two ranks' settings, and those that say what both do to one rank.
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "duoattention": (
        {"kv_policy_args": {"mask": MASK, "share": 5 / 16, **STREAMING}},
        {"kv_policy_args": {"mask": ON_BOTH, "share": 0.5, **STREAMING}, "kv_min_tokens": None},
    )
}
# Tokens between two evictions, of policies that evict during generation.
INTERVALS = {"h2o": 16, "pyramidinfer": 8}


def _settings(policy: str, folder: Path) -> dict[str, Any]:
    return {
        "kv_policy": policy,
        "kv_min_tokens": 0,
        **POLICIES[policy],
        "kv_trace": str(folder / policy),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tiny_model: Any) -> Iterator[Child]:
    """All policies in turn, in one process and two workers each, beside what one rank does here."""
    waves: list[list[Any]] = [[], []]
    for prompt, arrival in zip(random_prompts(LENGTHS), ARRIVALS, strict=True):
        waves[arrival // 2].append([prompt, greedy(TOKENS)])
    common = {
        "model": str(tiny_model("llama-mha")),
        **SETTINGS,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    child = Child(
        folder / "child",
        *(
            ({**common, "additional_config": _settings(policy, folder / "two")}, waves)
            for policy in POLICIES
        ),
        *(
            ({**common, "block_size": 32, "additional_config": {"kv_policy": policy, **two}}, waves)
            for policy, (two, _) in HEADS.items()
        ),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    yield child
    child.kill()


def _on_one_rank(tiny: Start, **settings: Any) -> list[Outcome]:
    engine = tiny("llama-mha", **SETTINGS, **settings)
    jobs = [
        Job(prompt, greedy_params(TOKENS), arrival)
        for prompt, arrival in zip(random_prompts(LENGTHS), ARRIVALS, strict=True)
    ]
    outcomes = engine.run(jobs)
    engine.check_whole()
    return outcomes


@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks(tiny: Start, two_ranks: Child, folder: Path, policy: str) -> None:
    outcomes = _on_one_rank(tiny, **_settings(policy, folder / "one"))
    result = two_ranks.results(500)[list(POLICIES).index(policy)]
    for output, outcome in zip(result["outputs"], outcomes, strict=True):
        assert output["token_ids"] == outcome.token_ids
        # Every chunk of a prompt reads V of those before it, and the chunks need not be the same.
        reports = [{**report} for report in (output["report"], outcome.report)]
        for report in reports:
            report.pop("v_bytes_read", None)
        assert reports[0] == reports[1]
        if policy == "select" and len(outcome.job.prompt) > 100:
            assert reports[0]["pages_read"] < 0.8 * reports[0]["pages_visible"]

    one, two = read_traces(folder / "one" / policy), read_traces(folder / "two" / policy)
    # The last token is sampled and not computed.
    points = [
        (n, at) for n in LENGTHS for at in range(n, n + TOKENS, INTERVALS.get(policy, TOKENS))
    ]
    if policy == "pyramidkv-chunked":  # 64 tokens are kept whole, and 8 of the window come after
        points += [(n, at) for n in LENGTHS for at in range(128, n - 7, 64)]
    assert sorted(one) == sorted(two) == sorted(points)
    for point in points:
        whole, ranks = one[point], two[point]
        assert ranks["files"] == ["-rank0", "-rank1"] and whole["files"] == [""]
        for layer, held in enumerate(whole["held"]):
            assert whole[f"kept_{layer}"].shape == (KV_HEADS, held)
            assert (ranks[f"kept_{layer}"] == whole[f"kept_{layer}"]).all(), (point, layer)
    if policy in INTERVALS:
        for n in LENGTHS:
            last = max(at for length, at in points if length == n)
            prompt, top = (one[n, at]["held"][-1] for at in (n, last))
            assert top < prompt + last - n, "nothing was evicted during generation"


@pytest.mark.parametrize("policy", HEADS)
def test_two_ranks_share_the_tables_of_heads(tiny: Start, two_ranks: Child, policy: str) -> None:
    """A head keeps as much as the longest at its place of both ranks; blocks of 64 tokens each."""
    outcomes = _on_one_rank(tiny, kv_policy=policy, block_size=16, **HEADS[policy][1])
    result = two_ranks.results(500)[len(POLICIES) + list(HEADS).index(policy)]
    evicted = 0
    for output, outcome in zip(result["outputs"], outcomes, strict=True):
        assert output["token_ids"] == outcome.token_ids
        kept = np.array(outcome.report["kept_tokens"]).reshape(LAYERS, 2, KV_HEADS // 2)
        assert output["report"]["kv_heads"] == KV_HEADS // 2
        for rank in range(2):
            assert output["report"]["kept_tokens"] == kept[:, rank].ravel().tolist()
        evicted += len(set(kept.ravel().tolist())) > 1
    assert evicted == 3, "some heads of the longer prompts are shorter than others"
