# SPDX-License-Identifier: Apache-2.0
"""The thinning stages of scripts/gpu_check.py: `pyramidinfer` on one backend and runner.

    python scripts/gpu_thinning.py --backend TRITON_ATTN --dtype float32 --mode graphs --out FILE

Where nothing is to be thinned, answers agree with those of `full`. Where something is, lengths are
those of the formula, blocks go back, and in float32 survivors, tokens and log probabilities are
those of the same method written with Transformers on the host (tests/engine/thinned_paper.py),
which follows where scores are nearly equal. Writes a JSON object; what must hold and does not
raises.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

# The folder of this file is where Python looks first.
from gpu_agreement import LOGPROBS, TOLERANCE, Agreement, agreement
from gpu_engines import BESIDE_OTHERS, LLAMA, RUNNERS, require

# Prompts of one to four pieces, the last ones shorter than the floor, too.
LENGTHS = [600, 512, 401, 256, 97, 30]
ARGS: dict[str, Any] = {
    "decay_ratio": 0.5,
    "interval": 2,
    "min_context": 24,
    "recent_ratio": 0.25,
    "piece_tokens": 192,
}
TOKENS = 24
# Scores whose order may turn round, relative to their size: on a GPU products of float32 are
# rounded to 10 bits where nobody asks for more.
NEAR_TIE = 0.02


def run_thinning(backend: str | None, runner: str, dtype: str, mode: str) -> dict[str, Any]:
    """`full`, `pyramidinfer` that keeps all, and one that does not, one after the other.

    Args:
        backend: of attention; None leaves the choice to vLLM.
    """
    from tests.engine import models
    from tests.engine.support import Engine, EnginePool, Job, greedy, random_prompts

    models.SHAPES["llama-gpu"] = LLAMA
    outcomes: dict[str, list[Any]] = {}
    held: dict[str, int] = {}
    result: dict[str, Any] = {"dtype": dtype}
    pool = EnginePool()
    with tempfile.TemporaryDirectory() as folder:
        model, trace = models.write_model("llama-gpu", Path(folder)), Path(folder) / "trace"
        settings: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": 1024,
            "max_num_batched_tokens": 224,
            "max_num_seqs": 8,
            "enforce_eager": mode == "eager",
            **BESIDE_OTHERS,
        }
        if backend is not None:
            settings["attention_backend"] = backend
        policies: dict[str, dict[str, Any]] = {
            "full": {"kv_policy": "full"},
            "keeps-all": {"kv_policy": "pyramidinfer", "kv_policy_args": {"decay_ratio": 1.0}},
            "thins": {"kv_policy": "pyramidinfer", "kv_policy_args": ARGS, "kv_trace": str(trace)},
        }
        policies["keeps-all"]["kv_policy_args"]["piece_tokens"] = ARGS["piece_tokens"]
        for name, policy in policies.items():
            engine = pool.get(model, **settings, **policy)

            def record(engine: Engine, name: str = name) -> None:
                running = engine.scheduler.running
                if len(running) == len(LENGTHS) and all(
                    request.num_computed_tokens > request.num_prompt_tokens for request in running
                ):
                    held[name] = engine.usable_blocks - engine.pool.get_num_free_blocks()

            jobs = [
                Job(prompt, greedy(TOKENS, logprobs=LOGPROBS)) for prompt in random_prompts(LENGTHS)
            ]
            outcomes[name] = engine.run(jobs, record)
            kinds = type(engine.core.model_executor.driver_worker.worker.model_runner).__mro__
            right = any(kind.__module__ == RUNNERS[runner] for kind in kinds)
            require(right, f"{name}: the runner is {kinds[0]}, not one of {RUNNERS[runner]}")
            graphs = str(engine.client.vllm_config.compilation_config.cudagraph_mode)
            result["cudagraph_mode"] = graphs
            require(mode == "eager" or not graphs.endswith("NONE"), "CUDA graphs are off")
            engine.check_whole()
        pool.close()
        answers = {
            name: [(outcome.token_ids, outcome.logprobs) for outcome in found]
            for name, found in outcomes.items()
        }
        same = agreement(answers["full"], answers["keeps-all"], TOLERANCE[dtype])
        result["keeps_all_and_full"] = same.as_data()
        require(
            not agree(answers["full"], answers["thins"]),
            "answers of prompts that were thinned agree with those of whole ones: the tolerance "
            "is too large to see anything",
        )
        for outcome in outcomes["keeps-all"]:
            require(outcome.report["evicted_tokens"] == 0, f"it thinned: {outcome.report}")
        result |= check_lengths(outcomes["thins"], engine.block_size, engine.num_layers)
        result["blocks_in_decode"] = held
        require(held["thins"] < held["full"], f"thinning freed no blocks: {held}")
        if dtype == "float32":
            found = compare_with_formula(model, outcomes["thins"], trace, engine.block_size)
            result["thinned_and_formula"] = found
    return result


def agree(ones: list[Any], others: list[Any]) -> bool:
    """Whether answers agree up to the larger of the tolerances."""
    try:
        agreement(ones, others, TOLERANCE["bfloat16"])
    except RuntimeError:
        return False
    return True


def check_lengths(outcomes: list[Any], block_size: int, layers: int) -> dict[str, Any]:
    """Every layer holds what the plan says, and the upper ones not all of a long prompt."""
    from vllm_pyramid.policy import load_policy

    policy, kept = load_policy("pyramidinfer", None, ARGS), []
    for outcome in outcomes:
        plan: Any = policy.plan(len(outcome.job.prompt), layers, block_size)
        kept.append(outcome.report["kept_tokens"])
        require(
            kept[-1] == plan.end.held.tolist(), f"{kept[-1]} tokens, planned are {plan.end.held}"
        )
    require(min(kept[0]) < LENGTHS[0], f"the longest prompt was not thinned: {kept[0]}")
    return {"kept_tokens_per_layer": kept}


def compare_with_formula(
    model: Path, outcomes: list[Any], trace: Path, block_size: int
) -> dict[str, Any]:
    """Against the method in Transformers and float32; what survived there is what survived here."""
    import torch

    from tests.engine.thinned_paper import Settings, ThinnedModel

    settings = Settings(**ARGS, unit=block_size)
    paper, ties, found = ThinnedModel(str(model)), 0, Agreement()
    for outcome in outcomes:
        prompt, layers = outcome.job.prompt, len(paper.layers)
        theirs = None
        path = trace / f"{outcome.request_id}.npz"
        if path.exists():
            with np.load(path) as file:
                theirs = [torch.from_numpy(file[f"kept_{layer}"][0]) for layer in range(layers)]
        require(
            theirs is not None or outcome.report["evicted_tokens"] == 0,
            f"no trace of a prompt of {len(prompt)} tokens that was thinned",
        )
        run = paper.generate(prompt, TOKENS, settings, theirs, NEAR_TIE)
        ties += run.ties
        # The formula's answer has each token's own log probability alone.
        for place, (token, mine, likely) in enumerate(
            zip(run.tokens, run.logprobs, outcome.logprobs, strict=True)
        ):
            require(token in likely, f"{token} at place {place} is not likely: {likely}")
            found.compared += 1
            found.furthest = max(found.furthest, abs(mine - likely[token]))
            require(
                found.furthest <= TOLERANCE["float32"],
                f"a prompt of {len(prompt)} tokens, place {place}: {mine}, and {likely[token]}",
            )
            if outcome.token_ids[place] != token:
                found.parted += 1
                break
        found.tokens += TOKENS
    return {**found.as_data(), "survivors_by_near_ties": ties}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("FLASH_ATTN", "TRITON_ATTN"))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TOLERANCE))
    parser.add_argument("--mode", default="graphs", choices=("eager", "graphs"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runner = "v1" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "v2"
    result = run_thinning(options.backend, runner, options.dtype, options.mode)
    options.out.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
