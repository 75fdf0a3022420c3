# SPDX-License-Identifier: Apache-2.0
"""The pictures of a run: needle heat maps, quality against memory, budgets and recall by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_pyramid.eval.results import Row
from vllm_pyramid.eval.run import Answer

__all__ = ["draw"]

_MARKERS = "os^Dv*XP<>"
_LINES = ("-", "--", "-.", ":")


def draw(answers: Sequence[Answer], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the pictures that the run has data for; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"quality-against-memory.png": _quality(rows)}
    needles = [answer for answer in answers if "depth" in answer.sample.facts]
    if needles:
        figures["needle.png"] = _needle(needles)
    figures["kept-by-layer.png"] = _by_layer(
        answers, "tokens kept, share of the prompt", lambda a: _kept_share(a)
    )
    traced = [answer for answer in answers if answer.task.needs_recall]
    if traced:
        figures["recall-by-layer.png"] = _by_layer(
            traced, "attention recall", lambda a: [float(np.mean(h)) for h in a.result.recall or []]
        )
    paths = []
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
        paths.append(folder / name)
    return paths


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
    """Colour, marker and line of a plot's policy; ten look different by colour, forty by line."""
    return {
        "color": f"C{place % 10}",
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": _LINES[place // 10 % len(_LINES)],
    }


def _quality(rows: Sequence[Row]) -> Any:
    groups = [
        (row.task, row.length, index)
        for row in {(row.task, row.length): row for row in rows}.values()
        for index in range(len(row.scores))
    ]
    figure, axes = _subplots(len(groups), 3.4, 2.8)
    policies = list(dict.fromkeys(row.policy for row in rows))
    for axis, (task, length, index) in zip(axes, groups, strict=True):
        group = [row for row in rows if (row.task, row.length) == (task, length)]
        for place, policy in enumerate(policies):
            line = sorted((row for row in group if row.policy == policy), key=lambda r: r.memory)
            memory = [100 * row.memory for row in line]
            scores = [row.scores[index].mean for row in line]
            if len(line) == 1 and line[0].budget == "100%":
                axis.axhline(scores[0], color="black", linewidth=0.8, linestyle=":", label=policy)
                continue
            axis.errorbar(
                memory,
                scores,
                [row.scores[index].spread or 0.0 for row in line],
                **_style(place),
                markersize=4,
                linewidth=1,
                label=policy,
            )
        axis.set_title(f"{task}, {group[0].prompts}", fontsize=9)
        axis.set_xlabel("cache blocks held, %", fontsize=8)
        axis.set_ylabel(group[0].scores[index].metric, fontsize=8)
        axis.set_xscale("log")
        axis.tick_params(labelsize=7)
        axis.minorticks_off()
        by_budget: dict[str, list[float]] = {}
        for row in group:
            if row.budget != "100%":
                by_budget.setdefault(row.budget, []).append(100 * row.memory)
        ticks = [float(np.mean(memory)) for memory in by_budget.values()]
        if ticks:
            axis.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    axes[0].legend(fontsize=7)
    return figure


def _needle(answers: Sequence[Answer]) -> Any:
    """Depth by length, one map for each policy and budget, as the needle test is usually drawn."""
    maps = list(dict.fromkeys((answer.policy, answer.budget) for answer in answers))
    lengths = sorted({answer.length for answer in answers})
    depths = sorted({answer.sample.facts["depth"] for answer in answers})
    figure, axes = _subplots(len(maps), 2.4, 2.6)
    for axis, (policy, budget) in zip(axes, maps, strict=True):
        total = np.zeros((len(depths), len(lengths)))
        count = np.zeros_like(total)
        for answer in answers:
            if (answer.policy, answer.budget) == (policy, budget):
                cell = depths.index(answer.sample.facts["depth"]), lengths.index(answer.length)
                total[cell] += answer.score
                count[cell] += 1
        with np.errstate(invalid="ignore"):
            image = axis.imshow(total / count, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_title(f"{policy}, {budget}: {total.sum() / count.sum():.2f}", fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    axes[0].set_ylabel("depth of the fact", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label="exact match")
    return figure


def _kept_share(answer: Answer) -> list[float]:
    return [kept / answer.result.computed_tokens for kept in answer.result.kept_tokens]


def _by_layer(answers: Sequence[Answer], label: str, values: Any) -> Any:
    """The mean over the prompts, with its range, layer by layer; one plot a budget."""
    budgets = [b for b in dict.fromkeys(answer.budget for answer in answers) if b != "100%"]
    figure, axes = _subplots(max(1, len(budgets)), 3.2, 2.6)
    for axis, budget in zip(axes, budgets or ["100%"], strict=True):
        group = [answer for answer in answers if answer.budget == budget]
        for index, policy in enumerate(dict.fromkeys(answer.policy for answer in group)):
            lines = np.array([values(answer) for answer in group if answer.policy == policy])
            layers = np.arange(lines.shape[1])
            style = _style(index)
            axis.plot(layers, lines.mean(axis=0), **style, markersize=3, label=policy)
            axis.fill_between(
                layers, lines.min(axis=0), lines.max(axis=0), color=style["color"], alpha=0.15
            )
        axis.set_title(f"budget {budget}", fontsize=9)
        axis.set_xlabel("layer, from the input", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    axes[0].set_ylabel(label, fontsize=8)
    axes[0].legend(fontsize=7)
    return figure
