# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel ahead of time, without a GPU, and report what it costs.

    python scripts/compile_triton.py [--arch 80 90 100] [--all] [--json FILE]

The public functions of `vllm_pyramid.kernels.triton.functions` run on CPU tensors under a driver
that compiles for the architecture asked for, reads the machine code's resource usage, and launches
nothing. So exactly the tiles, specialisations and options that a GPU would get are compiled.
Ends with an error if a kernel spills registers or needs more shared memory than a block may have.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver
from triton_cases import MAIN_CASES, MORE_CASES, Case, ints, softmax_of

from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch
from vllm_pyramid.kernels.table_records import StepRows, TableGroups
from vllm_pyramid.kernels.triton import functions as triton_ops
from vllm_pyramid.kernels.triton import lanes as triton_lanes
from vllm_pyramid.kernels.triton import tables as triton_tables
from vllm_pyramid.methods.accumulated.kernels import triton as mass_triton
from vllm_pyramid.methods.host_values.kernels import triton as value_triton
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.methods.observed_expected.kernels import triton as blend_triton
from vllm_pyramid.methods.pages.kernels import triton as page_triton
from vllm_pyramid.methods.pages.kernels.records import COMBINES, SUMMARY_ROWS, PageBatch, PageLists
from vllm_pyramid.methods.thinning.kernels import RecentBatch
from vllm_pyramid.methods.thinning.kernels import triton as recent_triton
from vllm_pyramid.step.rotary import Rotary

ARCHITECTURES = (80, 90, 100)
# Shared memory a thread block may use, in bytes: A100, H100/H200, B200 (CUDA programming guide).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel. Stack and local bytes are where spilled registers go."""

    kernel: str
    case: str
    arch: int
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_LIMIT[self.arch]


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack and local memory a thread) of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    if set(numbers) != {"REG", "STACK", "LOCAL"}:
        raise RuntimeError(f"cuobjdump reported no resource usage: {report!r}")
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


class OfflineDriver:
    """What Triton's launcher asks of a driver, for a device that is not there."""

    def __init__(self, arch: int, record: Callable[[str, bytes, int], None]) -> None:
        self.arch = arch
        self.record = record
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton caches kernels by device, so each architecture is one

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}  # kernels that are too large are reported, not refused

    def load_binary(
        self, name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        self.record(name, cubin, shared)
        return 0, 0, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        self.warps = metadata.num_warps
        return lambda *args, **kwargs: None


def score_and_compact_scaled_rows(case: Case) -> None:
    """The functions that take rows of K, its scale, V and its scale (see docs/kv_layout.md)."""
    heads, size, block = case.num_kv_heads, case.head_size, 16
    length, tokens, half = 2048, 256, case.head_size + 4
    pool = torch.zeros(4, heads, block, 2 * half, dtype=torch.uint8)
    numbers, floats, words = (pool.view(t) for t in (case.cache, torch.float32, torch.int32))
    keys, values, scales = numbers[..., :size], numbers[..., half:-4], floats[..., size // 4]
    query = torch.zeros(tokens, heads * case.group, size, dtype=case.dtype)
    table, softmax = torch.zeros(2, length // block, dtype=torch.int32), softmax_of(case)
    lens, keeps, skips = ints(length, length), ints(512, 512), ints(0, 0)
    batch = AttentionBatch(
        *(query, keys, values, table, ints(0, 1, tokens), lens, skips), key_scales=scales
    )
    recent = RecentBatch(
        *(query, keys, table, ints(1, tokens), lens, skips, ints(1, 51), ints(64, 1024)),
        key_scales=scales,
    )
    prompts = WindowBatch(
        *(query, keys, table, ints(tokens, tokens), lens, case.window), key_scales=scales
    )
    mass = torch.zeros(keys.shape[:3])
    for known in (None, torch.zeros(query.shape[:2])):
        for kind, first in (("sum", None), ("below_average", ints(0, 0))):
            options = {"kind": kind, "first_queries": first, "log_sum_exp": known}
            mass_triton.add_key_mass(mass, batch, softmax, num_splits=case.splits, **options)
        recent_triton.recent_mass(recent, softmax, distance_weight=1.2, log_sum_exp=known)
        reduction = Reduction(case.reduce, case.pooling)
        triton_ops.window_scores(prompts, softmax, reduction, log_sum_exp=known)
    blend(case, prompts, values, softmax, value_scales=scales)
    kept = torch.zeros(2, heads, 512, dtype=torch.int32)
    rows = words[..., : half // 4], words[..., half // 4 :]
    triton_ops.compact(*rows, table, kept, lens, keeps)


def call_everything(case: Case) -> None:
    """Every public function once, on small CPU tensors of the case's geometry."""
    if case.scaled_rows:
        score_and_compact_scaled_rows(case)
        return

    heads, size, block = case.num_kv_heads, case.head_size, 16
    length, tokens, keep = 2048, 256, 512
    if case.joint:
        pool = torch.zeros(4, heads, block, 2 * size, dtype=case.cache or case.dtype)
        key_cache, value_cache = pool[..., :size], pool[..., size:]
    else:
        key_cache, value_cache = (
            torch.zeros(4, block, heads, size, dtype=case.cache or case.dtype).transpose(1, 2)
            for _ in "kv"
        )
    query = torch.zeros(tokens, heads * case.group, size, dtype=case.dtype)
    softmax = softmax_of(case)
    key = torch.zeros(tokens, heads, size, dtype=case.dtype)
    table = torch.zeros(2, length // block, dtype=torch.int32)
    lens, keeps = ints(length, length), ints(keep, keep)
    triton_ops.reshape_and_cache(
        key, key, key_cache, value_cache, torch.zeros(tokens, dtype=torch.int64)
    )
    lse, out = torch.zeros(query.shape[:2]), torch.empty_like(query)
    batch = AttentionBatch(
        query, key_cache, value_cache, table, ints(0, 1, tokens), lens, ints(0, 0)
    )
    splits = {"num_splits": case.splits}
    mass = torch.zeros(key_cache.shape[:3])
    apart = replace(
        batch, value_cache=torch.zeros_like(value_cache).contiguous(), value_table=table.clone()
    )
    for known in (None, lse):
        triton_ops.paged_attention(out, batch, softmax, **splits, log_sum_exp=known)
        triton_ops.paged_attention(out, apart, softmax, **splits, log_sum_exp=known)
        for kind, first in (("sum", None), ("below_average", ints(0, 0))):
            options = {**splits, "kind": kind, "first_queries": first, "log_sum_exp": known}
            mass_triton.add_key_mass(mass, batch, softmax, **options)
    value_triton.topn_attention(out, batch, softmax, ints(128, 0))
    pages = apart.value_cache
    triton_ops.write_rows(key, pages, torch.zeros(tokens, dtype=torch.int64))
    value_triton.copy_pages(pages, pages.clone(), table, ints(0, 0, 0)[None])
    recent = RecentBatch(
        *(query, key_cache, table, ints(1, tokens), lens, ints(0, 0)),
        *(ints(1, 51), ints(64, 1024)),
    )
    for known in (None, lse):
        recent_triton.recent_mass(recent, softmax, distance_weight=1.2, log_sum_exp=known)
    summarise_and_select(case, query, key_cache, table, softmax)
    ends = ints(tokens, tokens)
    prompts = WindowBatch(query, key_cache, table, ends, lens, case.window)
    reduction = Reduction(case.reduce, case.pooling)
    scores = triton_ops.window_scores(prompts, softmax, reduction)
    reduction = Reduction(case.reduce, "none")
    triton_ops.window_scores(prompts, softmax, reduction, log_sum_exp=lse)
    blend(case, prompts, value_cache, softmax)
    kept = triton_ops.select(scores, lens, keeps, window=case.window, sinks=4)
    triton_ops.compact(key_cache, value_cache, table, kept, lens, keeps)
    triton_ops.copy_blocks(key_cache, value_cache, ints(0, 1), ints(2, 3))
    triton_ops.unrankable(scores, ints(4, 4), lens - case.window)
    if case.dtype != torch.float32:
        fp8 = torch.zeros(4, heads, block, size, dtype=torch.float8_e4m3fn)
        triton_ops.compact(fp8, fp8.clone(), table, kept, lens, keeps)
    gather_tables(table, lens, block, heads)


def gather_tables(table: torch.Tensor, lens: torch.Tensor, block: int, heads: int) -> None:
    """Tables of layers and of KV heads, held apart from the step's (second runner) and in place."""
    slots, starts = torch.zeros(2, dtype=torch.int64), ints(0, 1, 2)
    for lanes in (1, heads):
        places = torch.zeros(1, 64 * lanes, dtype=torch.int64)
        skips, of_rows = slots[:, None].repeat(1, lanes), ints(*[0] * 2 * lanes)[None]
        of_heads = table.repeat(1, lanes)
        for target in (of_heads, table.repeat(lanes, 1)):
            by_slot = target is not of_heads
            groups = TableGroups.of(
                [of_heads], [target], [block], [0], 1, per_layer=lanes, by_slot=by_slot
            )
            rows = StepRows(lens, 2, slots, starts[:2][None]) if by_slot else StepRows(lens, 2)
            if by_slot or lanes == 1:
                triton_tables.gather_tables(groups, rows, skips, of_rows, of_rows.clone())
            triton_lanes.lane_slots(places, groups, rows, starts, 0)
        starts_of_lanes = torch.zeros(2 * lanes + 1, dtype=torch.int32)
        triton_lanes.lane_rows(starts_of_lanes, places[0], starts, lanes)


def blend(
    case: Case,
    prompts: WindowBatch,
    values: torch.Tensor,
    softmax: Softmax,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Score by `observed_expected`, with and without its second score, with both embeddings."""
    ends, lens = prompts.query_ends, prompts.prompt_lens
    inputs, options = (prompts.query, ends, lens), {"queries": case.window, "positions": 512}
    for rotary in (
        None,
        Rotary(torch.zeros(4096, case.head_size, dtype=case.dtype)),
        Rotary(torch.zeros(4096, case.head_size // 2), halves=False),
    ):
        future = blend_triton.future_queries(*inputs, rotary, **options)
    for expected, starts in ((0.0, None), (0.25, ints(0, 0))):
        blend_triton.observed_expected_scores(
            *(prompts, values, softmax, ScoreShape(4, case.window, expected=expected)),
            future=future,
            value_scales=value_scales,
            starts=starts,
        )


def summarise_and_select(
    case: Case,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    table: torch.Tensor,
    softmax: Softmax,
) -> None:
    """Every kind of summary and score, in the model's dtype and in float32."""
    skips, lens, budgets = ints(0, 0), ints(2048, 2048), ints(12, 12)
    rows = PageBatch(query[:2], table, ints(0, 1), lens - 1, skips, 16, max_pages=128)
    softmax, scores = replace(softmax, sliding_window=0), torch.zeros(2, query.shape[1], 128)
    found = PageLists.zeros(2, key_cache.shape[1], 12, query.device)
    for kind, width in SUMMARY_ROWS.items():
        for dtype in {case.dtype, torch.float32}:
            pool = torch.zeros(4, case.num_kv_heads, width * case.head_size, dtype=dtype)
            inputs = (pool, key_cache, table, skips, lens, skips)
            page_triton.summarise_pages(*inputs, kind=kind, max_pages=128)
            for longest in (rows, replace(rows, max_pages=2048)):  # more tiles
                memory = (budgets, scores.new_zeros(2, query.shape[1], 2048), found)
                for keys in (None, key_cache):
                    inputs = (longest, softmax, pool, *memory)
                    page_triton.choose_pages(*inputs, kind=kind, key_cache=keys)
    for combine in COMBINES:
        inputs = (rows, softmax, key_cache, budgets, scores, found)
        page_triton.choose_pages(*inputs, kind="rows", combine=combine)
    batch = AttentionBatch(
        *(query[:2], key_cache, key_cache, found.block_table, ints(0, 1, 2), lens, skips),
        max_query_len=1,
    )
    triton_ops.paged_attention(torch.empty_like(query[:2]), batch, softmax, num_splits=case.splits)


def compile_cases(cases: tuple[Case, ...], architectures: tuple[int, ...]) -> list[Usage]:
    """Compile and measure; a kernel that two cases share is reported once, with the first."""
    usages: list[Usage] = []
    for arch in architectures:
        for case in cases:
            if case.cache == torch.float8_e4m3fn and arch < 89:
                continue  # these have no such type

            def record(name: str, cubin: bytes, shared: int, case: Case = case) -> None:
                registers, spill = resource_usage(cubin)
                usages.append(
                    Usage(name, case.name, arch, driver.warps, registers, spill, shared)  # noqa: B023
                )

            driver = OfflineDriver(arch, record)
            triton_driver.set_active(driver)
            call_everything(case)
    return usages


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--all", action="store_true", help="all geometries, not only the main one")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    cases = MAIN_CASES + (MORE_CASES if options.all else ())
    usages = compile_cases(cases, tuple(options.arch))
    print(f"{'kernel':28}{'sm':>5}{'warps':>7}{'regs':>6}{'spill B':>9}{'shared B':>10}  case")
    for usage in sorted(usages, key=lambda usage: (usage.kernel, usage.case, usage.arch)):
        print(
            f"{usage.kernel:28}{usage.arch:5}{usage.warps:7}{usage.registers:6}"
            f"{usage.spill_bytes:9}{usage.shared_bytes:10}  {usage.case}"
            f"{'' if usage.fits else '  <-- does not fit'}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(usage) for usage in usages], indent=1) + "\n")
    bad = sum(not usage.fits for usage in usages)
    print(f"{len(usages)} kernels compiled, {bad} of them spill or exceed shared memory")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
