# SPDX-License-Identifier: Apache-2.0
"""Record what engines answer, so that a change of the code that must change nothing can be checked.

    python -m tests.plumbing.answers before.json             record, with the code as it is
    python -m tests.plumbing.answers after.json before.json  record again and compare

Each case is an engine in this process over a tiny model: every preset, and features of the engine
with a few of them. Recorded are tokens, log probabilities of the first, reports, cached tokens and
a hash of the kept positions. Requests' ids are not: they are random.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.conversations import talk
from tests.engine.families import make_family
from tests.engine.models import write_model
from tests.engine.support import Engine, Job, Outcome, greedy, random_prompts, start_engine
from vllm_pyramid.policy.presets import load_policy, policy_names

_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 200,
    "max_num_seqs": 8,
    "max_model_len": 1024,
}
# Of 4 layers with 2 KV heads.
_MASK: dict[str, Any] = {
    "mask": [[0.9, 0.1], [0.2, 0.8], [0.7, 0.6], [0.3, 0.4]],
    "heads.sinks": 16,
    "heads.recent": 40,
}
# Feature: the policy, the engine's other settings, the model.
_FEATURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "small pool": ("pyramidkv", {"num_gpu_blocks_override": 330}, "qwen3"),
    "small pool, auto": ("auto", {"num_gpu_blocks_override": 330}, "qwen3"),
    "host": ("auto", {"num_gpu_blocks_override": 330, "kv_host_cache": 0.05}, "qwen3"),
    "async": ("pyramidkv", {"async_scheduling": True}, "qwen3"),
    "compiled": ("auto", {"enforce_eager": False}, "qwen3"),
    "drafts": (
        "snapkv",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        "qwen3",
    ),
    "fp8": ("snapkv", {"kv_cache_dtype": "fp8"}, "qwen3"),
    "hybrid": ("snapkv", {}, "gemma3"),
    "hybrid, small pool": ("auto", {"num_gpu_blocks_override": 400}, "gemma3"),
    "chunks of 64": ("snapkv-chunked", {"kv_policy_args": {"chunk.tokens": 64}}, "qwen3"),
    "no prefixes": ("pyramidkv", {"enable_prefix_caching": False}, "qwen3"),
    "one KV head": ("pyramidkv", {}, "llama-mqa"),
    "heads that stream": ("duoattention", {"kv_policy_args": _MASK}, "qwen3"),
    "heads that stream, in chunks": (
        "duoattention",
        {"kv_policy_args": {**_MASK, "chunk.tokens": 192}},
        "qwen3",
    ),
    "heads that stream, small pool": (
        "duoattention",
        {"kv_policy_args": _MASK, "num_gpu_blocks_override": 330},
        "qwen3",
    ),
}
_TURNS = ("auto", "pyramidkv", "keydiff")
_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor ranks": ("pyramidkv", {"tensor_parallel_size": 2}),
    "stages": ("pyramidkv", {"pipeline_parallel_size": 2}),
    "stages, heads that stream": (
        "duoattention",
        {"pipeline_parallel_size": 2, "kv_policy_args": _MASK},
    ),
}


def _model(name: str, folder: Path) -> str:
    path = folder / name
    if not path.exists():
        (make_family if name == "gemma3" else write_model)(name, path)
    return str(path)


def _settings(policy: str, **own: Any) -> dict[str, Any]:
    has_budget = policy != "none" and load_policy(policy).has_budget
    return {**_COMMON, "kv_policy": policy, **({"kv_budget": "25%"} if has_budget else {}), **own}


def _kept(folder: Path, outcome: Outcome) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.glob(f"{outcome.request_id}*.npz")):
        with np.load(path) as file:
            for name in sorted(name for name in file if name.startswith("kept_")):
                found.update(file[name].tobytes())
    return found.hexdigest()[:16]


def _rows(outcomes: Sequence[Outcome], folder: Path | None = None) -> list[dict[str, Any]]:
    rows = []
    for outcome in outcomes:
        if outcome.output is None:
            rows.append({"aborted": True})
            continue
        (one,) = outcome.output.outputs
        row: dict[str, Any] = {
            "tokens": list(one.token_ids),
            "reason": one.finish_reason,
            "cached": outcome.output.num_cached_tokens,
            "report": outcome.output.kv_transfer_params,
        }
        if one.logprobs:
            first = sorted(entry.logprob for entry in one.logprobs[0].values())
            row["first"] = [round(value, 3) for value in first]
        if folder is not None:
            row["kept"] = _kept(folder, outcome)
        rows.append(row)
    return rows


def _conversation() -> list[list[Job]]:
    """Return waves of requests that share prefixes in all the ways there are."""
    answer = partial(greedy, logprobs=2)
    system, first, second, tail, short = random_prompts([300, 200, 150, 40, 90])
    own, whole = {"kv_budget": 96}, {"kv_policy": "full"}
    turn = Job([*system, *first], answer(24))
    return [
        [turn, Job([*system, *second], answer(10), arrival=1)],
        # The same prompt again, with another budget, and whole; then a longer and a shorter one.
        [Job(turn.prompt, answer(12)), Job(turn.prompt, answer(6, **own))],
        [Job(turn.prompt, answer(20, **whole)), Job([*turn.prompt, *tail], answer(8))],
        [Job([*system, *tail], answer(8, **whole)), Job(system[:200], answer(8))],
        # Two at once that compute the same, and one that is given up in the middle.
        [
            Job([*tail, *second], answer(6)),
            Job([*tail, *second], answer(6)),
            Job([*tail, *second, *first], answer(30), abort_after=3),
        ],
        [Job([*tail, *second, *first], answer(8)), Job([*tail, *second], answer(3, **whole))],
        # In one step: the second one reads what the first one has just written.
        [Job(short, answer(6)), Job(short, answer(6))],
    ]


def _waves(engine: Engine, evicts: bool) -> list[Outcome]:
    """Requests that share prefixes, some with settings of their own, and a batch."""
    outcomes = []
    for wave in _conversation():
        jobs = [Job(job.prompt, job.params, job.arrival, job.abort_after) for job in wave]
        for job in jobs:
            if not evicts:
                job.params.extra_args = None
        outcomes += engine.run(jobs)
    lengths = [700, 20, 333, 512, 90, 640]
    batch = [Job(p, greedy(16, logprobs=2)) for p in random_prompts(lengths, seed=3)]
    return outcomes + engine.run(batch)


def _in_process(name: str, policy: str, settings: dict[str, Any], model: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(settings)
        trace = None
        if policy not in ("full", "none") and name.startswith("preset"):
            settings["kv_trace"], trace = folder, Path(folder)
        try:
            engine = start_engine(model, **settings)
        except Exception as error:
            return f"refused: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        try:
            if name.startswith("turns"):
                outcomes = talk(engine, random_prompts([300, 150, 60, 90]))
                outcomes += talk(engine, random_prompts([400, 200], seed=7))
            else:
                outcomes = _waves(engine, "kv_budget" in settings)
            rows = _rows(outcomes, trace)
            if policy != "none":  # of stock vLLM there are no accounts
                engine.check_whole()
            return rows
        except Exception as error:
            traceback.print_exc()
            return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        finally:
            engine.shutdown()


def _over_ranks(settings: dict[str, Any], model: str) -> Any:
    from vllm_pyramid import LLM

    own = {"enforce_eager": True, "skip_tokenizer_init": True, "seed": 0, "kv_min_tokens": 0}
    llm = LLM(model, **own, **settings, kv_cache_memory_bytes=128 << 20)
    prompts = [{"prompt_token_ids": tokens} for tokens in random_prompts([700, 20, 333, 512])]
    found = []
    for _ in range(2):  # the second time they are cached
        outputs = llm.generate(prompts, greedy(16), use_tqdm=False)
        found += [
            [list(one.outputs[0].token_ids), one.num_cached_tokens, one.kv_transfer_params]
            for one in outputs
        ]
    llm.llm_engine.engine_core.shutdown()
    return found


def record(only: str = "") -> dict[str, Any]:
    """Run all cases whose names contain `only`; return what they answered."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        cases = {
            f"preset {name}": (name, _settings(name), "qwen3") for name in [*policy_names(), "none"]
        }
        for name, (policy, own, model) in _FEATURES.items():
            cases[name] = policy, _settings(policy, **own), model
        for policy in _TURNS:
            cases[f"turns {policy}"] = policy, _settings(policy, kv_host_cache=0.05), "qwen3"
        for name, (policy, settings, model) in cases.items():
            if only in name:
                found[name] = _in_process(name, policy, settings, _model(model, models))
                print(name, str(found[name])[:70], file=sys.stderr, flush=True)
        for name, (policy, own) in _RANKS.items():
            if only in name:
                found[name] = _over_ranks(_settings(policy, **own), _model("qwen3", models))
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the cases that are in both and differ."""
    return [name for name in before if name in after and before[name] != after[name]]


if __name__ == "__main__":
    target, *base = sys.argv[1:]
    answers = json.loads(json.dumps(record()))
    Path(target).write_text(json.dumps(answers, indent=1))
    if base:
        recorded = json.loads(Path(base[0]).read_text())
        changed = compare(recorded, answers)
        gone = sorted(recorded.keys() - answers.keys())
        print(f"{len(answers)} cases, {len(changed)} differ: {changed}; no longer there: {gone}")
        sys.exit(bool(changed))
