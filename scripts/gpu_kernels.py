# SPDX-License-Identifier: Apache-2.0
"""The kernel times of scripts/gpu_check.py (stage `kernels`), on a CUDA device.

    python scripts/gpu_kernels.py --out FILE

Writes a JSON object; what must hold and does not raises RuntimeError.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_layers import BLOCK_SIZE, DEVICE, GROUP, HEAD_SIZE, KV_HEADS, Layers

from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch
from vllm_pyramid.methods.accumulated.kernels import triton as mass_triton
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.methods.observed_expected.kernels import triton as blend_triton
from vllm_pyramid.methods.pages.kernels import device_page_ops
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists
from vllm_pyramid.step.rotary import Rotary

WINDOW, KEEP = 32, 1024
QUERIES, POSITIONS = 16, 512  # of `auto`, whose window is longer
ROUNDS = 15
# Layers are taken in turn until they hold this much, so that none finds its cache in the L2.
COLD_BYTES = 512 << 20
DECODES = ((32, 8192), (64, 1024), (8, 1024), (1, 8192))  # (requests, context)
PROMPTS = ((1, 8192), (4, 8192))
SELECTED = 1024  # tokens that are read where pages are selected
SELECTIONS = tuple((n, context) for n in (1, 16) for context in (2048, 4096, 8192, 16384, 32768))


def require(condition: bool, message: str) -> None:
    """Raise RuntimeError unless the condition holds."""
    if not condition:
        raise RuntimeError(message)


def median_times(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds on the device of each call; the calls alternate within every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 3):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 3:  # the first rounds compile and warm up
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, after it has been compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def bench_decode(requests: int, context: int, copy: Callable[[], object], copied: int) -> Any:
    """Decode as a captured graph over several layers; also with the mass per key."""
    from vllm_pyramid.kernels.triton import functions as triton_ops

    row_bytes = KV_HEADS * HEAD_SIZE * 2
    read = requests * context * 2 * row_bytes
    count = max(1, -(-COLD_BYTES // read))
    layers = Layers.build(requests, context, count)
    query, skips = layers.queries(1), torch.zeros_like(layers.lens)
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    outs = [torch.empty_like(query) for _ in range(count)]
    masses = [torch.zeros(key.shape[:3], device="cuda") for key, _ in layers.caches]
    workspace = triton_ops.Workspace.allocate(KV_HEADS * GROUP, KV_HEADS, HEAD_SIZE, "cuda")
    softmax = Softmax(HEAD_SIZE**-0.5)

    def decode(with_mass: bool) -> None:
        for i, (key_cache, value_cache) in enumerate(layers.caches):
            batch = AttentionBatch(
                query,
                key_cache,
                value_cache,
                layers.table,
                starts,
                layers.lens,
                skips,
                max_query_len=1,
                max_seq_len=context,
            )
            triton_ops.paged_attention(outs[i], batch, softmax, workspace=workspace)
            if with_mass:
                mass_triton.add_key_mass(masses[i], batch, softmax, workspace=workspace)

    plain, with_mass = capture(lambda: decode(False)), capture(lambda: decode(True))
    for length in (context, context - 5):  # replays read the lengths of the day
        layers.lens.fill_(length)
        decode(False)
        expected = [out.clone() for out in outs]
        for out in outs:
            out.zero_()
        plain.replay()
        torch.cuda.synchronize()
        equal = all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))
        require(equal, f"the captured decode differs from the eager one at {length} tokens")
    for mass in masses:
        mass.zero_()
    with_mass.replay()
    torch.cuda.synchronize()
    right = requests * GROUP  # of a KV head; a block belongs to one request
    largest = max((mass.sum((0, 2)) - right).abs().max().item() for mass in masses)
    require(
        largest < 1e-2 * requests,
        f"probabilities of a KV head sum to {right} with an error of {largest}",
    )
    layers.lens.fill_(context)
    times = median_times(
        {"copy": copy, "decode": plain.replay, "decode_with_key_mass": with_mass.replay}
    )
    bandwidth = copied / times["copy"]
    return {
        "kernel": "decode",
        "requests": requests,
        "context": context,
        "layers": count,
        "milliseconds": times["decode"] / count,
        "milliseconds_with_key_mass": times["decode_with_key_mass"] / count,
        "megabytes": read / 1e6,
        "copy_gb_per_s": bandwidth / 1e6,
        "share_of_copy_bandwidth": read * count / times["decode"] / bandwidth,
        "graph_equals_eager": True,
    }


def bench_eviction(requests: int, context: int, copy: Callable[[], object], copied: int) -> Any:
    """Score, select and compact at the end of prompts; launches included."""
    from vllm_pyramid.kernels.triton import functions as triton_ops

    layers = Layers.build(requests, context, 1)
    key_cache, value_cache = layers.caches[0]
    query = layers.queries(WINDOW)
    lens, keeps = layers.lens, torch.full_like(layers.lens, KEEP)
    ends = torch.arange(1, requests + 1, dtype=torch.int32, device=DEVICE) * WINDOW

    prompts = WindowBatch(query, key_cache, layers.table, ends, lens, WINDOW, context)

    def score() -> torch.Tensor:
        return triton_ops.window_scores(prompts, Softmax(HEAD_SIZE**-0.5), Reduction())

    rotary = Rotary(torch.rand(2 * context, HEAD_SIZE, device=DEVICE))

    def blend() -> torch.Tensor:
        future = blend_triton.future_queries(
            query, ends, lens, rotary, queries=QUERIES, positions=POSITIONS
        )
        queries, shape = replace(prompts, window=QUERIES), ScoreShape(4, WINDOW)
        return blend_triton.observed_expected_scores(
            queries, value_cache, Softmax(HEAD_SIZE**-0.5), shape, future=future
        )

    require(bool(blend().isfinite().all()), "scores of observed_expected are not finite")
    scores = score()

    def select() -> torch.Tensor:
        return triton_ops.select(scores, lens, keeps, window=WINDOW, max_keep=KEEP)

    kept = select()
    calls = {
        "copy": copy,
        "window_scores": score,
        "observed_expected_scores": blend,
        "select": select,
        "compact": lambda: triton_ops.compact(
            key_cache, value_cache, layers.table, kept, lens, keeps
        ),
    }
    times = median_times(calls)
    bandwidth = copied / times["copy"]
    row_bytes = requests * KV_HEADS * HEAD_SIZE * 2
    # What has to move at the least: K once (and V), the scores once, the survivors out and in.
    least = {
        "window_scores": context * row_bytes,
        "observed_expected_scores": 2 * context * row_bytes,
        "select": scores.numel() * 4,
        "compact": 4 * KEEP * row_bytes,
    }
    return {
        "kernel": "eviction",
        "requests": requests,
        "context": context,
        "copy_gb_per_s": bandwidth / 1e6,
        **{
            name: {
                "milliseconds": times[name],
                "least_megabytes": size / 1e6,
                "share_of_copy_bandwidth": size / times[name] / bandwidth,
            }
            for name, size in least.items()
        },
    }


def bench_selection(requests: int, context: int, ops: Any) -> dict[str, Any]:
    """Choose pages and attend to them, against attention to everything.

    Launches included, as between piecewise graphs. `ops` are the kernels.
    """
    pages, chosen_pages = context // BLOCK_SIZE, SELECTED // BLOCK_SIZE
    count = max(1, -(-COLD_BYTES // (requests * context * 4 * KV_HEADS * HEAD_SIZE)))
    layers = Layers.build(requests, context, count)
    query, zeros = layers.queries(1), torch.zeros_like(layers.lens)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
    softmax, out = Softmax(HEAD_SIZE**-0.5), torch.empty_like(query)
    rows = PageBatch(query, layers.table, starts[:-1], layers.lens - 1, zeros, BLOCK_SIZE, pages)
    budgets = torch.full_like(layers.lens, chosen_pages)
    pools = []
    for key_cache, _ in layers.caches:
        shape = len(key_cache), KV_HEADS, 2 * HEAD_SIZE
        pools.append(torch.empty(shape, dtype=torch.bfloat16, device=DEVICE))
        written = (key_cache, layers.table, zeros, layers.lens, zeros)
        device_page_ops(ops).summarise_pages(pools[-1], *written, kind="spread", max_pages=pages)
    memory = (
        torch.empty(requests, query.shape[1], pages, device=DEVICE),
        chosen := PageLists.zeros(requests, KV_HEADS, chosen_pages, torch.device(DEVICE)),
    )

    def choose() -> None:
        for pool in pools:
            device_page_ops(ops).choose_pages(
                *(rows, softmax, pool, budgets, *memory), kind="spread", sinks=1, recent=5
            )

    def attend(table: torch.Tensor, lens: torch.Tensor, longest: int) -> None:
        for caches in layers.caches:
            batch = AttentionBatch(
                query, *caches, table, starts, lens, zeros, max_query_len=1, max_seq_len=longest
            )
            ops.paged_attention(out, batch, softmax)

    choose()
    times = median_times(
        {
            "dense": lambda: attend(layers.table, layers.lens, context),
            "choose": choose,
            "attend": lambda: attend(chosen.block_table, chosen.seq_lens, SELECTED),
        }
    )
    flags = chosen.unranked | chosen.miscounted
    require(not bool(flags.any()), f"rows with NaN, or other numbers of pages: {flags.tolist()}")
    require(bool(out.isfinite().all()), "attention to selected pages is not finite")
    whole = sum(times[name] for name in ("choose", "attend"))
    return {
        "kernel": "selection",
        "requests": requests,
        "context": context,
        "selected_tokens": SELECTED,
        **{f"{name}_milliseconds": time / count for name, time in times.items()},
        "dense_by_selection": times["dense"] / whole,
    }


def least_contexts(rows: list[dict[str, Any]]) -> dict[str, int | None]:
    """Return from which measured context on selecting was faster, for each number of requests.

    It is what `attend.min_context` is for; None where it was slower at the longest.
    """
    found: dict[str, int | None] = {}
    ended: set[str] = set()
    for row in sorted(rows, key=lambda row: -row["context"]):
        requests = str(row["requests"])
        found.setdefault(requests, None)
        if row["dense_by_selection"] <= 1:
            ended.add(requests)
        elif requests not in ended:
            found[requests] = row["context"]
    return found


def run_kernels() -> dict[str, Any]:
    """All kernel times; a copy of 1 GiB gives the bandwidth, measured between them.

    A case that does not hold what it must is left out, and named in `wrong`.
    """
    from vllm_pyramid.kernels.triton import functions as triton_ops

    torch.manual_seed(0)
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel()  # read and written

    def copy() -> object:
        return target.copy_(source)

    cases: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    cases += [(bench_decode, (*case, copy, copied)) for case in DECODES]
    cases += [(bench_eviction, (*case, copy, copied)) for case in PROMPTS]
    cases += [(bench_selection, (*case, triton_ops)) for case in SELECTIONS]
    rows, wrong = [], []
    for bench, arguments in cases:
        try:
            rows.append(bench(*arguments))
        except (RuntimeError, ValueError) as error:
            wrong.append(f"{bench.__name__}{arguments[:2]}: {error}")
    return {
        "rounds": ROUNDS,
        "statistic": "median",
        "rows": rows,
        "min_context": least_contexts([row for row in rows if row["kernel"] == "selection"]),
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result = run_kernels()
    options.out.write_text(json.dumps(result))
    require(not result["wrong"], "\n".join(result["wrong"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
