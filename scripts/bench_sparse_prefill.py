#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""First tokens with `sparse-prefill` against `full`, in one engine, in turns, on real text.

    scripts/bench_sparse_prefill.py --model smollm2 --lengths 2048,4096,8000

Prompts are the beginnings of modules of Python's standard library, whose text differs a little with
the version of Python. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
import time
from typing import Any

from own_engines import stay_in_process

POLICY, WHOLE = "sparse-prefill", "full"


def first_token(llm: Any, tokens: list[int], policy: str) -> tuple[float, dict[str, Any]]:
    """Return the seconds until a prompt's first token, and the request's report."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_policy": policy})
    begin = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    return time.perf_counter() - begin, output.kv_transfer_params


def compare(llm: Any, tokens: list[int], repetitions: int) -> str:
    """Return a row's figures; the first turn of each is not counted."""
    seconds: dict[str, list[float]] = {POLICY: [], WHOLE: []}
    for _ in range(repetitions + 1):
        for policy, times in seconds.items():
            taken, report = first_token(llm, tokens, policy)
            times.append(taken)
            if policy == POLICY:
                read = report["prefill_tiles_read"] / report["prefill_tiles_visible"]
    sparse, whole = (times[1:] for times in seconds.values())
    ratios = [a / b for a, b in zip(sparse, whole, strict=True)]
    return (
        f"{statistics.median(whole):.2f} s | {statistics.median(sparse):.2f} s | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {read:.2f} |"
    )


def main() -> None:
    """Print one row a module and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder; `make smollm2` prints one")
    parser.add_argument("--lengths", default="2048,4096,8000", help="tokens")
    parser.add_argument("--modules", default="argparse,typing", help="of the standard library")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    stay_in_process(args.threads)
    from vllm_pyramid import LLM

    llm = LLM(
        args.model,
        kv_policy=POLICY,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=max(lengths) + 64,
        max_num_batched_tokens=max(8192, max(lengths)),
        max_num_seqs=1,
    )
    tokenizer = llm.get_tokenizer()
    print(f"| prompt | tokens | `{WHOLE}` | `{POLICY}` | ratio | tiles read |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in args.modules.split(","):
        tokens = tokenizer.encode(inspect.getsource(importlib.import_module(name)))
        for length in lengths:
            if len(tokens) >= length:
                row = compare(llm, tokens[:length], args.repetitions)
                print(f"| `{name}` | {length:,} | {row}", flush=True)


if __name__ == "__main__":
    main()
