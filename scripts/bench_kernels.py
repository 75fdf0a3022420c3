# SPDX-License-Identifier: Apache-2.0
"""Times the C++ kernels against what the same machine can do in the same run.

- decode: bytes of K and V per second against a plain read of as many bytes by the same threads,
  against a read of the very same pages in the order of decoding, fetched ahead (a core reads
  scattered pages more slowly), and its time against scaled_dot_product_attention on the same tokens
  gathered beforehand (the gathering is not timed);
- shared, with `--shared`: requests that read a common prefix together against each by itself;
- mass: what gathering each key's probability behind that costs, by its log-sum-exp;
- prefill: causal attention of a whole prompt against PyTorch's scaled_dot_product_attention;
- evict: score + select + compact as a share of that prefill;
- select, with `--select`: scoring, choosing and attending to a share of the pages against attending
  to all of them;
- with `--fp8`: the same attention over caches of 8-bit floats, in percent of its time over the
  others, and writing a token, in percent of the time of a copy.

With `--queries` queries and results have another type than the cache, as where weights become
float32 and the cache keeps its 16 bits; scaled_dot_product_attention then has K and V of that type.

The two sides of a comparison alternate within a round and every figure is the median over the
rounds. Decode walks through copies of the cache that together exceed the last-level cache, as the
layers of a model do, and the plain read goes through other copies at the time. `--roofline` draws
the rates against the operations a byte, under the read rate and the rate of PyTorch's matrix
product in the same run. The kernel tests compare the results with the float64 reference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.cpu import library as cpu_library
from vllm_pyramid.kernels.records import FP8_DTYPES, AttentionBatch, Reduction, Softmax, WindowBatch
from vllm_pyramid.methods.accumulated.kernels import cpu as mass_cpu
from vllm_pyramid.methods.pages.kernels import cpu as page_cpu
from vllm_pyramid.methods.pages.kernels.records import (
    SUMMARY_KINDS,
    SUMMARY_ROWS,
    PageBatch,
    PageSelection,
)

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
    gflop: float = 0.0  # multiplications and additions of one call, in 1e9
    milliseconds: float = 0.0
    sdpa_milliseconds: float | None = None
    pages: float | None = None  # GB/s of a read of the same pages


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def integers_of(shape: str) -> tuple[int, ...]:
    """Read "32x6144" as (32, 6144)."""
    return tuple(map(int, shape.split("x")))


def timed(function: Callable[..., object], *inputs: Any, **options: Any) -> float:
    begin = time.perf_counter()
    function(*inputs, **options)
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
) -> list[Row]:
    dtype = DTYPES[args.dtype]
    lens = ragged(requests, context) if uneven else [context] * requests
    entries = max(lens) // BLOCK_SIZE
    blocks = sum(lens) // BLOCK_SIZE
    used = sum(lens) * args.kv_heads * head_size * 2 * dtype.itemsize
    copies = max(2, -(-args.cold_mib * 2**20 // used))
    shape = (blocks, args.kv_heads, 2 * BLOCK_SIZE, head_size)
    first = torch.randn(shape, dtype=dtype)
    caches = [first] + [first.clone() for _ in range(copies - 1)]
    order = torch.randperm(blocks).int().split([n // BLOCK_SIZE for n in lens])
    table = torch.zeros(requests, entries, dtype=torch.int32)
    for r, row in enumerate(order):
        table[r, : len(row)] = row
    query = torch.randn(requests, args.kv_heads * group, head_size, dtype=query_dtype(args))
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    mass = torch.zeros(blocks, args.kv_heads, BLOCK_SIZE)
    starts, seq_lens = torch.arange(requests + 1).int(), integers(*lens)
    skips = torch.zeros(requests, dtype=torch.int32)
    heads = torch.arange(args.kv_heads)[:, None]
    pages = torch.cat([(row * args.kv_heads + heads).flatten() for row in order]).int()
    page_bytes = used // len(pages)
    read, read_pages = cpu_library.load().pyr_read, cpu_library.load().pyr_read_pages
    threads, softmax = torch.get_num_threads(), Softmax(0.1)

    def sdpa(cache: torch.Tensor) -> None:
        # The memory of a cache, in the queries' type, taken for gathered K and V.
        key, value = cache.view(2, requests, args.kv_heads, context, head_size)
        F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=group > 1)

    gathered = caches if query.dtype == dtype else [cache.to(query.dtype) for cache in caches]
    ours, plain, paged, theirs_sdpa, masses = [], [], [], [], []
    small_caches = {kind: [cache.to(kind) for cache in caches] for kind in eight_bits(args)}
    eights: dict[torch.dtype, list[float]] = {kind: [] for kind in small_caches}
    deadline = time.perf_counter() + args.case_seconds
    for turn in range(max(args.rounds * copies, 8)):
        if turn >= 5 and time.perf_counter() > deadline:
            break
        other = caches[(turn + copies // 2) % copies]
        plain.append(timed(read, other.data_ptr(), used, threads))
        there = (caches[(turn + 1 + copies // 3) % copies].data_ptr(), pages.data_ptr())
        paged.append(timed(read_pages, *there, len(pages), page_bytes, threads))
        key, value = split(caches[turn % copies])
        batch = AttentionBatch(query, key, value, table, starts, seq_lens, skips)
        ours.append(timed(cpu.paged_attention, out, batch, softmax, log_sum_exp=lse))
        for kind, of_kind in small_caches.items():
            key, value = split(of_kind[turn % copies])
            eight = replace(batch, key_cache=key, value_cache=value)
            eights[kind].append(timed(cpu.paged_attention, out, eight, softmax, log_sum_exp=lse))
        if not uneven:
            masses.append(timed(mass_cpu.add_key_mass, mass, batch, softmax, log_sum_exp=lse))
            theirs_sdpa.append(timed(sdpa, gathered[(turn + 1) % copies]))
    mine, theirs = statistics.median(ours), statistics.median(plain)
    common = (threads, types(args), head_size, group, requests, context, used / 1e6)
    decode = Row(
        *("decode ragged" if uneven else "decode", *common, "GB/s"),
        *(used / mine / 1e9, used / theirs / 1e9, 100 * theirs / mine),
        *(4 * sum(lens) * args.kv_heads * group * head_size / 1e9, mine * 1e3),
        statistics.median(theirs_sdpa) * 1e3 if theirs_sdpa else None,
        used / statistics.median(paged) / 1e9,
    )
    rows = [decode, *compared("decode", eights, mine, common)]
    if uneven:
        return rows
    gathering = statistics.median(masses)
    share = (gathering * 1e3, mine * 1e3, 100 * gathering / mine)
    return [*rows, Row("mass / decode", *common, "ms", *share)]


def bench_select(
    args: argparse.Namespace, head_size: int, group: int, requests: int, context: int
) -> list[Row]:
    """Measure `--select` of the pages, with summaries of the cache's dtype, over random keys."""
    dtype, kind = DTYPES[args.dtype], args.summary
    pages = context // BLOCK_SIZE
    used = requests * context * args.kv_heads * head_size * 2 * dtype.itemsize
    copies = max(2, -(-args.cold_mib * 2**20 // used))
    shape = (requests * pages, args.kv_heads, 2 * BLOCK_SIZE, head_size)
    first = torch.randn(shape, dtype=dtype)
    table = torch.randperm(requests * pages).int().view(requests, pages)
    skips, lens = torch.zeros(requests, dtype=torch.int32), integers(*[context] * requests)
    pool = torch.empty(*shape[:2], SUMMARY_ROWS[kind] * head_size, dtype=dtype)
    page_cpu.summarise_pages(pool, split(first)[0], table, skips, lens, skips, kind=kind)
    caches = [(first.clone(), pool.clone()) for _ in range(copies)]
    query = torch.randn(requests, args.kv_heads * group, head_size, dtype=query_dtype(args))
    out, starts = torch.empty_like(query), torch.arange(requests + 1).int()
    numbers = (torch.arange(requests).int(), lens - 1, skips)
    rows = PageBatch(query, table, *numbers, BLOCK_SIZE, max_pages=pages)
    count = max(1, round(pages * args.select / 100))
    budgets, softmax = torch.full_like(lens, count), Softmax(head_size**-0.5)
    chosen = PageSelection.empty(requests, args.kv_heads, count, query.device)
    scores = torch.empty(requests, args.kv_heads, pages)

    def choose() -> None:
        page_cpu.select_pages(rows, scores, budgets, sinks=1, recent=5, out=chosen)

    dense, scoring, choosing, reading = [], [], [], []
    deadline = time.perf_counter() + args.case_seconds
    for turn in range(max(args.rounds * copies, 8)):
        if turn >= 5 and time.perf_counter() > deadline:
            break
        batch = AttentionBatch(query, *split(caches[turn % copies][0]), table, starts, lens, skips)
        dense.append(timed(cpu.paged_attention, out, batch, softmax))
        cache, pool = caches[(turn + copies // 2) % copies]
        scoring.append(timed(page_cpu.score_pages, rows, softmax, pool, kind=kind, out=scores))
        choosing.append(timed(choose))
        lists = (chosen.block_table, starts, chosen.seq_lens, chosen.skips)
        reading.append(
            timed(cpu.paged_attention, out, AttentionBatch(query, *split(cache), *lists), softmax)
        )
    parts = [1e3 * statistics.median(times) for times in (scoring, choosing, reading)]
    mine, theirs = sum(parts), statistics.median(dense) * 1e3
    shape_of = (torch.get_num_threads(), types(args), head_size, group, requests, context)
    common = (*shape_of, used / 1e6, "ms")
    return [
        Row(f"select {args.select:g} % / dense", *common, mine, theirs, 100 * theirs / mine),
        *(
            Row(f"{name} / select", *common, part, mine, 100 * part / mine)
            for name, part in zip(("scoring", "choosing", "attending"), parts, strict=True)
        ),
    ]


def bench_shared(
    args: argparse.Namespace, head_size: int, group: int, requests: int, prefix: int
) -> list[Row]:
    """Measure requests behind a prefix that they share, each with 128 keys of its own."""
    dtype = DTYPES[args.dtype]
    shared, own = prefix // BLOCK_SIZE, 128 // BLOCK_SIZE
    blocks = shared + requests * own
    first = torch.randn(blocks, args.kv_heads, 2 * BLOCK_SIZE, head_size).to(dtype)
    used = first.numel() * dtype.itemsize
    copies = max(2, -(-args.cold_mib * 2**20 // used))
    caches = [first] + [first.clone() for _ in range(copies - 1)]
    order = torch.randperm(blocks).int()
    rests = order[shared:].view(requests, own)
    table = torch.cat([order[:shared].expand(requests, -1), rests], 1).contiguous()
    query = torch.randn(requests, args.kv_heads * group, head_size, dtype=query_dtype(args))
    out, softmax = torch.empty_like(query), Softmax(head_size**-0.5)
    starts = torch.arange(requests + 1).int()
    lens = torch.full((requests,), prefix + 128, dtype=torch.int32)
    skips = torch.zeros(requests, dtype=torch.int32)
    batches = [AttentionBatch(query, *split(cache), table, starts, lens, skips) for cache in caches]
    before = cpu_library.shared_rows()
    cpu.shared_attention(out, batches[0], softmax)
    if cpu_library.shared_rows() - before != requests * args.kv_heads * group:
        raise ValueError(f"{requests} requests behind {prefix} keys do not form a group")
    ours, alone = [], []
    deadline = time.perf_counter() + args.case_seconds
    for turn in range(max(args.rounds * copies, 8)):
        if turn >= 5 and time.perf_counter() > deadline:
            break
        other = batches[(turn + copies // 2) % copies]
        ours.append(timed(cpu.shared_attention, out, batches[turn % copies], softmax))
        alone.append(timed(cpu.paged_attention, out, other, softmax))
    mine, theirs = statistics.median(ours) * 1e3, statistics.median(alone) * 1e3
    common = (torch.get_num_threads(), types(args), head_size, group, requests, prefix, used / 1e6)
    return [Row("shared / each by itself", *common, "ms", mine, theirs, 100 * mine / theirs)]


def query_dtype(args: argparse.Namespace) -> torch.dtype:
    return DTYPES[args.queries or args.dtype]


def types(args: argparse.Namespace) -> str:
    """Return what a row says of types: the cache's, and the queries' where it is another."""
    same = args.queries in (None, args.dtype)
    return str(args.dtype) if same else f"{args.queries} over {args.dtype}"


def eight_bits(args: argparse.Namespace) -> tuple[torch.dtype, ...]:
    return FP8_DTYPES if args.fp8 else ()


def compared(
    what: str, times: dict[torch.dtype, list[float]], theirs: float, common: tuple[Any, ...]
) -> list[Row]:
    """A row a type of 8-bit floats: seconds beside those of the same with the other cache."""
    found = []
    for kind, seconds in times.items():
        name = f"{what}, {str(kind).removeprefix('torch.float8_')}"
        mine = statistics.median(seconds)
        found.append(Row(name, *common, "ms", mine * 1e3, theirs * 1e3, 100 * mine / theirs))
    return found


def bench_prompt(args: argparse.Namespace, head_size: int, group: int, context: int) -> list[Row]:
    dtype = DTYPES[args.dtype]
    heads, blocks = args.kv_heads * group, -(-context // BLOCK_SIZE)
    cache = torch.randn(blocks, args.kv_heads, 2 * BLOCK_SIZE, head_size, dtype=dtype)
    key, value = split(cache)
    table = torch.randperm(blocks).int()[None]
    query = torch.randn(context, heads, head_size, dtype=query_dtype(args))
    out = torch.empty_like(query)
    length, nothing, keep = integers(context), integers(0), min(args.keep, context)
    q = torch.randn(1, heads, context, head_size, dtype=query.dtype)
    k, v = (torch.randn(1, args.kv_heads, context, head_size, dtype=query.dtype) for _ in range(2))
    softmax = Softmax(head_size**-0.5)
    batch = AttentionBatch(query, key, value, table, integers(0, context), length, nothing)
    prompt = WindowBatch(query, key, table, length, length, window=8)

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def evict() -> None:
        scores = cpu.window_scores(prompt, softmax, Reduction())
        kept = cpu.select(scores, length, integers(keep), window=8)
        cpu.compact(key, value, table, kept, length, integers(keep))

    times: dict[str, list[float]] = {"ours": [], "sdpa": [], "evict": [], "write": []}
    new = torch.randn(2, context, args.kv_heads, head_size, dtype=query.dtype)
    slots = torch.randperm(blocks * BLOCK_SIZE)[:context]
    eights: dict[torch.dtype, list[float]] = {kind: [] for kind in eight_bits(args)}
    writes: dict[torch.dtype, list[float]] = {kind: [] for kind in eights}
    for _ in range(args.rounds):
        times["write"].append(timed(cpu.reshape_and_cache, *new, key, value, slots))
        for kind in eights:
            small = split(cache.to(kind))
            eight = replace(batch, key_cache=small[0], value_cache=small[1])
            eights[kind].append(timed(cpu.paged_attention, out, eight, softmax))
            writes[kind].append(timed(cpu.reshape_and_cache, *new, *small, slots))
        times["sdpa"].append(timed(sdpa))
        times["ours"].append(timed(cpu.paged_attention, out, batch, softmax))
        times["evict"].append(timed(evict))
    mine, theirs, eviction, write = (statistics.median(times[name]) * 1e3 for name in times)
    size = 2 * context * args.kv_heads * head_size * dtype.itemsize / 1e6
    common = (torch.get_num_threads(), types(args), head_size, group, 1, context, size, "ms")
    return [
        Row(
            *("prefill / SDPA", *common, mine, theirs, 100 * theirs / mine),
            *(2 * context**2 * heads * head_size / 1e9, mine, theirs),
        ),
        Row("evict / prefill", *common, eviction, mine, 100 * eviction / mine),
        *compared("prefill", eights, mine / 1e3, common[:-1]),
        *compared("write", writes, write / 1e3, common[:-1]),
    ]


def matrix_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of PyTorch's matrix product, the arithmetic ceiling of the roofline."""
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    return 2 * 1.024**3 / min(timed(lambda: a @ b) for _ in range(10))


def draw_roofline(rows: list[Row], peaks: dict[int, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for color, (threads, peak) in zip(("C0", "C1", "C2", "C3"), peaks.items(), strict=False):
        mine = [row for row in rows if row.threads == threads and row.gflop]
        decode = [row for row in mine if row.unit == "GB/s"]
        x = [row.gflop * 1e3 / row.megabytes for row in mine]
        if decode:
            read = statistics.median(row.reference for row in decode)
            line = [min(x) / 2, peak / read, max(max(x), peak / read) * 2]
            label = f"{threads} thread(s): read {read:.0f} GB/s, matmul {peak:.0f} GFLOP/s"
            axes.plot(line, [min(peak, read * i) for i in line], color=color, label=label)
        axes.scatter(x, [row.gflop / row.milliseconds * 1e3 for row in mine], s=14, color=color)
    axes.set(xscale="log", yscale="log", ylabel="GFLOP/s")
    axes.set_xlabel("operations a byte of K and V")
    axes.set_title(f"Attention, {cpu.current_isa()}, {rows[0].dtype}: decode left, prefill right")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    frame = pd.DataFrame(map(asdict, rows)).drop(columns=["dtype", "gflop"])
    return f"C++ kernels, {cpu.current_isa()}, {rows[0].dtype}\n" + frame.to_string(
        index=False, na_rep="", float_format="{:.4g}".format
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--queries", choices=DTYPES, help="type of queries (default: the cache's)")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument(
        "--batches", nargs="*", default=["1x2048", "1x32768", "8x1024", "64x256"],
        help="decode batches as REQUESTSxCONTEXT",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, nargs="*", default=[8192])
    parser.add_argument("--keep", type=int, default=512, help="tokens kept by the eviction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--case-seconds", type=float, default=1.0, help="at most, for a decode case"
    )
    parser.add_argument(
        "--shared", nargs="*", default=[], help="shared prefixes as REQUESTSxTOKENS"
    )
    parser.add_argument("--fp8", action="store_true", help="also caches of 8-bit floats")
    parser.add_argument("--select", type=float, help="also attend to this share of pages, in %%")
    parser.add_argument("--summary", choices=SUMMARY_KINDS, default="spread")
    parser.add_argument("--roofline", type=Path, help="write a picture there (PNG)")
    parser.add_argument("--cold-mib", type=int, default=128, help="more than the last-level cache")
    parser.add_argument("--isa", choices=cpu_library.ISAS, help="default: the best of this CPU")
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    return parser.parse_args()


def main() -> None:
    args = parse()
    cpu.set_isa(args.isa)
    torch.manual_seed(0)
    batches = [integers_of(batch) for batch in args.batches]
    jobs: list[Callable[[], list[Row]]] = []
    for head_size in args.head_sizes:
        for group in args.groups:
            for requests, context in batches:
                for uneven in (False, True) if requests > 1 else (False,):
                    case = (head_size, group, requests, context, uneven)
                    jobs.append(partial(bench_decode, args, *case))
            prefixes = [integers_of(shape) for shape in args.shared]
            jobs += [partial(bench_shared, args, head_size, group, *shape) for shape in prefixes]
            if args.select:
                shapes = [(head_size, group, *batch) for batch in batches]
                jobs += [partial(bench_select, args, *shape) for shape in shapes]
        jobs += [partial(bench_prompt, args, head_size, 2, context) for context in args.prompts]
    rows: list[Row] = []
    peaks: dict[int, float] = {}
    console = Console()
    for threads in dict.fromkeys(args.threads):
        torch.set_num_threads(threads)
        peaks[threads] = matrix_rate(query_dtype(args))
        for job in track(jobs, f"{threads} thread(s)", console=console, transient=True):
            rows += job()
    print(table(rows))
    if args.roofline:
        draw_roofline(rows, peaks, args.roofline)
    if args.csv:
        pd.DataFrame(map(asdict, rows)).to_csv(args.csv, index=False)


if __name__ == "__main__":
    main()
