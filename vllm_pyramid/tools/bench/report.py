# SPDX-License-Identifier: Apache-2.0
"""What a bench writes: tables on the console; JSON, CSV and pictures in its folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

import pandas as pd
from rich.table import Table

import vllm_pyramid
from vllm_pyramid.tools.bench import pictures
from vllm_pyramid.tools.bench.options import MeasureOptions
from vllm_pyramid.tools.bench.prepare import processor
from vllm_pyramid.tools.bench.results import as_json, labelled
from vllm_pyramid.tools.bench.samples import now
from vllm_pyramid.tools.command_parts import has_matplotlib

# The lines of a table, in order. Those of a ratio have the range of the repetitions too.
_LINES = {
    "output_tokens_per_s": "output tok/s, end to end",
    "output_ratio": "  of baseline",
    "prefill_share": "share of prefill",
    "predicted_prefill_share": "  by the cost model",
    "decode_tokens_per_s": "decode tok/s, steady",
    "decode_ratio": "  of baseline",
    "predicted_decode_tokens_per_s": "  allowed",
    "decode_batch": "decode batch",
    "resident_max": "requests at once",
    "to_their_end": "  finish without preemption",
    "predicted_resident": "  by the cost model",
    "before_queueing": "before one waits",
    "preemptions": "preempted",
    "cached_share": "share of prompts in the cache",
    "ttft_miss_ms": "TTFT ms, nothing there",
    "ttft_hit_ms": "TTFT ms, something there",
    "ttft_p50_ms": "TTFT ms, median",
    "ttft_p99_ms": "  99th percentile",
    "ttft_ratio": "  of baseline",
    "tpot_p50_ms": "TPOT ms, median",
    "tpot_p99_ms": "  99th percentile",
    "tpot_ratio": "  of baseline",
    "decode_blocks": "blocks, decoding",
    "peak_blocks": "blocks, at most",
    "host_bytes": "V on host, bytes",
    "schedule_ms": "schedule() ms",
    "schedule_ratio": "  of the first",
    "step_ms": "step ms",
    "step_ratio": "  of the first",
}
# Of the requests of a row, or of the layers and requests of a scheduler: a table for each.
_CONDITIONS = {
    "pool_prompts": "room for {:g} whole requests",
    "request_rate": "{:g} requests/s",
    "layers": "{} layers",
    "requests": "{} requests",
}


def _number(value: float) -> str:
    if pd.isna(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _cell(row: Mapping[str, Any], name: str) -> str:
    text = _number(row[name])
    if text and f"{name}_low" in row:
        text = f"{row[name]:.2f} ({row[f'{name}_low']:.2f}–{row[f'{name}_high']:.2f})"
    return text


def tables(rows: pd.DataFrame) -> list[Table]:
    """A table for each condition: variants (or schedulers) side by side, without empty lines."""
    label = "scheduler" if "scheduler" in rows else "label"
    rows = rows if label in rows else labelled(rows)
    present = {name: form for name, form in _CONDITIONS.items() if name in rows}
    made = []
    for values, group in rows.groupby(list(present), sort=False, dropna=False):
        title = [
            form.format(value)
            for value, form in zip(cast("tuple[Any, ...]", values), present.values(), strict=True)
            if not pd.isna(value)
        ]
        row = group.iloc[0]
        if "num_prompts" in row:
            size = f"{row['prompt_len']:,} + {row['output_len']} tokens"
            talks = f"conversations of {row['turns']} turns, the last" if row["turns"] > 1 else ""
            title = [f"{row['num_prompts']} {talks or 'requests'} of {size}", *title]
            if row["shared_len"]:
                title.append(f"{row['shared_len']:,} tokens shared by all")
            title.append(f"medians of {row['repetitions']}")
        records = cast("list[dict[str, Any]]", group.to_dict("records"))
        lines = [
            [heading, *(_cell(one, name) for one in records)]
            for name, heading in _LINES.items()
            if name in group and group[name].notna().any()
        ]
        made.append(rich_table("; ".join(title), ["", *group[label]], lines))
    return made


def rich_table(title: str, headings: Iterable[str], lines: Iterable[Iterable[str]]) -> Table:
    """A table of text, with the first column to the left."""
    table = Table(title=title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    for line in lines:
        table.add_row(*line)
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
    for table in tables(rows):
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
