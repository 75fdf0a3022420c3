# SPDX-License-Identifier: Apache-2.0
"""The pictures of a run: needle heat maps, quality against memory, budgets and recall by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.eval.run import Answer
from lab.eval.tables import titled
from vllm_pyramid.tools.eval.result import EvictionReport

_MARKERS = "os^Dv*XP<>"
_LINES = ("-", "--", "-.", ":")


def draw(answers: Sequence[Answer], rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Write the pictures that the run has data for; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"quality-against-memory.png": _quality(rows)}
    if needles := [answer for answer in answers if "depth" in answer.sample.facts]:
        figures["needle.png"] = _needle(needles)
    figures["kept-by-layer.png"] = _by_layer(
        answers, "tokens kept, share of the prompt", lambda a: kept_shares(a.result.eviction)
    )
    if traced := [answer for answer in answers if answer.task.needs_recall]:
        figures["recall-by-layer.png"] = _by_layer(
            traced, "attention recall", lambda a: [float(np.mean(h)) for h in a.result.recall or []]
        )
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
    return [folder / name for name in figures]


def kept_shares(eviction: EvictionReport) -> list[float]:
    """Return the share of the tokens that each layer keeps, the mean of its KV heads."""
    lanes = eviction.kv_heads or 1
    firsts, whole = range(0, len(eviction.kept_tokens), lanes), eviction.computed_tokens * lanes
    return [sum(eviction.kept_tokens[row : row + lanes]) / whole for row in firsts]


def _subplots(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(count, 4)
    lines = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _style(place: int) -> dict[str, str]:
    """Return colour, marker and line of a policy; ten differ by colour, forty by line."""
    return {
        "color": f"C{place % 10}",
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": _LINES[place // 10 % len(_LINES)],
    }


def _quality(rows: pd.DataFrame) -> Any:
    scores = titled(rows)
    policies = list(scores["policy"].unique())
    figure, axes = _subplots(scores["title"].nunique(), 3.4, 2.8)
    for axis, (_, group) in zip(axes, scores.groupby("title", sort=False), strict=True):
        for policy, line in group.groupby("policy", sort=False):
            if list(line["budget"]) == ["100%"]:
                level = line["score"].iloc[0]
                axis.axhline(level, color="black", linewidth=0.8, linestyle=":", label=policy)
                continue
            line = line.sort_values("memory")
            errors = [(line["score"] - line[end]).abs().fillna(0.0) for end in ("low", "high")]
            style = {**_style(policies.index(policy)), "markersize": 4, "linewidth": 1}
            axis.errorbar(100 * line["memory"], line["score"], errors, label=policy, **style)
        first = group.iloc[0]
        axis.set_title(f"{first['task']}, {first['prompts']}", fontsize=9)
        axis.set_xlabel("cache blocks held, %", fontsize=8)
        axis.set_ylabel(first["metric"], fontsize=8)
        axis.set_xscale("log")
        axis.tick_params(labelsize=7)
        axis.minorticks_off()
        evicted = group[group["budget"] != "100%"]
        if len(ticks := 100 * evicted.groupby("budget", sort=False)["memory"].mean()):
            axis.set_xticks(list(ticks), [f"{tick:.2g}" for tick in ticks])
    axes[0].legend(fontsize=7)
    return figure


def _needle(answers: Sequence[Answer]) -> Any:
    """Draw depth by length, one map for each policy and budget, as the needle test is drawn."""
    table = pd.DataFrame(
        {
            "map": f"{answer.policy}, {answer.budget}",
            "depth": answer.sample.facts["depth"],
            "length": answer.length,
            "score": answer.task.score(answer.sample, answer.result),
        }
        for answer in answers
    )
    figure, axes = _subplots(table["map"].nunique(), 2.4, 2.6)
    for axis, (name, group) in zip(axes, table.groupby("map", sort=False), strict=True):
        cells = group.pivot_table(index="depth", columns="length", values="score")
        image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_title(f"{name}: {group['score'].mean():.2f}", fontsize=8)
        lengths = [f"{length:,}" for length in cells.columns]
        axis.set_xticks(range(len(lengths)), lengths, fontsize=7)
        axis.set_yticks(range(len(cells)), [f"{depth:.0%}" for depth in cells.index], fontsize=7)
    axes[0].set_ylabel("depth of the fact", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label="exact match")
    return figure


def _by_layer(
    answers: Sequence[Answer], label: str, values: Callable[[Answer], list[float]]
) -> Any:
    """Draw the mean over the prompts, with its range, layer by layer; one plot per budget."""
    budgets = [b for b in dict.fromkeys(answer.budget for answer in answers) if b != "100%"]
    figure, axes = _subplots(max(1, len(budgets)), 3.2, 2.6)
    for axis, budget in zip(axes, budgets or ["100%"], strict=True):
        those = [answer for answer in answers if answer.budget == budget]
        for place, policy in enumerate(dict.fromkeys(answer.policy for answer in those)):
            table = pd.DataFrame([values(answer) for answer in those if answer.policy == policy])
            axis.plot(table.columns, table.mean(), **_style(place), markersize=3, label=policy)
            axis.fill_between(
                table.columns, table.min(), table.max(), color=f"C{place % 10}", alpha=0.15
            )
        axis.set_title(f"budget {budget}", fontsize=9)
        axis.set_xlabel("layer, from the input", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    axes[0].set_ylabel(label, fontsize=8)
    axes[0].legend(fontsize=7)
    return figure
