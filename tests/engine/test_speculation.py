# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding beside eviction: greedy tokens are those without it."""

from __future__ import annotations

import random
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.engine import drafts
from tests.engine.families import make_family
from tests.engine.support import (
    EnginePool,
    Job,
    Models,
    Outcome,
    Start,
    count_preemptions,
    greedy,
    is_cpu_build,
)

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kv_policy": "full"},
    "snapkv": {"kv_policy": "snapkv", "kv_budget": 64},
    "pyramidkv": {"kv_policy": "pyramidkv", "kv_budget": "20%"},
    "xkv": {"kv_policy": "xkv", "kv_budget": 64},
    "inside": {
        "kv_policy": "keydiff",
        "kv_budget": 64,
        "kv_policy_args": {"chunk": {"tokens": 128, "keep": 96}},
    },
    "select": {"kv_policy": "select", "kv_policy_args": {"attend.min_tokens": 128}},
    "heads": {
        "kv_policy": "duoattention",
        "kv_policy_args": {
            "mask": [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]],
            "share": 7 / 16,
            "heads.sinks": 8,
            "heads.recent": 40,
        },
        "kv_min_tokens": None,
    },
    "pyramidinfer": {
        "kv_policy": "pyramidinfer",
        "kv_policy_args": {"decay_ratio": 0.5, "min_context": 24, "piece_tokens": 128},
    },
}

# An engine in a process of its own says how many threads a matrix product has in the end.
THREADS = f"""
import sys
import torch
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], enforce_eager=True, skip_tokenizer_init=True, max_model_len=256,
          kv_cache_memory_bytes=8 << 20, speculative_config={SPECULATION},
          additional_config=dict(kv_policy="snapkv", kv_budget=64, kv_min_tokens=0))
prompt = dict(prompt_token_ids=[8, 9, 10] * 40)
llm.generate([prompt], SamplingParams(max_tokens=8, detokenize=False), use_tqdm=False)
print(torch.get_num_threads())
"""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    if not is_cpu_build():
        pytest.skip("this build of vLLM verifies drafts on a GPU alone")


def _prompts(lengths: tuple[int, ...] = (500, 30, 333, 200, 640, 100, 77, 450)) -> list[list[int]]:
    source = random.Random(1)
    found = []
    for length in lengths:
        words = [source.randrange(8, 60) for _ in range(40)]
        found.append([words[(i * 7 + i // 40) % 40] for i in range(length)])
    return found


def _waves(short_of_blocks: bool) -> list[list[Job]]:
    """All at once, in chunks beside others that decode; one alone; and some that come again."""
    if short_of_blocks:
        prompts = _prompts((320, 250, 300, 280, 310))
        return [[Job(prompt, greedy(100), arrival=3 * i) for i, prompt in enumerate(prompts)]]
    prompts = _prompts()
    return [
        [Job(prompt, greedy(40), arrival=3 * i) for i, prompt in enumerate(prompts)],
        [Job(prompts[2], greedy(40))],
        [Job(prompt, greedy(12)) for prompt in prompts[3:6]],
    ]


_plain: dict[str, list[Outcome]] = {}  # several ways to draft for one model are compared with it


def _without_drafts(
    engines: EnginePool, model: Path, settings: dict[str, Any], short_of_blocks: bool
) -> list[Outcome]:
    key = f"{model} {settings}"
    if key not in _plain:
        engine = engines.get(model, **settings)
        waves = _waves(short_of_blocks)
        _plain[key] = [outcome for wave in waves for outcome in engine.run(wave)]
    return deepcopy(_plain[key])


def _check(
    engines: EnginePool,
    model: Path,
    settings: dict[str, Any],
    blocks: int = 4096,
    speculation: dict[str, Any] = SPECULATION,
) -> None:
    """What comes of the same requests with drafts and without."""
    is_short = blocks < 4096
    settings = {**SETTINGS, "num_gpu_blocks_override": blocks, **settings}
    settings["max_model_len"] = 448 if is_short else 1024
    expected = _without_drafts(engines, model, settings, is_short)
    engine = engines.get(model, speculative_config=speculation, **settings)
    count = drafts.count_drafts(engine)
    with count_preemptions(engine) as preemptions:
        found = [outcome for wave in _waves(is_short) for outcome in engine.run(wave)]
        engine.scheduler.reset_prefix_cache()
        engine.check_whole()
    assert 0 < count["accepted"] < count["drafted"] - 50, count
    assert (preemptions["all"] > 0) == is_short
    selects = settings["kv_policy"] == "select"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        if selects:  # drafts read pages, too
            counts = [(one.report.pop("attended_tokens"), one.report.pop("pages_read"),
                       one.report.pop("pages_visible")) for one in (ours, theirs)]  # fmt: skip
            assert all(mine >= plain > 0 for mine, plain in zip(*counts, strict=True))
            assert counts[0][1] < counts[0][2] or len(ours.job.prompt) < 128
        assert ours.report == theirs.report
    again = len(_waves(is_short)[0])  # who comes when the first have ended finds their prompts
    cached = [[outcome.cached for outcome in side[again:]] for side in (found, expected)]
    # Before an eviction inside a prompt, drafts ask for a longer chunk, at most a block longer.
    less = 16 * ("chunk" in settings.get("kv_policy_args", {}))
    for ours, theirs in zip(*cached, strict=True):
        assert theirs - less <= ours <= theirs
    evicted = sum(outcome.report["evicted_tokens"] for outcome in found)
    assert (evicted > 0) == (settings["kv_policy"] not in ("full", "select"))


# `test_select.py` looks at pages and summaries beside n-grams.
@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"select"}))
def test_tokens_are_those_without_it(engines: EnginePool, tiny_model: Models, policy: str) -> None:
    """With prefix caching, where the policy has it: the last requests of `_waves` have hits."""
    _check(engines, tiny_model("llama-mha"), POLICIES[policy])


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Of each way to draft by a model: the target, and the configuration of the drafts."""
    folder = tmp_path_factory.mktemp("drafts")
    target = drafts.write_target(folder / "target")
    small = drafts.write_small_model(folder / "small", target, layers=2)
    eagle = drafts.write_eagle(folder / "eagle", target)
    eagle3 = drafts.write_eagle3(folder / "eagle3", target)
    mtp = drafts.write_mtp_model(folder / "mtp")
    return {
        "draft_model": (target, {"model": str(small), "num_speculative_tokens": 3}),
        "eagle": (target, {"model": str(eagle), "num_speculative_tokens": 3}),
        "eagle3": (target, {"model": str(eagle3), "num_speculative_tokens": 3}),
        "mtp": (mtp, {"num_speculative_tokens": 1}),
    }


@pytest.mark.parametrize(
    ("method", "policy", "blocks"),
    [
        ("eagle", "snapkv", 4096),
        ("eagle", "select", 4096),
        ("eagle3", "select", 4096),
        ("draft_model", "select", 4096),
        ("mtp", "select", 4096),
        ("eagle3", "xkv", 4096),
        ("draft_model", "xkv", 4096),
        ("draft_model", "pyramidinfer", 4096),
        ("mtp", "inside", 4096),
        ("draft_model", "snapkv", 170),  # some are preempted
    ],
)
def test_a_model_drafts(engines, drafters, method, policy, blocks) -> None:
    """Its layers keep all, in tables of their own, and prefixes are found with them."""
    model, speculation = drafters[method]
    own = POLICIES[policy]
    if blocks < 4096:
        own = {**own, "kv_admission": "prompt"}
    _check(engines, model, own, blocks, {"method": method, **speculation})


@pytest.mark.parametrize("policy", ["snapkv", "xkv"])
def test_tokens_of_preempted_requests(engines: EnginePool, tiny_model: Models, policy: str) -> None:
    own = {**POLICIES[policy], "kv_admission": "prompt"}  # nobody waits for blocks
    _check(engines, tiny_model("llama-mha"), own, blocks=130)


def test_windows_beside_it(engines: EnginePool, tmp_path: Path) -> None:
    """Layers that slide go back over the places of rejected drafts, too."""
    _check(engines, make_family("gemma3", tmp_path / "gemma3"), POLICIES["snapkv"])


@pytest.mark.slow
def test_drafting_leaves_the_threads_alone(engines, tiny_model, monkeypatch) -> None:
    """numba sets the number of OpenMP threads of its process when its own start."""
    engines.close()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    child = subprocess.run(
        [sys.executable, "-c", THREADS, str(tiny_model("llama-mha"))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.split()[-1] == "1", "a process of one thread has more"


def test_nobody_is_preempted_for_drafts(tiny: Start) -> None:
    """Admission counts places for drafts, and that answers grow faster with them."""
    settings = {**SETTINGS, **POLICIES["snapkv"], "speculative_config": SPECULATION}
    settings |= {"num_gpu_blocks_override": 130, "max_model_len": 512}
    engine = tiny("llama-mha", **settings)
    with count_preemptions(engine) as preemptions:
        outcomes = engine.run(_waves(short_of_blocks=True)[0])
    assert all(len(outcome.token_ids) == 100 for outcome in outcomes)
    assert preemptions["all"] == 0
    assert engine.scheduler.pyramid.chunks.admission.pace.mean > 1
