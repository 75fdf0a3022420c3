# SPDX-License-Identifier: Apache-2.0
"""Serve bursts of prompts from a pool that holds few of them whole: `python -m lab.bursts`.

    requests of a burst   load x CAPACITY, all at once; the next burst comes when the last has ended
    the pool              CAPACITY requests with prompt and answer, whole

Arrival times are made. Prompts are slices of this repository's pages. Each variant
runs at each load in its own process, one after another. `stock` is vLLM without
the plugin, `full` the plugin without eviction; `always` and `pressure` evict to the same budget.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

VARIANTS = ("stock", "full", "always", "pressure")
CAPACITY = 4  # requests that the pool holds whole
STOCK_BLOCK = 32  # tokens; of vLLM's attention on CPUs a block is a multiple of it
ROOT = Path(__file__).resolve().parents[2]


def settings(variant: str, policy: str, budget: str) -> dict[str, Any]:
    """Return the engine's settings of a variant."""
    if variant == "stock":
        return {"kv_policy": "none", "block_size": STOCK_BLOCK}
    if variant == "full":
        return {"kv_policy": "full"}
    own = {"kv_policy": policy, "kv_budget": budget, "kv_min_tokens": 0}
    return own | ({"kv_evict": "pressure"} if variant == "pressure" else {})


def prompts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Return slices of this repository's pages, which begin at different places."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    tokens = tokenizer.encode("\n".join(page.read_text() for page in pages))
    step = (len(tokens) - length) // max(count, 1)
    return [tokens[index * step : index * step + length] for index in range(count)]


def serve(args: argparse.Namespace, variant: str, load: float) -> dict[str, Any]:
    """Serve all bursts with one engine in this process; return the measurements."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams

    from vllm_pyramid import LLM
    from vllm_pyramid.tools.demo import model_path

    block, layers = (STOCK_BLOCK, 1) if variant == "stock" else (16, args.layers)
    whole = -(-(args.prompt + args.answer) // block)
    llm = LLM(
        args.model or str(model_path()),
        dtype=args.dtype,
        max_model_len=args.prompt + args.answer,
        max_num_batched_tokens=args.step_tokens,
        max_num_seqs=64,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        num_gpu_blocks_override=CAPACITY * whole * layers + 1,
        **settings(variant, args.policy, args.budget),
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, 0

    def counted(*call: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*call, **kwargs)

    scheduler._preempt_request = counted
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    count = max(round(load * CAPACITY), 1)
    texts = prompts(llm.get_tokenizer(), count, args.prompt)
    first: list[float] = []
    answers: dict[str, list[int]] = {}
    reports: list[dict[str, Any]] = []
    steps, began = 0, time.monotonic()
    for burst in range(args.bursts):
        came, waiting = time.monotonic(), set()
        for index, tokens in enumerate(texts):
            name = f"{burst}-{index}"
            waiting.add(name)
            engine.add_request(name, {"prompt_token_ids": tokens}, params)
        while engine.has_unfinished_requests():
            steps += 1
            for output in engine.step():
                if output.request_id in waiting:
                    waiting.remove(output.request_id)
                    first.append(time.monotonic() - came)
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
                    reports.append(output.kv_transfer_params or {})
    seconds = time.monotonic() - began
    return {
        "variant": variant,
        "load": load,
        "requests": len(answers),
        "seconds": round(seconds, 2),
        "steps": steps,
        "tokens_per_s": round(len(answers) * args.answer / seconds, 1),
        "first_median_s": round(median(first), 3),
        "first_p95_s": round(sorted(first)[int(0.95 * (len(first) - 1))], 3),
        "preemptions": preempted,
        "evicted": sum(bool(report.get("evicted_tokens")) for report in reports),
        "lost_share": round(mean(report.get("lost_share", 0.0) for report in reports), 4),
        "answers": answers,
    }


def agreement(answers: dict[str, list[int]], exact: dict[str, list[int]]) -> float:
    """Return the mean share of an answer's tokens before the first that differs."""
    shares = []
    for name, tokens in answers.items():
        pairs = list(zip(tokens, exact[name], strict=True))
        same = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        shares.append(same / len(pairs))
    return mean(shares)


def run_all(args: argparse.Namespace, own: Sequence[str]) -> list[dict[str, Any]]:
    """Run every variant at every load, in turns, each in a process of its own."""
    rows: list[dict[str, Any]] = []
    for load in args.loads:
        of_load: dict[str, dict[str, Any]] = {}
        for variant in args.variants:
            command = [sys.executable, "-m", "lab.bursts", *own, "--one", variant, str(load)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{variant} at {load}: {done.stderr[-2000:]}")
            of_load[variant] = json.loads(done.stdout.splitlines()[-1])
        exact = of_load["full" if "full" in of_load else "stock"]["answers"]
        for row in of_load.values():
            row["agreement"] = round(agreement(row.pop("answers"), exact), 4)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m lab.bursts", description=__doc__)
    parser.add_argument("--model", help="folder of a model; default: the built-in one")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model that evict")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--budget", default="12%")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step, at most")
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1, 2, 4, 8])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "LOAD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(serve(args, args.one[0], float(args.one[1]))))
    else:
        run_all(args, sys.argv[1:])


if __name__ == "__main__":
    main()
