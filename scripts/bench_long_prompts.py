#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prompts much longer than the cache: seconds per token by length, and the memory of the process.

The pool has exactly the blocks that the policy needs for a prompt of the greatest length. Random
weights in the shape of `vllm-pyramid bench` (8 layers), one request at a time, in turns.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time

import psutil
from own_engines import stay_in_process


def main() -> None:
    """Print one line a prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="keydiff-chunked")
    parser.add_argument("--lengths", default="16000,32000,64000,120000")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    stay_in_process(args.threads)
    from transformers import LlamaConfig
    from vllm import SamplingParams

    from vllm_pyramid import LLM
    from vllm_pyramid.policy import load_policy
    from vllm_pyramid.policy.planning import peak_blocks_up_to

    longest = max(lengths) + 64
    blocks = int(peak_blocks_up_to(load_policy(args.policy), longest, 8, 16).sum())
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            vocab_size=4096,
            max_position_embeddings=longest,
            dtype="bfloat16",
        ).save_pretrained(folder)
        llm = LLM(
            folder,
            kv_policy=args.policy,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=longest,
            max_num_seqs=2,
            max_num_batched_tokens=8192,
            num_gpu_blocks_override=blocks + 1,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 30,
        )
    print(
        f"{args.policy}: a pool of {blocks} blocks, {blocks * 16 // 8} tokens a layer", flush=True
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    source = random.Random(0)
    for repetition in range(args.repetitions + 1):
        for length in lengths[: None if repetition else 1]:  # the first one warms up
            prompt = [source.randrange(8, 4096) for _ in range(length)]
            begin = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            report = output.kv_transfer_params
            print(
                f"{length} tokens: {seconds:.2f} s, {1e6 * seconds / length:.0f} us a token, "
                f"{report['inner_evictions']} evictions inside, "
                f"{psutil.Process().memory_info().rss >> 20} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
