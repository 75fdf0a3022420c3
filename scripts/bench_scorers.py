# SPDX-License-Identifier: Apache-2.0
"""Times what scoring one prompt costs on the CPU: by a policy's kernels, and by PyTorch.

Sides alternate within a round, each over the caches of all layers, which hold random numbers. The
first two sides are `Scorer.scores` and `Scorer.score_parts` of `--policy`; the third is `scores` of
`--beside`. Figures are milliseconds for all layers: the median over the rounds, and the range. They
are the processor's time of this process, which other processes disturb less than the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_pyramid.kernels import get_ops
from vllm_pyramid.kernels.cpu import library
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.rotary import Rotary

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
BLOCK_SIZE = 128
CHUNK = 64  # queries of the step that ends the prompt


def layer(args: argparse.Namespace, rotary: Rotary, seed: int) -> AttentionInputs:
    """Return one layer's attention at the end of a prompt, with the blocks in random order."""
    heads, kv_heads, size = args.shape
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-args.tokens // BLOCK_SIZE)
    dtype = DTYPES[args.dtype]
    memory = torch.randn(blocks, kv_heads, BLOCK_SIZE, 2 * size, generator=generator).to(dtype)
    query = torch.randn(CHUNK, heads, size, generator=generator)
    query += torch.randn(heads, size, generator=generator)  # queries of a head are alike
    table = torch.randperm(blocks, generator=generator).int()[None]
    batch = AttentionBatch(
        *(query.to(dtype), memory[..., :size], memory[..., size:], table),
        torch.tensor([0, CHUNK], dtype=torch.int32),
        torch.tensor([args.tokens], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    ops = get_ops("cpu")
    return AttentionInputs(ops, 0, batch, Softmax(size**-0.5), rotary=rotary)


def eviction(call: AttentionInputs, policy: Policy, tokens: int) -> EvictionBatch:
    """Return the eviction of the only request, by a record of the step with what scorers read."""

    def one(number: int) -> Any:
        return np.array([number], np.int32)

    evictions: Any = SimpleNamespace(
        query_ends=one(CHUNK),
        query_lens=one(CHUNK),
        points=one(tokens),
        prompt_lens=one(tokens),
        eviction_numbers=[1],
        kept_lens=[tokens],
        request_ids=["a"],
    )
    keep = tokens // 8
    return EvictionBatch(
        *(call, policy, evictions, np.zeros(1, np.int64), np.zeros(1, np.int64), call.block_table),
        *(torch.tensor([number], dtype=torch.int32) for number in (CHUNK, tokens, 0, keep)),
        *(one(tokens), one(0), one(keep), one(CHUNK)),
    )


def in_torch(policy: Policy, batch: EvictionBatch) -> torch.Tensor:
    return batch.score_each(policy.scorer.kind, policy.scorer.score_parts)


def milliseconds(run: Callable[[EvictionBatch], Any], batches: list[EvictionBatch]) -> float:
    begin = time.process_time()
    for batch in batches:
        run(batch)
    return (time.process_time() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="snapkv-expected")
    parser.add_argument("--policy-args", type=json.loads, default={}, help="of --policy, JSON")
    parser.add_argument("--beside", default="snapkv", help="another policy")
    parser.add_argument(
        "--shape",
        type=lambda text: tuple(map(int, text.split("x"))),
        default=(9, 3, 64),
        help="query heads x KV heads x head size",
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = args.shape[2]
    angles = torch.arange(args.tokens + 1024)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1))
    calls = [layer(args, rotary, seed) for seed in range(args.layers)]
    sides: dict[str, tuple[Callable[[EvictionBatch], Any], list[EvictionBatch]]] = {}
    for name in (args.policy, args.beside):
        policy = load_policy(name, args=args.policy_args if name == args.policy else None)
        batches = [eviction(call, policy, args.tokens) for call in calls]
        sides[f"{name}, kernels"] = policy.scorer.scores, batches
        if name == args.policy:
            sides[f"{name}, PyTorch"] = partial(in_torch, policy), batches
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(args.rounds + 1):
        for side, (run, batches) in sides.items():
            found = milliseconds(run, batches)
            if turn:  # the first round warms up
                times[side].append(found)
    print(f"{library.current_isa()}, {args.threads} threads, {args.shape}, {args.dtype}")
    first = times[next(iter(times))]
    for side, found in times.items():
        ratios = [theirs / ours for theirs, ours in zip(found, first, strict=True)]
        print(
            f"{side}: {statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f}) ms, "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of the first"
        )


if __name__ == "__main__":
    main()
