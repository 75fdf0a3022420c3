# SPDX-License-Identifier: Apache-2.0
"""Times the C++ kernels against what the same machine can do in the same run.

- decode: bytes of K and V per second against a plain read of as many bytes by the same threads;
- prefill: causal attention of a whole prompt against PyTorch's scaled_dot_product_attention;
- evict: score + select + compact as a share of that prefill.

The two sides of a comparison alternate within a round and every figure is the median over the
rounds. Decode walks through copies of the cache that together exceed the last-level cache, as the
layers of a model do, and the plain read goes through other copies at the time.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_pyramid.ops import cpu, cpu_library

BLOCK_SIZE = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass
class Row:
    """One line of the result. `reference` and `ours` are in `unit`; `percent` compares them."""

    kernel: str
    threads: int
    dtype: str
    head_size: int
    group: int
    requests: int
    context: int
    megabytes: float
    unit: str
    ours: float
    reference: float
    percent: float


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def split(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[P, G, 2N, D]` -> K and V, `[P, G, N, D]`."""
    return cache[:, :, :BLOCK_SIZE], cache[:, :, BLOCK_SIZE:]


def ragged(requests: int, context: int) -> list[int]:
    """Lengths between half and one and a half times `context`, in whole blocks, same sum."""
    steps = [0.5 + (i + 0.5) / requests for i in range(requests)]
    return [max(BLOCK_SIZE, round(context * s / BLOCK_SIZE) * BLOCK_SIZE) for s in steps]


def bench_decode(
    args: argparse.Namespace, head_size: int, group: int, requests: int, context: int, uneven: bool
) -> Row:
    dtype = DTYPES[args.dtype]
    lens = ragged(requests, context) if uneven else [context] * requests
    entries = max(lens) // BLOCK_SIZE
    blocks = sum(lens) // BLOCK_SIZE
    used = sum(lens) * args.kv_heads * head_size * 2 * dtype.itemsize
    copies = max(2, -(-args.cold_mib * 2**20 // used))
    shape = (blocks, args.kv_heads, 2 * BLOCK_SIZE, head_size)
    caches = [torch.randn(shape, dtype=dtype) for _ in range(copies)]
    order = torch.randperm(blocks).int().split([n // BLOCK_SIZE for n in lens])
    table = torch.zeros(requests, entries, dtype=torch.int32)
    for r, row in enumerate(order):
        table[r, : len(row)] = row
    query = torch.randn(requests, args.kv_heads * group, head_size, dtype=dtype)
    out = torch.empty_like(query)
    starts, seq_lens = torch.arange(requests + 1).int(), integers(*lens)
    skips = torch.zeros(requests, dtype=torch.int32)
    read = cpu_library.load().pyr_read
    threads = torch.get_num_threads()
    ours, plain = [], []
    for turn in range(max(args.rounds * copies, 8)):
        other = caches[(turn + copies // 2) % copies]
        plain.append(timed(lambda: read(other.data_ptr(), used, threads)))  # noqa: B023
        key, value = split(caches[turn % copies])
        inputs = (out, query, key, value, table, starts, seq_lens, skips)
        ours.append(timed(lambda: cpu.paged_attention(*inputs, scale=0.1)))  # noqa: B023
    mine, theirs = statistics.median(ours), statistics.median(plain)
    return Row(
        "decode ragged" if uneven else "decode",
        *(threads, args.dtype, head_size, group, requests, context, used / 1e6, "GB/s"),
        *(used / mine / 1e9, used / theirs / 1e9, 100 * theirs / mine),
    )


def bench_prompt(args: argparse.Namespace, head_size: int, group: int, context: int) -> list[Row]:
    dtype = DTYPES[args.dtype]
    heads, blocks = args.kv_heads * group, -(-context // BLOCK_SIZE)
    cache = torch.randn(blocks, args.kv_heads, 2 * BLOCK_SIZE, head_size, dtype=dtype)
    key, value = split(cache)
    table = torch.randperm(blocks).int()[None]
    query = torch.randn(context, heads, head_size, dtype=dtype)
    out = torch.empty_like(query)
    length, nothing, keep = integers(context), integers(0), min(args.keep, context)
    q = torch.randn(1, heads, context, head_size, dtype=dtype)
    k, v = (torch.randn(1, args.kv_heads, context, head_size, dtype=dtype) for _ in range(2))
    scale = head_size**-0.5
    inputs = (out, query, key, value, table, integers(0, context), length, nothing)

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def evict() -> None:
        scores = cpu.window_scores(query, key, table, length, length, window=8, scale=scale)
        kept = cpu.select(scores, length, integers(keep), window=8)
        cpu.compact(key, value, table, kept, length, integers(keep))

    times: dict[str, list[float]] = {"ours": [], "sdpa": [], "evict": []}
    for _ in range(args.rounds):
        times["sdpa"].append(timed(sdpa))
        times["ours"].append(timed(lambda: cpu.paged_attention(*inputs, scale=scale)))
        times["evict"].append(timed(evict))
    mine, theirs, eviction = (statistics.median(times[name]) * 1e3 for name in times)
    size = 2 * context * args.kv_heads * head_size * dtype.itemsize / 1e6
    common = (torch.get_num_threads(), args.dtype, head_size, group, 1, context, size, "ms")
    return [
        Row("prefill / SDPA", *common, mine, theirs, 100 * theirs / mine),
        Row("evict / prefill", *common, eviction, mine, 100 * eviction / mine),
    ]


def show(rows: list[Row], console: Console) -> None:
    table = Table(title=f"C++ kernels, {cpu.current_isa()}, {rows[0].dtype}")
    for name in ("kernel", "threads", "head x group", "batch", "MB", "ours", "other", "", "ratio"):
        table.add_column(name, justify="left" if name in ("kernel", "") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(row.kernel, str(row.threads), f"{row.head_size} x {row.group}"),
            *(f"{row.requests} x {row.context}", f"{row.megabytes:.1f}"),
            *(f"{row.ours:.2f}", f"{row.reference:.2f}", row.unit, f"{row.percent:.1f} %"),
        )
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--batches", nargs="+", default=["1x2048", "1x32768", "8x1024", "64x256"],
        help="decode batches as REQUESTSxCONTEXT",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, nargs="*", default=[8192])
    parser.add_argument("--keep", type=int, default=512, help="tokens kept by the eviction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-mib", type=int, default=128, help="more than the last-level cache")
    parser.add_argument("--isa", choices=cpu_library.ISAS, help="default: the best of this CPU")
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    return parser.parse_args()


def main() -> None:
    args = parse()
    cpu.set_isa(args.isa)
    torch.manual_seed(0)
    batches = [tuple(map(int, batch.split("x"))) for batch in args.batches]
    jobs: list[Callable[[], list[Row]]] = []
    for head_size in args.head_sizes:
        for group in args.groups:
            for requests, context in batches:
                for uneven in (False, True) if requests > 1 else (False,):
                    job = (head_size, group, requests, context, uneven)
                    jobs.append(lambda job=job: [bench_decode(args, *job)])  # type: ignore[misc]
        for context in args.prompts:
            size = (head_size, 2, context)
            jobs.append(lambda size=size: bench_prompt(args, *size))  # type: ignore[misc]
    rows: list[Row] = []
    console = Console()
    console.width = max(console.width, 110)  # also where the output is a file
    for threads in dict.fromkeys(args.threads):
        torch.set_num_threads(threads)
        for job in track(jobs, f"{threads} thread(s)", console=console, transient=True):
            rows += job()
    show(rows, console)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
