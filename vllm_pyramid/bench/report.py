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
        return f"{middle:.2f} ({low:.2f}–{high:.2f})"

    return cell


def _shares(row: Any) -> str:
    """Of prefill in the time, and in brackets what the cost model says of it."""
    measured, predicted = row.prefill_share, row.predicted_prefill_share
    if measured is None:
        return ""
    made = f"{100 * measured:.0f} %"
    return made if predicted is None else f"{made} ({100 * predicted:.0f} %)"


def _megabytes(name: str) -> Cell:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "" if value is None else f"{value / 1e6:,.0f}"

    return cell


def _times(name: str) -> Cell:
    """Median and 99th percentile, if there were requests enough for it."""

    def cell(row: Any) -> str:
        middle, high = getattr(row, f"{name}_p50_ms"), getattr(row, f"{name}_p99_ms")
        if middle is None:
            return ""
        return f"{middle:,.1f}" if high is None else f"{middle:,.1f} ({high:,.1f})"

    return cell


Columns = list[tuple[str, Cell]]

_DECODE: Columns = [
    ("decode tok/s", _number("decode_tokens_per_s")),
    ("of baseline", _ratio("decode")),
    ("allowed", _number("predicted_decode_tokens_per_s")),
    ("batch", _number("decode_batch", 1)),
    ("finish so", _number("to_their_end")),
    ("blocks", _number("decode_blocks")),
    ("V on host, MB", _megabytes("host_bytes")),
]
_LATENCIES: Columns = [
    ("TTFT ms (p99)", _times("ttft")),
    ("of baseline", _ratio("ttft")),
    ("TPOT ms (p99)", _times("tpot")),
    ("of baseline", _ratio("tpot")),
]
_END_TO_END: Columns = [
    ("output tok/s", _number("output_tokens_per_s")),
    ("of baseline", _ratio("output")),
    ("prefill (model)", _shares),
    ("resident", _number("resident_max")),
    ("thrown out", _number("preemptions")),
    ("peak blocks", _number("peak_blocks")),
]
_POOL: Columns = [("pool", _number("pool_prompts", 1))]
# A table with nothing but these is left out.
_NOT_ALONE = ("pool", "rate/s", "resident", "peak blocks", "V on host, MB")
_RATE: Columns = [
    ("rate/s", lambda row: "at once" if row.request_rate is None else f"{row.request_rate:g}")
]
# Looked at twice a second: perhaps there were more in between.
_SAMPLED: Columns = [
    ("running ≥", _number("resident_max")),
    ("blocks ≥", _number("peak_blocks")),
]
# The tables of a measure: a title and columns each, narrow enough for a terminal.
_TABLES: dict[str, list[tuple[str, Columns]]] = {
    "throughput": [
        ("end to end", _END_TO_END),
        ("steady decode, all prompts prefilled", _DECODE),
        ("all requests sent at once", _LATENCIES),
    ],
    "capacity": [
        (
            "requests that fit",
            [
                ("decode at once", _number("resident_max")),
                ("finish so", _number("to_their_end")),
                ("by the cost model", _number("predicted_resident")),
                ("before one waits", _number("before_queueing")),
                ("blocks", _number("decode_blocks")),
                ("peak blocks", _number("peak_blocks")),
                ("V on host, MB", _megabytes("host_bytes")),
            ],
        )
    ],
    "latency": [("over HTTP", [*_RATE, *_LATENCIES, *_SAMPLED])],
    "pressure": [
        ("end to end", [*_POOL, *_END_TO_END]),
        ("steady decode", [*_POOL, *_DECODE]),
        ("all requests sent at once", [*_POOL, *_LATENCIES]),
    ],
    "scheduler": [
        (
            "a decode step",
            [
                ("layers", _number("layers")),
                ("requests", _number("requests")),
                ("schedule() ms", _number("schedule_ms", 2)),
                ("ratio", _number("schedule_ratio", 2)),
                ("step ms", _number("step_ms", 2)),
                ("ratio", _number("step_ratio", 2)),
            ],
        )
    ],
}


def tables(measure: str, rows: Sequence[Any]) -> list[Table]:
    """The tables of a measure; columns in which nothing stands are left out, and empty tables."""
    first = rows[0]
    if isinstance(first, Row):
        job = f"{first.num_prompts} requests of {first.prompt_len:,} + {first.output_len} tokens"
        if first.pool_prompts is not None and measure != "pressure":
            job += f", room for {first.pool_prompts:g} whole ones"
        heading, repetitions, names = "policy", first.repetitions, [row.label for row in rows]
    else:
        job, heading = "", "scheduler"
        repetitions, names = first.steps, [row.scheduler for row in rows]
    made = []
    for title, columns in _TABLES[measure]:
        filled = [(name, [cell(row) for row in rows]) for name, cell in columns]
        filled = [(name, cells) for name, cells in filled if any(cells)]
        if not any(name not in _NOT_ALONE for name, _ in filled):
            continue
        medians = "" if measure == "capacity" else f"medians of {repetitions}"
        table = Table(title=": ".join((title, "; ".join(filter(None, (job, medians))))))
        table.add_column(heading, no_wrap=True)
        for name, _ in filled:
            table.add_column(name, justify="right")
        for index, name in enumerate(names):
            table.add_row(name, *(cells[index] for _, cells in filled))
        made.append(table)
    return made
