# SPDX-License-Identifier: Apache-2.0
"""What a bench writes: tables on the console; JSON, CSV and pictures in its folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

import pandas as pd
from rich.table import Table

import vllm_pyramid
from vllm_pyramid.bench import pictures
from vllm_pyramid.bench.options import MeasureOptions
from vllm_pyramid.bench.prepare import processor
from vllm_pyramid.bench.results import as_json, labelled
from vllm_pyramid.bench.samples import now
from vllm_pyramid.command_parts import has_matplotlib


def _ratio(name: str) -> tuple[str, str]:
    """The median, and the range of the repetitions."""
    return (
        "of baseline",
        f"{{{name}_ratio:.2f}} ({{{name}_ratio_low:.2f}}–{{{name}_ratio_high:.2f}})",
    )


def _times(heading: str, name: str) -> tuple[str, ...]:
    """Median and 99th percentile; the median alone where there is no 99th."""
    middle = f"{{{name}_p50_ms:,.1f}}"
    return heading, f"{middle} ({{{name}_p99_ms:,.1f}})", middle


# A column: its heading, and formats. A cell has the first format whose values are all there.
Column = tuple[str, ...]
_DECODE: list[Column] = [
    ("decode tok/s", "{decode_tokens_per_s:,.0f}"),
    _ratio("decode"),
    ("allowed", "{predicted_decode_tokens_per_s:,.0f}"),
    ("batch", "{decode_batch:.1f}"),
    ("finish so", "{to_their_end}"),
    ("blocks", "{decode_blocks:,}"),
    ("V on host, MB", "{host_mb:,.0f}"),
]
_LATENCIES: list[Column] = [
    _times("TTFT ms (p99)", "ttft"),
    _ratio("ttft"),
    _times("TPOT ms (p99)", "tpot"),
    _ratio("tpot"),
]
_END_TO_END: list[Column] = [
    ("output tok/s", "{output_tokens_per_s:,.0f}"),
    _ratio("output"),
    (
        "prefill (model)",
        "{prefill_share:.0%} ({predicted_prefill_share:.0%})",
        "{prefill_share:.0%}",
    ),
    ("resident", "{resident_max}"),
    ("preempted", "{preemptions}"),
    ("peak blocks", "{peak_blocks:,}"),
]
_CAPACITY: list[Column] = [
    ("decode at once", "{resident_max}"),
    ("finish so", "{to_their_end}"),
    ("by the cost model", "{predicted_resident}"),
    ("before one waits", "{before_queueing}"),
    ("blocks", "{decode_blocks:,}"),
    ("peak blocks", "{peak_blocks:,}"),
    ("V on host, MB", "{host_mb:,.0f}"),
]
_POOL: Column = ("pool", "{pool_prompts:,.1f}")
_RATE: Column = ("rate/s", "{request_rate:g}", "at once")
# Seen twice a second; there may have been more in between.
_SEEN: list[Column] = [("running ≥", "{resident_max}"), ("blocks ≥", "{peak_blocks:,}")]
_SCHEDULER: list[Column] = [
    ("layers", "{layers}"),
    ("requests", "{requests}"),
    ("schedule() ms", "{schedule_ms:.2f}"),
    ("ratio", "{schedule_ratio:.2f}"),
    ("step ms", "{step_ms:.2f}"),
    ("ratio", "{step_ratio:.2f}"),
]
# The tables of a measure, each narrow enough for a terminal.
_TABLES: dict[str, dict[str, list[Column]]] = {
    "throughput": {
        "end to end": _END_TO_END,
        "steady decode, all prompts prefilled": _DECODE,
        "all requests sent at once": _LATENCIES,
    },
    "capacity": {"requests that fit": _CAPACITY},
    "latency": {"over HTTP": [_RATE, *_LATENCIES, *_SEEN]},
    "pressure": {
        "end to end": [_POOL, *_END_TO_END],
        "steady decode": [_POOL, *_DECODE],
        "all requests sent at once": [_POOL, *_LATENCIES],
    },
    "scheduler": {"a decode step": _SCHEDULER},
}
# A table with nothing but these is left out.
_NOT_ALONE = {"pool", "rate/s", "resident", "peak blocks", "V on host, MB"}


def _cell(row: Mapping[str, Any], formats: Iterable[str]) -> str:
    for form in formats:
        fields = [name for _, name, _, _ in Formatter().parse(form) if name]
        if not any(pd.isna(row[name]) for name in fields):
            return form.format_map(row)
    return ""


def tables(measure: str, rows: pd.DataFrame) -> list[Table]:
    """The tables of a measure, without empty columns."""
    first = rows.iloc[0]
    if measure == "scheduler":
        heading, labels, job, repetitions = "scheduler", rows["scheduler"], [], first["steps"]
    else:
        heading, labels, repetitions = "policy", labelled(rows)["label"], first["repetitions"]
        rows = rows.assign(host_mb=rows["host_bytes"] / 1e6)
        size = f"{first['prompt_len']:,} + {first['output_len']} tokens"
        job = [f"{first['num_prompts']} requests of {size}"]
        if measure != "pressure":
            job[0] += f", room for {first['pool_prompts']:g} whole ones"
    medians = [] if measure == "capacity" else [f"medians of {repetitions}"]
    made = []
    for title, columns in _TABLES[measure].items():
        cells = [(name, [_cell(row, forms) for row in rows.to_dict("records")])
                 for name, *forms in columns]  # fmt: skip
        filled = [(name, column) for name, column in cells if any(column)]
        if {name for name, _ in filled} - _NOT_ALONE:
            title = f"{title}: {'; '.join([*job, *medians])}"
            made.append(rich_table(title, [(heading, labels.tolist()), *filled]))
    return made


def rich_table(title: str, columns: Iterable[tuple[str, Iterable[str]]]) -> Table:
    """A table of text, the first column to the left."""
    table, cells = Table(title=title), []
    for index, (heading, column) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
        cells.append(list(column))
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table


def say(console: Any, text: str) -> None:
    """A sentence, as long as it is."""
    console.print(text, highlight=False, soft_wrap=True)


def write(
    measure: str, options: MeasureOptions, console: Any, rows: pd.DataFrame, about: dict[str, Any]
) -> None:
    """Tables on the console; JSON, CSV and a picture in files.

    Args:
        about: what was run. Its `measured` says when and where each repetition was, if known.
    """
    about = {
        "version": vllm_pyramid.__version__,
        "date": now(),
        "command": shlex.join(["vllm-pyramid", *sys.argv[1:]]),
        "processor": processor(),
        **about,
    }
    for path in (options.out / f"{measure}.json", options.json_file):
        if path is not None:
            path.write_text(as_json(rows, about), encoding="utf-8")
    for path in (options.out / f"{measure}.csv", options.csv_file):
        if path is not None:
            rows.to_csv(path, index=False)
    for table in tables(measure, rows):
        console.print(table)
    say(console, _when_and_where(about))
    written = [f"{measure}.json", f"{measure}.csv"]
    if not options.no_pictures:
        if has_matplotlib():
            written.append(pictures.draw(measure, rows, options.out).name)
        else:
            console.print(
                "No pictures: they need matplotlib (pip install 'vllm-pyramid\\[bench]')."
            )
    say(console, f"In {options.out}: {', '.join(written)}.")


def _when_and_where(about: Mapping[str, Any]) -> str:
    """Of all repetitions."""
    measured = about.get("measured") or [about]
    first, last = (measured[index]["date"][:16].replace("T", " ") for index in (0, -1))
    places = ", ".join(dict.fromkeys(place["processor"] for place in measured))
    return f"Measured {first if first == last else f'{first} to {last}'} UTC on {places}."
