#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packed linear layers against PyTorch's plain `linear`, in turns, for the shapes of the bench.

    OMP_NUM_THREADS=1 python scripts/bench_linear.py [--rounds 60]

Prints medians of the processor time of this thread, which other work on the machine disturbs less
than it does the clock; so it measures one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from vllm_pyramid.platform.prepack import pack, packed_linear

# Outputs and inputs: QKV, O, gate and up, down, the output layer.
SHAPES = ((1024, 512), (512, 512), (2816, 512), (512, 1408), (8192, 512))
ROWS = (1, 8, 32, 128, 512, 2048)


def measure(outputs: int, inputs: int, rows: int, rounds: int) -> tuple[float, float]:
    """Median microseconds, plain and packed."""
    weight = torch.randn(outputs, inputs).bfloat16()
    x = torch.randn(rows, inputs).bfloat16()
    number = pack(weight)
    ways = (
        lambda: torch.nn.functional.linear(x, weight),
        lambda: packed_linear(x, number, None),
    )
    if not torch.equal(ways[0](), ways[1]()):
        raise SystemExit(f"{outputs} x {inputs}, {rows} rows: the results differ")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for way, spent in zip(ways, times, strict=True):
            begin = time.thread_time()
            way()
            spent.append(1e6 * (time.thread_time() - begin))
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table(title=f"linear layers in bfloat16, one thread, medians of {rounds}, microseconds")
    for name in ("outputs x inputs", "rows", "plain", "packed", "times as fast"):
        table.add_column(name, justify="right")
    for outputs, inputs in SHAPES:
        for rows in ROWS:
            plain, packed = measure(outputs, inputs, rows, rounds)
            cells = (f"{outputs} x {inputs}", str(rows), f"{plain:.0f}", f"{packed:.0f}")
            table.add_row(*cells, f"{plain / packed:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
