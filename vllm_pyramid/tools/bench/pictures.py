# SPDX-License-Identifier: Apache-2.0
"""The pictures of a bench: lines over a sweep, or bars with the range of the repetitions."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from vllm_pyramid.tools.bench.results import labelled

TITLES = {
    "output_tokens_per_s": "output tokens/s, end to end",
    "output_ratio": "times the baseline's output tokens/s",
    "decode_tokens_per_s": "decode tokens/s, all prompts prefilled",
    "resident_max": "requests that decode at once",
    "cached_share": "share of prompts in the cache",
    "ttft_p50_ms": "time to the first token, median, ms",
    "tpot_p50_ms": "time per token, median, ms",
    "step_ms": "scheduler, ms a step",
}
# Of a measure: what is shown, over what (nothing: bars).
_SHOWN: dict[str, tuple[list[str], str]] = {
    "throughput": (["output_tokens_per_s", "decode_tokens_per_s", "resident_max"], ""),
    "capacity": (["resident_max"], ""),
    "pressure": (["output_tokens_per_s", "output_ratio", "resident_max"], "pool_prompts"),
    "prefix": (["output_tokens_per_s", "ttft_p50_ms", "cached_share"], "pool_prompts"),
    "latency": (["ttft_p50_ms", "tpot_p50_ms"], "request_rate"),
    "scheduler": (["step_ms"], "requests"),
}


def draw(measure: str, rows: pd.DataFrame, folder: Path) -> Path:
    """Write the picture of a measure; returns its path."""
    from matplotlib.figure import Figure

    columns, over = _SHOWN[measure]
    label = ["scheduler", "layers"] if measure == "scheduler" else "label"
    rows = rows if measure == "scheduler" else labelled(rows)
    columns = [name for name in columns if rows[name].notna().any()]
    if over and rows[over].nunique() < 2:
        over = ""
    figure = Figure(figsize=(4.5 * len(columns), 3.2), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for axis, name in zip(axes, columns, strict=True):
        if over:
            lines = rows.astype({name: float}).pivot_table(name, over, label, sort=False)
            lines.sort_index().plot(ax=axis, marker="o", legend=name == columns[0])
            axis.set_ylim(bottom=0)
        else:
            bars = rows.astype({name: float}).set_index(label)
            low, high = (f"{name.removesuffix('_tokens_per_s')}_{end}" for end in ("low", "high"))
            errors = None
            if low in bars:
                errors = [[bars[name] - bars[low], bars[high] - bars[name]]]
            bars[[name]].plot.barh(ax=axis, xerr=errors, capsize=3, legend=False, xlabel="")
            axis.invert_yaxis()
            axis.set_ylabel("")
        if over == "pool_prompts":
            axis.set_xscale("log", base=2)
            axis.invert_xaxis()
        axis.set_title(TITLES[name], fontsize=9)
        axis.tick_params(labelsize=7)
    path = folder / f"{measure}.png"
    figure.savefig(path, dpi=120)
    return path
