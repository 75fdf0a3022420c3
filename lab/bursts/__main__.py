# SPDX-License-Identifier: Apache-2.0
"""Serve load that rises and falls from a pool that holds few prompts whole.

    python -m lab.bursts                 bursts of load x CAPACITY requests, one after another
    python -m lab.bursts --requests N    N requests at load x the rate that stock vLLM serves with
                                         a full pool: RATES times that, CAPACITY requests each
    the pool                             CAPACITY requests with prompt and answer, whole

All requests of a burst come at once; others arrive as a Poisson process of `--seed`.
Prompts are slices of this repository's pages. Each variant runs at each load in its own process,
one after another. `stock` is vLLM without the plugin, `full` the plugin without eviction; `always`
and `pressure` evict to the same budget.

With `--requests` a row says how many requests kept both limits (`good`), in a second as well:
`--first-limit` seconds for the first token and `--token-limit` for each further one, which are
SLACK times what stock vLLM takes for a request that is alone, if they are not given. `lost_nats` is
what a token loses with the whole cache, a mean over all answers without their last tokens: of
answers that were evicted, by a replay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

VARIANTS = ("stock", "full", "always", "pressure")
CAPACITY = 4  # requests that the pool holds whole
RATES = (1, 2, 1, 0.5)  # in turns, each for CAPACITY requests; of a mean that the load says
SLACK = (5.0, 3.0)  # of the first token and of each further one
UNLOADED = 0.0  # the load of requests that come one after another, each when the last has ended
STOCK_BLOCK = 32  # tokens; of vLLM's attention on CPUs a block is a multiple of it
ROOT = Path(__file__).resolve().parents[2]


def settings(
    variant: str, policy: str, budget: str, headroom: float | None = None
) -> dict[str, Any]:
    """Return the engine's settings of a variant."""
    if variant == "stock":
        return {"kv_policy": "none", "block_size": STOCK_BLOCK}
    if variant == "full":
        return {"kv_policy": "full"}
    own = {"kv_policy": policy, "kv_budget": budget, "kv_min_tokens": 0}
    if variant == "always":
        return own
    schedule = {"kind": "pressure"} | ({} if headroom is None else {"headroom": headroom})
    return own | {"kv_evict": "pressure", "kv_policy_args": {"schedule": schedule}}


def prompts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Return slices of this repository's pages, which begin at different places."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    tokens = tokenizer.encode("\n".join(page.read_text() for page in pages))
    step = (len(tokens) - length) // max(count, 1)
    return [tokens[index * step : index * step + length] for index in range(count)]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Make the seconds at which requests come, `rate` a second in the mean."""
    drawn, rate = random.Random(seed), rate * mean(1 / factor for factor in RATES)
    rates = [rate * RATES[index // CAPACITY % len(RATES)] for index in range(count)]
    return list(accumulate(map(drawn.expovariate, rates)))


def preemptions(scheduler: Any) -> list[str]:
    """Return a list to which the scheduler adds each request that it preempts from now on."""
    preempt, preempted = scheduler._preempt_request, list[str]()

    def noted(request: Any, *call: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *call, **kwargs)

    scheduler._preempt_request = noted
    return preempted


def serve(args: argparse.Namespace, variant: str, load: float) -> dict[str, Any]:
    """Serve all requests with one engine in this process; return the measurements."""
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
        **settings(variant, args.policy, args.budget, args.headroom),
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempted = preemptions(scheduler)
    params = SamplingParams(
        temperature=0,
        max_tokens=args.answer,
        ignore_eos=True,
        logprobs=0 if args.requests else None,
    )
    if load == UNLOADED:
        waves = [[0.0]] * CAPACITY + [[0.0] * CAPACITY]
    elif args.requests:
        waves = [arrivals(args.requests, load * args.rate, args.seed)]
    else:
        waves = [[0.0] * max(round(load * CAPACITY), 1)] * args.bursts
    texts = prompts(llm.get_tokenizer(), max(map(len, waves)), args.prompt)
    ends: dict[str, tuple[float, float]] = {}  # seconds to the first token, and for each further
    done: dict[str, Any] = {}
    steps, waves_began = 0, [time.monotonic()]
    for wave, times in enumerate(waves):
        began, first, coming = waves_began[-1], dict[str, float](), list(enumerate(times))
        while coming or engine.has_unfinished_requests():
            while coming and coming[0][1] <= time.monotonic() - began:
                index, _ = coming.pop(0)
                prompt: Any = {"prompt_token_ids": texts[index]}
                engine.add_request(f"{wave}-{index}", prompt, params)
            if not engine.has_unfinished_requests():
                time.sleep(max(coming[0][1] - (time.monotonic() - began), 0))
                continue
            steps += 1
            for output in engine.step():
                name, now = output.request_id, time.monotonic() - began
                first.setdefault(name, now)
                if output.finished:
                    done[name] = output
                    came = times[int(name.partition("-")[2])]
                    rest = (now - first[name]) / max(args.answer - 1, 1)
                    ends[name] = first[name] - came, rest
        waves_began.append(time.monotonic())
    seconds = waves_began[-1] - waves_began[0]
    if load == UNLOADED:
        alone = [ends[f"{wave}-0"] for wave in range(1, CAPACITY)]  # the first one warms up
        return {
            "first_s": median(first for first, _ in alone),
            "token_s": median(token for _, token in alone),
            "rate": CAPACITY / (waves_began[-1] - waves_began[-2]),
        }
    answers = {name: list(output.outputs[0].token_ids) for name, output in done.items()}
    reports = [output.kv_transfer_params or {} for output in done.values()]
    firsts, tokens = (sorted(column) for column in zip(*ends.values(), strict=True))
    lost = dict.fromkeys(done, 0.0)
    for name, output in done.items() if args.requests else ():
        report = output.kv_transfer_params or {}
        if report.get("evicted_tokens") or report.get("evicted_after"):
            lost[name] = lost_nats(llm, output)
    return {
        "variant": variant,
        "load": load,
        "requests": len(answers),
        "seconds": round(seconds, 2),
        "steps": steps,
        "tokens_per_s": round(len(answers) * args.answer / seconds, 1),
        "first_median_s": round(median(firsts), 3),
        "first_p95_s": round(firsts[int(0.95 * (len(firsts) - 1))], 3),
        "token_p95_s": round(tokens[int(0.95 * (len(tokens) - 1))], 4),
        "preemptions": len(preempted),
        "evicted": sum(bool(report.get("evicted_tokens")) for report in reports),
        "lost_share": round(mean(report.get("lost_share", 0.0) for report in reports), 4),
        "lost_nats": round(mean(lost.values()), 4),
        "answers": answers,
        "ends": ends,
    }


def lost_nats(llm: Any, output: Any) -> float:
    """Return the mean log probability that an answer's tokens lose with the whole cache."""
    from vllm import SamplingParams

    answer, length = output.outputs[0].token_ids[:-1], len(output.prompt_token_ids)
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, extra_args={"kv_policy": "full"}
    )
    prompt = {"prompt_token_ids": [*output.prompt_token_ids, *answer]}
    (replay,) = llm.generate([prompt], params, use_tqdm=False)
    whole = replay.prompt_logprobs[length:]
    own = output.outputs[0].logprobs
    return mean(
        before[token].logprob - then[token].logprob
        for token, before, then in zip(answer, own, whole, strict=False)
    )


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

    def run(variant: str, load: float, *more: str) -> Any:
        command = [sys.executable, "-m", "lab.bursts", *own, *more, "--one", variant, str(load)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{variant} at {load}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    rows: list[dict[str, Any]] = []
    more, limits = [], (0.0, 0.0)
    if args.requests:
        alone = run("stock", UNLOADED)
        more = ["--rate", str(args.rate or alone["rate"])]
        limits = (
            args.first_limit or SLACK[0] * alone["first_s"],
            args.token_limit or SLACK[1] * alone["token_s"],
        )
        print(json.dumps({"unloaded": alone, "limits": limits, "seed": args.seed}), flush=True)
    for load in args.loads:
        of_load = {variant: run(variant, load, *more) for variant in args.variants}
        exact = of_load["full" if "full" in of_load else args.variants[0]]["answers"]
        for row in of_load.values():
            row["agreement"] = round(agreement(row.pop("answers"), exact), 4)
            ends = row.pop("ends").values()
            if args.requests:
                good = sum(first <= limits[0] and token <= limits[1] for first, token in ends)
                row["good"] = round(good / row["requests"], 4)
                row["good_per_s"] = round(good / row["seconds"], 4)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.bursts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="folder of a model; default: the built-in one")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model that evict")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--budget", default="12%")
    parser.add_argument("--headroom", type=float, help="of `pressure`; default: its own")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step, at most")
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument("--requests", type=int, help="of a Poisson process; default: bursts")
    parser.add_argument("--seed", type=int, default=0, help="of the Poisson process")
    parser.add_argument("--rate", type=float, help="requests a second at load 1; default: measured")
    parser.add_argument("--first-limit", type=float, help="seconds; default: see above")
    parser.add_argument("--token-limit", type=float, help="seconds; default: see above")
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
