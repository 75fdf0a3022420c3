#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What solving the lengths of a prompt costs, against the attention of its prefill.

    python scripts/bench_solve.py [--tokens 8192] [--layers 32] [--heads 32] [--kv-heads 8]

One thread; CPU time of that thread, so that other work on the machine counts little. The attention
of one layer is measured and multiplied by the layers; random scores, with a few high ones in every
row as attention has them. Prefill has its linear layers too, so the shares are upper bounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.recall import WindowStatistics, window_statistics
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.policy import load_policy

WINDOW, BLOCK = 8, 16


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of one call on this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def attention_seconds(tokens: int, heads: int, kv_heads: int, head_size: int) -> float:
    """The attention of one layer over a prompt, bfloat16."""
    blocks = -(-tokens // BLOCK)
    query = torch.randn(tokens, heads, head_size).bfloat16()
    key, value = (torch.randn(blocks, kv_heads, BLOCK, head_size).bfloat16() for _ in range(2))
    out = torch.empty_like(query)
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    lens = torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)

    batch = AttentionBatch(query, key, value, table, starts, lens, lens * 0)

    def attend() -> None:
        cpu.paged_attention(out, batch, Softmax(head_size**-0.5))

    return cpu_seconds(attend)


def solving_seconds(name: str, tokens: int, layers: int, kv_heads: int) -> float:
    """Evidence of every layer, measures, lengths: all that a policy adds to `snapkv`."""
    args = {"retention": 0.9} if name.endswith("retention") else {}
    policy = load_policy(name.split()[0], "12%" if not args else None, args)
    solver: Any = policy.allocator
    generator = torch.Generator().manual_seed(1)
    shape = (1, kv_heads, tokens - WINDOW)
    scores = [torch.rand(shape, generator=generator) ** (4 + layer) for layer in range(layers)]
    lens = torch.tensor([tokens], dtype=torch.int32)
    plan = policy.plan(tokens, layers, BLOCK)
    mean, capacity = plan.budget_tokens - WINDOW, tokens - WINDOW

    def solve() -> None:
        evidence = []
        for layer_scores in scores:
            statistics: WindowStatistics | None = None
            if solver.needs_statistics:
                statistics = window_statistics(layer_scores, lens, window=WINDOW)
            evidence.append(solver.evidence(layer_scores, statistics))
        own = torch.stack(evidence)[:, 0].contiguous()
        measures = solver.measures(own, mean, capacity, 0, 0).double().numpy()
        solver.allocate(measures, mean, capacity)

    solve()
    return statistics.median(cpu_seconds(solve) for _ in range(3))


def main(
    tokens: Annotated[int, typer.Option(min=64)] = 8192,
    layers: Annotated[int, typer.Option(min=1)] = 32,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_size: Annotated[int, typer.Option(min=8)] = 128,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attention = layers * attention_seconds(tokens, heads, kv_heads, head_size)
    table = Table(title=f"{tokens} tokens, {layers} layers, {heads} heads, {kv_heads} KV heads")
    table.add_column("one thread")
    table.add_column("CPU time [s]", justify="right")
    table.add_column("of the attention", justify="right")
    table.add_row("prefill attention", f"{attention:.2f}", "100 %")
    for name in ("xkv", "xkv retention", "zigzagkv", "entropykv", "ginikv"):
        seconds = solving_seconds(name, tokens, layers, kv_heads)
        table.add_row(name, f"{seconds:.3f}", f"{100 * seconds / attention:.2f} %")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
