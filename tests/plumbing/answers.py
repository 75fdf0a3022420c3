# SPDX-License-Identifier: Apache-2.0
"""Record what engines answer, so that a change of the code that must change nothing can be checked.

    python -m tests.plumbing.answers before.json             record, with the code as it is
    python -m tests.plumbing.answers after.json before.json  record again and compare

Each case is an engine in this process: every row of the tests' matrix, and more features. Recorded
are tokens, log probabilities of the first, reports, cached tokens and a hash of the kept positions.
Requests' ids are not: they are random.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine.battery_prefixes import shared
from tests.engine.bench import Bench
from tests.engine.conversations import talk, traces
from tests.engine.families import make_family
from tests.engine.matrix import BESIDE, CASES, ENGINE, MODEL, Case, of_heads
from tests.engine.models import SHAPES, write_model
from tests.engine.support import Outcome, greedy, random_prompts, start_engine

_SMALL = {"num_gpu_blocks_override": 330}
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
_STREAMS = CASES["duoattention"].args
_MORE: dict[str, Case] = {
    "pyramidkv, small pool": Case("25%", policy="pyramidkv", settings=_SMALL),
    "auto, host": Case("25%", policy="auto", settings={**_SMALL, "kv_host_cache": 0.05}),
    "snapkv, drafts": Case("25%", policy="snapkv", settings={"speculative_config": _DRAFTS}),
    "snapkv, fp8": Case("25%", policy="snapkv", settings={"kv_cache_dtype": "fp8"}),
    "pyramidkv, no prefixes": Case(
        "25%", policy="pyramidkv", settings={"enable_prefix_caching": False}
    ),
    "duoattention, small pool": of_heads(args=_STREAMS, policy="duoattention", settings=_SMALL),
}
_RANKS: dict[str, dict[str, Any]] = {
    "tensor ranks": {"kv_policy": "pyramidkv", "tensor_parallel_size": 2},
    "stages": {"kv_policy": "pyramidkv", "pipeline_parallel_size": 2},
    "stages, heads that stream": {
        "kv_policy": "duoattention",
        "kv_policy_args": _STREAMS,
        "pipeline_parallel_size": 2,
    },
}


def _model(name: str, folder: Path) -> Path:
    path = folder / name
    if not path.exists():
        (write_model if name in SHAPES else make_family)(name, path)
    return path


def _rows(outcomes: Sequence[Outcome], folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "tokens": one.token_ids,
            "cached": one.cached,
            "report": one.output.kv_transfer_params,
            "first": sorted(round(value, 3) for value in one.logprobs[0].values()),
            "kept": hashlib.sha256(b"".join(traces(folder, [one])[0])).hexdigest()[:16],
        }
        for one in outcomes
    ]


def _answers(name: str, case: Case, path: Path) -> Any:
    """What requests answer one by one, some that share prefixes, and a conversation."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        try:
            engine = start_engine(str(path), **case.engine(name, folder))
        except Exception as error:
            return f"refused: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        try:
            bench = Bench(engine, case, folder, path)
            outcomes = [*bench.alone, *engine.run(bench.jobs()), *shared(bench, "shared")]
            if case.resumes:
                outcomes += talk(engine, random_prompts([300, 150, 60, 90]))
            engine.check_whole()
            return _rows(outcomes, folder)
        except Exception as error:
            traceback.print_exc()
            return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        finally:
            engine.shutdown()


def _over_ranks(settings: dict[str, Any], model: str) -> Any:
    from vllm_pyramid import LLM

    own = {"enforce_eager": True, "skip_tokenizer_init": True, "seed": 0, "kv_min_tokens": 0}
    llm = LLM(model, **ENGINE, **own, **settings, kv_cache_memory_bytes=128 << 20)
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
        for name, case in {**CASES, **BESIDE, **_MORE}.items():
            if only in name:
                found[name] = _answers(name, case, _model(case.model, models))
                print(name, str(found[name])[:70], file=sys.stderr, flush=True)
        for name, settings in _RANKS.items():
            if only in name:
                found[name] = _over_ranks(settings, str(_model(MODEL, models)))
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
