# SPDX-License-Identifier: Apache-2.0
"""What CUDA users get, against the first model runner of vLLM on the CPU.

vLLM's second model runner needs Triton and a device; Triton's interpreter stands in for both, so
these engines run in processes of their own. With it the attention of CUDA devices runs too, under
either runner, on the tables that `attention/shifted_tables.py` shifts for each layer: vLLM's Triton
kernels, and FlashAttention, whose two functions have stand-ins in PyTorch. With stand-ins for CUDA
graphs workers start as they do on a GPU, and evictions run our Triton kernels between the replays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput

from tests.engine import models
from tests.engine.drafts import write_eagle
from tests.engine.failing import HONEST, REASONS, write_module
from tests.engine.support import Job, random_prompts
from tests.engine.support import greedy as greedy_params
from tests.plans import THINS
from tests.plumbing.children import Child, greedy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# The interpreter takes its time: two layers, grouped queries, a few dozen tokens. In float32,
# because the interpreter's dot product of bfloat16 is wrong.
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
# Rows leave between the last two layers.
DEEPER = ("Llama", {**SHAPE[1], "num_hidden_layers": 4})
# A window of 32 tokens in one of two layers, and caps on the logits.
HYBRID = (
    "Gemma2",
    {
        **SHAPE[1],
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 4.0,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,  # the prompts of 70 and 100 tokens come in chunks
    "kv_cache_memory_bytes": 4 << 20,
    "block_size": 16,
}
ATTEND = {"min_tokens": 0, "sinks": 16, "recent": 16, "dense_layers": 1}
# Policies of the engines that run in turn in a process: of the attention of CUDA devices also one
# whose lengths the worker solves, and one that evicts during generation.
POLICIES: dict[str, dict[str, Any]] = {
    # Requests of "spans" keep their first tokens.
    **{
        name: {"kv_policy": "pyramidkv", "kv_budget": 24}
        for name in ("pyramidkv", "spans", "hybrid", "drafts", "eagle", "fp8")
    },
    "auto": {"kv_policy": "auto", "kv_budget": 24, "kv_policy_args": {"window": 16}},
    "xkv": {"kv_policy": "xkv", "kv_budget": 24},
    "h2o": {"kv_policy": "h2o", "kv_budget": 24, "kv_policy_args": {"interval": 4}},
    "inside": {
        "kv_policy": "pyramidkv",
        "kv_budget": 24,
        "kv_policy_args": {"chunk": {"tokens": 32, "keep": 24, "scorer": "keydiff"}},
    },
    # Pages of two sizes, which vLLM's two runners lay out each in its own way.
    "kcache": {"kv_policy": "kcache", "kv_policy_args": {"top_n": 8}},
    # The survivors' V on the host, but for the first layer's: tables of two sizes are shifted.
    "away": {
        "kv_policy": "pyramidkv",
        "kv_budget": 36,
        "kv_policy_args": {"values": {"kind": "host", "top_n": 8, "device_layers": 1}},
    },
    # The upper of two layers reads 4 of 5 to 7 pages; then 3 of 4 that hold what was kept.
    "select": {"kv_policy": "select", "kv_policy_args": {"attend": {**ATTEND, "budget": 64}}},
    "both": {
        "kv_policy": "select-evicted",
        "kv_budget": 44,
        "kv_policy_args": {"attend": {**ATTEND, "budget": 48, "sinks": 0}, "window": 16},
    },
    # Blocks of 32 tokens of one KV head; one head of each layer keeps 16 tokens, and fills them.
    "heads": {
        "kv_policy": "duoattention",
        "kv_min_tokens": None,
        "kv_policy_args": {"mask": [[0.9, 0.1], [0.2, 0.8]], "heads.sinks": 4, "heads.recent": 12},
    },
    # No head keeps everything, and what an eviction overwrites is copied.
    "streams": {
        "kv_policy": "duoattention",
        "kv_min_tokens": None,
        "kv_policy_args": {"share": 0.0, "heads.sinks": 4, "heads.recent": 12},
    },
    # Pieces of 48 tokens, of which the upper layers hold 48, 32 and 16.
    "thinned": {"kv_policy": "pyramidinfer", "kv_min_tokens": 0, "kv_policy_args": THINS},
}
# What engines have beside their policy. Drafts change nothing: they are compared with one that has
# none.
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1}
EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
BESIDE: dict[str, dict[str, Any]] = {
    "drafts": {"speculative_config": DRAFTS},
    "fp8": {"kv_cache_dtype": "fp8"},
    "thinned": {"max_num_batched_tokens": 64},  # a piece and who decodes beside it
}
ON_HOST = ("kcache", "away")
# Name: vLLM's runner (1 or 2), what `triton` of `child.py` is, the attention backend, policies.
ENGINES = {
    "second": (
        "2",
        "interpreter",
        "vllm_pyramid.attention.backend_cpu",
        ("pyramidkv", "kcache", "thinned", "heads"),
    ),
    "second-attention": (
        *("2", "attention", "vllm_pyramid.attention.backend_triton"),
        ("pyramidkv", "xkv", "h2o", "inside", "spans", "hybrid", "fp8", "drafts", "eagle", "both"),
    ),
    "first-attention": (
        *("1", "attention", "vllm_pyramid.attention.backend_triton"),
        (
            "pyramidkv",
            "auto",
            "inside",
            "spans",
            "hybrid",
            "eagle",
            "kcache",
            "away",
            "thinned",
            "both",
            "heads",
        ),
    ),
    "second-flash": (
        *("2", "flash", "vllm_pyramid.attention.backend_flash"),
        ("xkv", "spans", "hybrid", "fp8", "thinned"),
    ),
    "full-graphs": (
        *("2", "flash", "vllm_pyramid.attention.backend_flash"),
        ("pyramidkv", "drafts", "kcache", "away", "thinned", "select", "heads"),
    ),
    "decode-graphs": (
        *("2", "attention", "vllm_pyramid.attention.backend_triton"),
        ("pyramidkv", "auto", "h2o", "heads", "streams", "select"),
    ),
}
# vLLM's mode of CUDA graphs, where there are stand-ins for them.
# Where our own kernels are those for Triton.
KERNELS = {"full-graphs", "decode-graphs", "first-attention"}
GRAPHS = {"full-graphs": "FULL_AND_PIECEWISE", "decode-graphs": "FULL_DECODE_ONLY"}
RUNS = [(name, policy) for name, (*_, policies) in ENGINES.items() for policy in policies]
# Prompt length, generated tokens, step of arrival (even: see `child.py`), the request's own
# settings. The later prompts meet requests that decode.
REQUESTS: list[tuple[int, int, int, dict[str, Any]]] = [
    (70, 6, 0, {}),
    (20, 8, 0, {}),
    (45, 4, 2, {"kv_policy": "full"}),
    (100, 3, 4, {}),
]


def variables(runner: str, graphs: bool = False) -> dict[str, str]:
    """The environment of a child under Triton's interpreter and one of vLLM's two runners."""
    return {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1" if graphs else "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each policy."""
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        shapes = {"llama-tiny": SHAPE, "llama-deeper": DEEPER, "gemma-tiny": HYBRID}
        for name, shape in shapes.items():
            patch.setitem(models.SHAPES, name, shape)
            found[name] = models.write_model(name, tmp_path_factory.mktemp(name))
    found["eagle head"] = write_eagle(tmp_path_factory.mktemp("eagle"), found["llama-tiny"])
    of_policies = dict.fromkeys(POLICIES, found["llama-tiny"])
    others = {"hybrid": found["gemma-tiny"], "thinned": found["llama-deeper"]}
    return found | of_policies | others


def _beside(policy: str, model: dict[str, Path]) -> dict[str, Any]:
    """What an engine has beside its policy."""
    if policy == "eagle":
        return {"speculative_config": {**EAGLE, "model": str(model["eagle head"])}}
    return BESIDE.get(policy, {})


def _settings(policy: str, request: tuple[int, int, int, dict[str, Any]]) -> dict[str, Any]:
    """The request's own settings, under a policy."""
    length, _, _, own = request
    return {"kv_keep": [0, length // 3]} if policy == "spans" and not own else own


def _waves(policy: str) -> list[list[Any]]:
    waves: list[list[Any]] = [[], [], []]
    for prompt, request in zip(prompts(), REQUESTS, strict=True):
        _, tokens, arrival, _ = request
        waves[arrival // 2].append([prompt, greedy(tokens, **_settings(policy, request))])
    return waves


def _start(folder: Path, model: dict[str, Path], name: str) -> Child:
    runner, triton, _, policies = ENGINES[name]
    return Child(
        folder / name,
        *(
            (
                {
                    "model": str(model[policy]),
                    **(SETTINGS | _beside(policy, model)),
                    "additional_config": POLICIES[policy],
                },
                _waves(policy),
            )
            for policy in policies
        ),
        triton=triton,
        graphs=GRAPHS.get(name),
        kernels=name in KERNELS,
        **variables(runner, name in GRAPHS),
    )


@pytest.fixture(scope="module")
def children(model, tmp_path_factory) -> Iterator[dict[str, Child]]:
    """The processes, side by side."""
    folder = tmp_path_factory.mktemp("runner-v2")
    running = {name: _start(folder, model, name) for name in ENGINES}
    yield running
    for child in running.values():
        child.kill()


@pytest.fixture(scope="module")
def expected(children, engines, model) -> dict[str, list[tuple[list[int], dict[str, Any]]]]:
    """Tokens and reports of the first runner by policy, made while the others start."""
    found = {}
    for name, policy in POLICIES.items():
        beside = {} if name in ("drafts", "eagle") else BESIDE.get(name, {})
        engine = engines.get(model[name], **(SETTINGS | beside | policy))
        jobs = [
            Job(prompt, greedy_params(request[1], **_settings(name, request)), request[2])
            for prompt, request in zip(prompts(), REQUESTS, strict=True)
        ]
        found[name] = [(outcome.token_ids, outcome.report) for outcome in engine.run(jobs)]
    return found


def prompts() -> list[list[int]]:
    """The last one begins as the first one does, whose prompt has been evicted from by then."""
    prompts = random_prompts([length for length, *_ in REQUESTS])
    return [*prompts[:-1], [*prompts[0], *prompts[-1]][: REQUESTS[-1][0]]]


@pytest.mark.parametrize(("name", "policy"), RUNS)
def test_runner(children, expected, name, policy) -> None:
    runner, triton, backend, policies = ENGINES[name]
    result = children[name].results()[policies.index(policy)]
    stock = {
        "1": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "2": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    }
    assert stock[runner] in result["runner"]
    assert f"vllm_pyramid.worker.adapter_v{runner}.AdapterV{runner}" in result["runner"]
    assert backend in result["modules"]
    layers = (DEEPER if policy == "thinned" else SHAPE)[1]["num_hidden_layers"]
    assert result["groups"] == layers + (policy == "eagle")
    # Where tables are shifted, vLLM's own are the layers of that one tensor: none exists beside it,
    # but for layers that do not evict.
    shifted = triton in ("attention", "flash")
    assert result["one_tensor_of_tables"] == (shifted and policy not in ("hybrid", "eagle"))
    cached = [output["cached"] for output in result["outputs"]]
    # V on the host is not copied, so what an eviction overwrites is gone.
    # Inside prompts the first eviction is at 32 tokens, with a window of 8.
    # A head's survivors lie behind the first block, which was not overwritten.
    of_prefix = {"h2o": 0, "inside": 16, "away": 0, "thinned": 0, "heads": 32}
    assert cached == [0, 0, 0, of_prefix.get(policy, 64)]
    outputs = [(output["token_ids"], output["report"]) for output in result["outputs"]]
    assert outputs == expected[policy]
    _check_reports(policy, [report for _, report in outputs])
    if name in GRAPHS:
        _check_graphs(GRAPHS[name], policy, result["counts"])


def _check_graphs(mode: str, policy: str, counts: dict[str, int]) -> None:
    """Graphs were captured twice, the first time for their memory, and decode steps replayed."""
    if policy == "h2o":  # works in every step
        assert counts.get("full replays", 0) == counts.get("captures", 0) == 0
        assert counts["mode NONE"] == 1
        return
    if policy in ON_HOST:  # attends by itself in every step, between the pieces
        assert counts.get("mode PIECEWISE") == 1 and counts["piecewise calls"] > 1, counts
        assert counts.get("full replays", 0) == counts.get("captures", 0) == 0
        # A step waits for each copy; V of chunks of prompts is fetched.
        assert counts["late write_rows"] > counts["late copy_pages"] > 0
        return
    assert counts[f"mode {mode}"] == 1
    # Of four requests at most; with two drafts each has three tokens in a decode step.
    assert counts["captures"] == (2 if policy == "drafts" else 3)
    assert counts["profiled captures"] == 2
    assert counts["full replays"] > 1
    if policy == "select" and "flash attention" in counts:  # a list is a request of its own
        assert counts["flash attention, one KV head"] > counts["full replays"]
    if policy == "heads" and "flash attention" in counts:
        assert counts["flash attention, one KV head"] >= counts["flash attention"] > 1
    # Prompts, whose attention is called between the pieces, and evicts.
    assert (counts.get("piecewise calls", 0) > 0) == (mode == "FULL_AND_PIECEWISE")


def _check_reports(policy: str, reports: list[dict[str, Any]]) -> None:
    """The policy did what it is there for."""
    evicted = [report["evicted_tokens"] > 0 for report in reports]
    keeps_all = policy in ("kcache", "select")
    assert evicted == ([False] * 4 if keeps_all else [True, False, False, True])
    if policy in ("select", "both"):
        assert all(one["pages_visible"] > 0 for one in reports)
        fewer = [one["pages_read"] < one["pages_visible"] for one in reports]
        assert fewer == [True, False, False, True]
    if policy == "thinned":
        # Pieces of 48 and 22 tokens; of 48, 48 and 4.
        assert reports[0]["kept_tokens"] == [70, 70, 54, 38]
        assert reports[3]["kept_tokens"] == [100, 100, 68, 36]
    if policy == "xkv":
        assert ["solved_tokens" in report for report in reports] == [True, False, False, True]
        assert any(len(set(report.get("solved_tokens", []))) > 1 for report in reports)
    if policy == "h2o":
        # 70 tokens keep 38 and give back 32; at 74 tokens 16 more go.
        assert reports[0]["computed_tokens"] == 74 and reports[0]["kept_tokens"] == [26, 26]
        assert reports[3]["computed_tokens"] == 100 and reports[3]["kept_tokens"] == [36, 36]
    if policy == "heads":
        assert reports[0]["kept_tokens"] == [70, 38, 38, 70]
        assert reports[3]["kept_tokens"] == [100, 36, 36, 100]
    if policy in ON_HOST:
        assert all(report["v_bytes_written"] > 0 for report in reports)
    if policy == "kcache":
        read = [report["v_bytes_read_per_token"] for report in reports]
        assert read[0] == read[1] == read[3] == 8 * 4 * 16 * 4  # keys, heads, float32 elements
        assert read[2] > 45 * 2 * 16 * 4  # everything, of each KV head


def test_failures_under_the_second_runner(model, tmp_path, engines) -> None:
    """Requests that fail end alone, with their reasons; the others say what they say alone."""
    settings = {**SETTINGS, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 16}
    lengths = [HONEST[0], *REASONS, HONEST[1]]
    sent = [random_prompts([length], seed=length)[0] for length in lengths]
    with pytest.MonkeyPatch.context() as patched:
        write_module(tmp_path, patched)
        policy = {"kv_policy": str(tmp_path / "cursed.yaml"), "kv_min_tokens": 0}
        llm = {"model": str(model["pyramidkv"]), **settings, "additional_config": policy}
        child = Child(
            tmp_path / "child",
            (llm, [[[prompt, greedy(4)] for prompt in sent]]),
            triton="interpreter",
            **variables("2"),
        )
        try:
            engine = engines.get(model["pyramidkv"], **settings, **policy)
            alone = engine.generate([sent[0], sent[-1]], greedy_params(4))
            (result,) = child.results()
        finally:
            child.kill()
    assert "vllm_pyramid.worker.adapter_v2.AdapterV2" in result["runner"]
    outputs = dict(zip(lengths, result["outputs"], strict=True))
    for length, right in zip(HONEST, alone, strict=False):
        assert outputs[length]["token_ids"] == right.token_ids
    for length, reason in REASONS.items():
        assert outputs[length]["finish_reason"] == "error" and not outputs[length]["token_ids"]
        if "error" not in EngineCoreOutput.__struct_fields__:  # vLLM 0.33 says it elsewhere
            assert reason in outputs[length]["stop_reason"]
    assert result["free_blocks"] == [engine.usable_blocks]
