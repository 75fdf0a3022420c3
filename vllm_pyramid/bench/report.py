# SPDX-License-Identifier: Apache-2.0
"""The tables of a bench in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from vllm_pyramid.bench.rows import Row

__all__ = ["tables"]

Cell = Callable[[Any], str]


def _number(name: str, digits: int = 0) -> Cell:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "" if value is None else f"{value:,.{digits}f}"

    return cell


def _ratio(name: str) -> Cell:
    """The median, and from where to where the repetitions go."""

    def cell(row: Any) -> str:
        middle = getattr(row, f"{name}_ratio")
        if middle is None:
            return ""
        low, high = getattr(row, f"{name}_ratio_low"), getattr(row, f"{name}_ratio_high")
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    return cell


def _percent(name: str) -> Cell:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "" if value is None else f"{100 * value:.0f} %"

    return cell


def _times(name: str) -> Cell:
    """Median and 99th percentile."""

    def cell(row: Any) -> str:
        middle, high = getattr(row, f"{name}_p50_ms"), getattr(row, f"{name}_p99_ms")
        return "" if middle is None else f"{middle:,.1f} / {high:,.1f}"

    return cell


_DECODE: list[tuple[str, Cell]] = [
    ("decode tok/s", _number("decode_tokens_per_s")),
    ("of baseline", _ratio("decode")),
    ("allowed", _number("predicted_decode_tokens_per_s")),
    ("batch", _number("decode_batch", 1)),
]
_LATENCIES: list[tuple[str, Cell]] = [
    ("TTFT ms, p50 / p99", _times("ttft")),
    ("TPOT ms, p50 / p99", _times("tpot")),
]
_COLUMNS: dict[str, list[tuple[str, Cell]]] = {
    "throughput": [
        ("output tok/s", _number("output_tokens_per_s")),
        ("of baseline", _ratio("output")),
        *_DECODE,
        ("prefill", _percent("prefill_share")),
        ("resident", _number("resident_max")),
        ("peak blocks", _number("peak_blocks")),
        *_LATENCIES,
    ],
    "capacity": [
        ("resident", _number("resident_max")),
        ("by the model", _number("predicted_resident")),
        ("before one waits", _number("before_queueing")),
        ("blocks", _number("decode_blocks")),
    ],
    "latency": [
        (
            "rate/s",
            lambda row: "all at once" if row.request_rate is None else f"{row.request_rate:g}",
        ),
        *_LATENCIES,
        ("TTFT of baseline", _ratio("ttft")),
        ("TPOT of baseline", _ratio("tpot")),
        ("output tok/s", _number("output_tokens_per_s")),
    ],
    "pressure": [
        ("pool, requests", _number("pool_prompts", 1)),
        ("output tok/s", _number("output_tokens_per_s")),
        ("of baseline", _ratio("output")),
        *_DECODE,
        ("resident", _number("resident_max")),
        ("TTFT of baseline", _ratio("ttft")),
        ("TPOT of baseline", _ratio("tpot")),
    ],
    "scheduler": [
        ("layers", _number("layers")),
        ("requests", _number("requests")),
        ("schedule() ms", _number("schedule_ms", 2)),
        ("of one group", _number("schedule_ratio", 2)),
        ("whole step ms", _number("step_ms", 2)),
        ("of one group", _number("step_ratio", 2)),
    ],
}


def tables(measure: str, rows: Sequence[Any]) -> list[Table]:
    """One table; columns in which nothing stands are left out."""
    first = rows[0]
    if isinstance(first, Row):
        pool = "" if first.pool_prompts is None else f", room for {first.pool_prompts:g} whole ones"
        title = (
            f"{measure}: {first.num_prompts} requests of {first.prompt_len:,} + {first.output_len} "
            f"tokens{pool if measure != 'pressure' else ''}; medians of {first.repetitions}"
        )
        table = Table(title=title)
        table.add_column("policy", no_wrap=True)
        names = [row.label for row in rows]
    else:
        table = Table(title=f"scheduler: medians of {first.steps} decode steps")
        table.add_column("scheduler", no_wrap=True)
        names = [row.scheduler for row in rows]
    columns = [(heading, [cell(row) for row in rows]) for heading, cell in _COLUMNS[measure]]
    columns = [(heading, cells) for heading, cells in columns if any(cells)]
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for index, name in enumerate(names):
        table.add_row(name, *(cells[index] for _, cells in columns))
    return [table]
