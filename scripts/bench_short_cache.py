#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does a cache that was evicted decode like one that was short from the start?

One engine, two kinds of requests in turn: a long prompt evicted to a budget, and a fresh prompt of
that many tokens that keeps everything. Prints the median time per output token of each and their
ratio; the target is a ratio within 5 % of 1. Absolute times depend on the machine, the ratio on us.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="local model folder; default: the built-in model")
    parser.add_argument("--kv-policy", default="pyramidkv")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Run both kinds in turn and compare."""
    args = parse_args()
    from rich.console import Console
    from rich.progress import track
    from vllm import SamplingParams

    from vllm_pyramid import LLM
    from vllm_pyramid.tools.demo import model_path

    llm = LLM(
        args.model or str(model_path()),
        kv_policy=args.kv_policy,
        kv_budget=args.budget,
        max_model_len=args.prompt_len + args.output_len,
        max_num_seqs=args.batch,
        max_num_batched_tokens=args.prompt_len,
        enforce_eager=True,
        disable_log_stats=False,
        gpu_memory_utilization=0.3,
        seed=0,
    )
    vocabulary = llm.get_tokenizer().vocab_size
    draw = random.Random(0)

    def time_per_token(prompt_len: int, extra_args: dict[str, object]) -> float:
        prompts = [
            {"prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(prompt_len)]}
            for _ in range(args.batch)
        ]
        params = SamplingParams(
            max_tokens=args.output_len, ignore_eos=True, temperature=0, extra_args=extra_args
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        first = max(output.metrics.first_token_ts for output in outputs)
        last = max(output.metrics.last_token_ts for output in outputs)
        return (last - first) / (args.output_len - 1)

    kinds = {
        "evicted": (args.prompt_len, {}),
        "fresh": (args.budget, {"kv_policy": "full"}),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:  # warm-up
        time_per_token(*kinds[kind])
    for _ in track(range(args.rounds), description="rounds"):
        for kind in kinds:
            times[kind].append(time_per_token(*kinds[kind]))
    ratios = [e / f for e, f in zip(times["evicted"], times["fresh"], strict=True)]
    result = {
        "policy": args.kv_policy,
        "prompt_len": args.prompt_len,
        "budget": args.budget,
        "batch": args.batch,
        "ms_per_token_evicted": 1e3 * statistics.median(times["evicted"]),
        "ms_per_token_fresh": 1e3 * statistics.median(times["fresh"]),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    Console().print_json(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
