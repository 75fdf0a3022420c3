#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Drafts by n-grams with and without eviction: how many are right, and what they are worth.

Four engines in turns on the same prompts: stock vLLM and a policy, each with drafts and without.
The prompts are pieces of this project's documents, which the model goes on with, greedily.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from own_engines import start_engines, stay_in_process

DOCS = Path(__file__).resolve().parents[1] / "docs"


def engine(pipe: Connection, settings: dict[str, Any], threads: str) -> None:
    """Run prompts when told to; in a process of its own."""
    stay_in_process(threads, stock="additional_config" not in settings)
    from vllm import LLM, SamplingParams

    llm = LLM(**settings)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pipe.send("ready")
    while task := pipe.recv():
        prompts, output_len = task
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        steps, drafted, tokens, seconds = 0, 0, 0, 0.0
        while llm.llm_engine.has_unfinished_requests():
            before = {r.request_id: r.num_output_tokens for r in scheduler.running}
            decodes = len(before) == len(prompts) and all(before.values())
            drafts = sum(len(r.spec_token_ids) for r in scheduler.running)
            start = time.perf_counter()
            outputs = llm.llm_engine.step()
            took = time.perf_counter() - start
            if decodes:
                now = {out.request_id: len(out.outputs[0].token_ids) for out in outputs}
                steps, drafted = steps + len(before), drafted + drafts
                tokens += sum(now.values()) - sum(before.values())
                seconds += took
        pipe.send((tokens / steps, drafted / steps, tokens / seconds))


def main() -> None:
    """Print a line an engine and repetition, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--policy", default="pyramidkv")
    parser.add_argument("--budget", default="12%")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=1800)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    from vllm_pyramid.tools.demo import model_path

    model = args.model or str(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    ids = tokenizer(text, verbose=False).input_ids
    common = {
        "model": model,
        "dtype": "bfloat16",
        "max_model_len": args.prompt_len + args.output_len,
        "max_num_seqs": args.batch,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 512 << 20,
    }
    drafts = {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": args.drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    }
    policy = {"additional_config": {"kv_policy": args.policy, "kv_budget": args.budget}}
    engines: dict[str, dict[str, Any]] = {
        "stock": {},
        "stock, drafts": drafts,
        args.policy: policy,
        f"{args.policy}, drafts": {**drafts, **policy},
    }
    pipes = start_engines(
        engine, {name: ({**common, **own}, args.threads) for name, own in engines.items()}
    )
    source = random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in pipes}
    for repetition in range(args.repetitions + 1):  # the first one warms up
        starts = [source.randrange(len(ids) - args.prompt_len) for _ in range(args.batch)]
        prompts = [ids[start : start + args.prompt_len] for start in starts]
        for name, pipe in list(pipes.items())[:: 1 if repetition % 2 else -1]:
            pipe.send((prompts, args.output_len))
            pace, drafted, speed = pipe.recv()
            if repetition:
                speeds[name].append(speed)
                print(
                    f"{name}: {pace:.2f} tokens a step and request with {drafted:.2f} drafts, "
                    f"{speed:.1f} tokens a second",
                    flush=True,
                )
    for pipe in pipes.values():
        pipe.send(None)
    for name, of_name in speeds.items():
        ratios = [own / stock for own, stock in zip(of_name, speeds["stock"], strict=True)]
        print(
            f"{name}: {statistics.median(ratios):.2f} times stock "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
