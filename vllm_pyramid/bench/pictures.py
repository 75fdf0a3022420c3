# SPDX-License-Identifier: Apache-2.0
"""The pictures of a bench: bars with the spread of the repetitions, and lines over a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_MARKERS = "os^Dv*XP<>"


def draw(measure: str, rows: Sequence[Any], folder: Path) -> list[Path]:
    """Write the picture of a measure; returns its path."""
    figure = {
        "throughput": _bars,
        "capacity": _bars,
        "pressure": _pressure,
        "latency": _latency,
        "scheduler": _scheduler,
    }[measure](rows)
    path = folder / f"{measure}.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return [path]


def _figure(count: int, width: float = 4.0) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, 3.2), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0].tolist()


def _bars(rows: Sequence[Any]) -> Any:
    kinds = [
        ("output_tokens_per_s", "output", "output tokens/s, end to end"),
        ("decode_tokens_per_s", "decode", "decode tokens/s, all prompts prefilled"),
        ("resident_max", "", "requests that decode at once"),
    ]
    present = [kind for kind in kinds if any(getattr(row, kind[0]) is not None for row in rows)]
    figure, axes = _figure(len(present))
    names = [row.label for row in rows]
    for axis, (field, spread, title) in zip(axes, present, strict=True):
        values = [getattr(row, field) or 0 for row in rows]
        errors = None
        if spread:
            low = [
                v - (getattr(r, f"{spread}_low") or v) for v, r in zip(values, rows, strict=True)
            ]
            high = [
                (getattr(r, f"{spread}_high") or v) - v for v, r in zip(values, rows, strict=True)
            ]
            errors = [low, high]
        axis.barh(names, values, xerr=errors, color="C0", capsize=3)
        axis.invert_yaxis()
        if field == "decode_tokens_per_s":
            for place, row in enumerate(rows):
                if row.predicted_decode_tokens_per_s is not None:
                    axis.plot(row.predicted_decode_tokens_per_s, place, "k|", markersize=14)
            title += "\n(black: what memory and arithmetic allow)"
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
    return figure


def _lines(axis: Any, rows: Sequence[Any], x: str, y: str, label: str) -> None:
    for index, name in enumerate(dict.fromkeys(getattr(row, label) for row in rows)):
        line = [row for row in rows if getattr(row, label) == name]
        line = sorted((r for r in line if getattr(r, x) is not None), key=lambda r: getattr(r, x))
        values = [getattr(row, y) for row in line]
        marker = _MARKERS[index % len(_MARKERS)]
        axis.plot([getattr(r, x) for r in line], values, marker=marker, markersize=4, label=name)
    axis.tick_params(labelsize=7)


def _pressure(rows: Sequence[Any]) -> Any:
    figure, axes = _figure(3)
    kinds = [
        ("output_tokens_per_s", "output tokens/s, end to end"),
        ("output_ratio", "times the baseline's output tokens/s"),
        ("resident_max", "requests that decode at once"),
    ]
    for axis, (field, title) in zip(axes, kinds, strict=True):
        _lines(axis, rows, "pool_prompts", field, "label")
        axis.set_xscale("log", base=2)
        axis.invert_xaxis()
        axis.set_xlabel("whole requests that the cache has room for", fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.set_ylim(bottom=0)
    axes[1].axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize=7)
    return figure


def _latency(rows: Sequence[Any]) -> Any:
    at_rates = [row for row in rows if row.request_rate is not None]
    if len({row.request_rate for row in at_rates}) < 2:
        figure, axes = _figure(2)
        for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
            names = [row.label for row in rows]
            axis.barh(names, [getattr(row, f"{metric}_p50_ms") for row in rows])
            axis.invert_yaxis()
            axis.set_title(f"{metric.upper()}, median, ms", fontsize=9)
            axis.tick_params(labelsize=7)
        return figure
    fields = [f"{metric}_{p}_ms" for metric in ("ttft", "tpot") for p in ("p50", "p99")]
    fields = [field for field in fields if any(getattr(row, field) is not None for row in rows)]
    figure, axes = _figure(len(fields), 3.4)
    for axis, field in zip(axes, fields, strict=True):
        _lines(axis, at_rates, "request_rate", field, "label")
        axis.set_xlabel("requests/s", fontsize=8)
        axis.set_title(field.replace("_", " "), fontsize=9)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    return figure


def _scheduler(rows: Sequence[Any]) -> Any:
    layers = sorted({row.layers for row in rows})
    figure, axes = _figure(len(layers))
    for axis, number in zip(axes, layers, strict=True):
        some = [row for row in rows if row.layers == number]
        _lines(axis, some, "requests", "step_ms", "scheduler")
        axis.set_xlabel("running requests", fontsize=8)
        axis.set_title(f"{number} layers: ms a step", fontsize=9)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    return figure
