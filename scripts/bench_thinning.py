#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Prefill with tokens leaving between layers (`pyramidinfer`) against the whole prompt (`full`).

    python scripts/bench_thinning.py --prompt-len 4096 --rounds 7

One engine serves both: `full` is a request that opts out. Prompts are sent one at a time, in turns,
and generate one token, so that a request's time is its prefill. Weights are random (timing does not
depend on them); the model's shape is a small Llama's unless `--layers` and the like say otherwise.
Prints medians and, for the record, every figure as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def _write_config(folder: Path, args: argparse.Namespace) -> None:
    heads = args.hidden_size // 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden_size,
        "intermediate_size": args.hidden_size * 11 // 4 // 16 * 16,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": args.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7, help="prompts of each kind that count")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-budget", default=None)
    parser.add_argument("--kv-policy-args", type=json.loads, default={})
    parser.add_argument("--compile", action="store_true", help="with torch.compile, as by default")
    return parser.parse_args()


def main() -> None:
    """Run both kinds in turns and print the medians."""
    args = _parse()
    from vllm import SamplingParams

    from vllm_pyramid import LLM

    source = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder), args)
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            enforce_eager=not args.compile,
            max_model_len=args.prompt_len + 16,
            max_num_batched_tokens=args.prompt_len,
            max_num_seqs=4,
            kv_policy="pyramidinfer",
            kv_budget=args.kv_budget,
            kv_min_tokens=0,
            kv_policy_args=args.kv_policy_args,
            kv_cache_memory_bytes=2 << 30,
        )
        seconds: dict[str, list[float]] = {"full": [], "pyramidinfer": []}
        reports: dict[str, Any] = {}
        for turn in range(args.rounds + 1):  # the first of each is warm-up
            for name in seconds:
                prompt = source.integers(8, 2048, args.prompt_len).tolist()
                extra = {"kv_policy": "full"} if name == "full" else None
                params = SamplingParams(
                    temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra
                )
                start = time.perf_counter()
                (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                if turn:
                    seconds[name].append(time.perf_counter() - start)
                reports[name] = output.kv_transfer_params
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        spread = f"{min(values):.3f} to {max(values):.3f}"
        blocks = reports[name]["blocks_after"] / reports[name]["blocks_before"]
        print(f"{name:13} {medians[name]:.3f} s ({spread}), blocks kept {blocks:.1%}")
    print(f"pyramidinfer / full: {medians['pyramidinfer'] / medians['full']:.3f}")
    print(json.dumps({"arguments": vars(args), "seconds": seconds}))


if __name__ == "__main__":
    main()
