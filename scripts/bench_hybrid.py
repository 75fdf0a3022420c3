#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A hybrid model beside stock vLLM at equal cache memory: requests at once, tokens a second.

Layers as in Gemma 3: five with a sliding window to one with full attention, random weights. Both
engines get the same bytes for the cache and the same prompts, in turns. The bound is what the
model's own shape allows: blocks that a request holds while it decodes, without and with eviction.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from own_engines import start_engines, stay_in_process

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, BLOCK = 8, 4, 64, 4096, 16


def engine(
    pipe: Connection, settings: dict[str, Any], policy: dict[str, Any], threads: str
) -> None:
    """Run the job again and again, when told to; in a process of its own."""
    stay_in_process(threads, stock=not policy)
    from vllm import LLM, SamplingParams

    llm = LLM(**settings, **({"additional_config": policy} if policy else {}))
    core = llm.llm_engine.engine_core.engine_core
    pipe.send("ready")
    while task := pipe.recv():
        prompts, output_len = task
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        at_once, tokens, seconds = 0, 0, 0.0
        while llm.llm_engine.has_unfinished_requests():
            start = time.perf_counter()
            llm.llm_engine.step()
            took = time.perf_counter() - start
            running = core.scheduler.running
            if running and all(r.num_computed_tokens > r.num_prompt_tokens for r in running):
                at_once = max(at_once, len(running))
                tokens, seconds = tokens + len(running), seconds + took
        whole = len(prompts) * output_len / (time.perf_counter() - begin)
        pipe.send((at_once, tokens / seconds, whole))


def main() -> None:
    """Print a line a repetition and engine, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="pyramidkv")
    parser.add_argument("--budget", default="12%")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--pool-prompts", type=float, default=4.0, help="that stock has room for")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    from transformers import Gemma3TextConfig

    from vllm_pyramid.policy import load_policy

    full = args.layers // 6
    length = args.prompt_len + args.output_len
    whole = -(-length // BLOCK) * full
    beside = (-(-args.window // BLOCK) + 1) * (args.layers - full)
    plan = load_policy(args.policy, args.budget).plan(args.prompt_len, full, BLOCK)
    kept = int(plan.estimate().end.blocks.sum()) + full * -(-args.output_len // BLOCK)
    # What vLLM reserves in windows while a prompt comes in chunks goes on top.
    chunk = 1024
    blocks = int(args.pool_prompts * (whole + beside)) + chunk // BLOCK * (args.layers - full)
    print(f"blocks a request: {whole} + {beside} in windows; evicted {kept} + {beside}")
    bound = (whole + beside) / (kept + beside)
    print(f"bound of the model's own shape: {bound:.2f} times as many requests", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Gemma3TextConfig(
            architectures=["Gemma3ForCausalLM"],
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=args.layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_SIZE,
            query_pre_attn_scalar=HEAD_SIZE,
            sliding_window=args.window,
            layer_types=[
                "sliding_attention" if (layer + 1) % 6 else "full_attention"
                for layer in range(args.layers)
            ],
            vocab_size=VOCABULARY,
            max_position_embeddings=length,
            dtype="bfloat16",
        ).save_pretrained(folder)
        settings = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": length,
            "max_num_seqs": args.num_prompts,
            "max_num_batched_tokens": chunk,
            "block_size": BLOCK,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": blocks * BLOCK * 2 * KV_HEADS * HEAD_SIZE * 2,
        }
        policy = {"kv_policy": args.policy, "kv_budget": args.budget}
        both = {"stock": {}, args.policy: policy}
        pipes = start_engines(
            engine, {name: (settings, own, args.threads) for name, own in both.items()}
        )
        source = random.Random(0)
        ratios: list[list[float]] = []
        for repetition in range(args.repetitions + 1):  # the first one warms up
            count = args.num_prompts if repetition else 2
            prompts = [
                [source.randrange(8, VOCABULARY) for _ in range(args.prompt_len)]
                for _ in range(count)
            ]
            found = {}
            for name, pipe in list(pipes.items())[:: 1 if repetition % 2 else -1]:
                pipe.send((prompts, args.output_len))
                found[name] = pipe.recv()
                if repetition:
                    at_once, decode, job = found[name]
                    print(
                        f"{name}: {at_once} at once, {decode:.1f} tokens a second in steps that "
                        f"only decode, {job:.1f} in the whole job",
                        flush=True,
                    )
            if repetition:
                own, stock = found[args.policy], found["stock"]
                ratios.append([a / b for a, b in zip(own, stock, strict=True)])
        for pipe in pipes.values():
            pipe.send(None)
    for name, of_name in zip(
        ("requests at once", "decode tokens a second", "tokens a second of the job"),
        zip(*ratios, strict=True),
        strict=True,
    ):
        print(
            f"{name}: {statistics.median(of_name):.2f} times stock "
            f"({min(of_name):.2f} to {max(of_name):.2f})"
        )


if __name__ == "__main__":
    main()
