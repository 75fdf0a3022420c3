# SPDX-License-Identifier: Apache-2.0
"""Tables of what `gates.py` wrote, with 95 % bootstrap intervals over the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from report import DRAWS, PROMPT, by_task, cell, markdown, spread

_CAUGHT = 0.8  # of the differing tokens, where false alarms are counted
_DRAFTS = {
    "streaming-llm": "sinks and recent tokens",
    "pages: spread": "pages by `spread`",
    "pages: exact": "pages by their attention (ceiling)",
    "snapkv-expected": "`auto`",
}
_SCORES = ("box", "spread", "mean", "representative", "exact")
Floats = npt.NDArray[np.float64]


class GateRows:
    """The files of a folder, at one length and seed, of some tasks."""

    def __init__(self, folder: Path, length: int, seed: int, tasks: list[str]) -> None:
        frames = [pd.read_csv(folder / f"{name}.csv") for name in ("gates", "meter", "tiles")]
        some = [
            f[(f["length"] == length) & (f["seed"] == seed) & f["task"].isin(tasks)] for f in frames
        ]
        self.ways, self.meter, self.tiles = some

    def prompts(self) -> str:
        """Count the prompts of each task."""
        counts = self.ways.drop_duplicates(PROMPT).groupby("task").size()
        return ", ".join(f"{n} of {task}" for task, n in counts.items())

    def tables(self) -> Iterator[tuple[str, str]]:
        """Yield titles and tables."""
        yield "Agreement with the whole cache's tokens, by what a draft attends to", self._drafts()
        yield "What page scores find, and agreement where only these pages are seen", self._pages()
        if not self.meter.empty:
            yield "The meter", self._meter()
        if self.ways["way"].str.startswith("ridge").any():
            yield "Divergence of ridge values less that of plain ones, paired", self._ridge()
        if not self.tiles.empty:
            yield "Share of a prefill's tiles of 128 that would be computed", self._tiles()

    def _series(self, way: str, budget: str, figure: str) -> pd.Series | None:
        some = self.ways[(self.ways["way"] == way) & (self.ways["budget"] == budget)]
        return some.set_index(PROMPT)[figure].sort_index() if len(some) else None

    def _drafts(self) -> str:
        tasks = sorted(self.ways["task"].unique())
        lines = []
        for (way, title), budget in ((w, b) for w in _DRAFTS.items() for b in ("3%", "6%", "12%")):
            found = self._series(way, budget, "agreement")
            if found is not None:
                each = [cell(spread(by_task(found.loc[[task]]))) for task in tasks]
                lines.append([title, budget, *each])
        return markdown(["what is seen", "of the prompt", *tasks], lines)

    def _pages(self) -> str:
        lines = []
        for name in _SCORES:
            line = [f"`{name}`"]
            for budget in ("3%", "6%", "12%"):
                found = self._series(f"recall: {name}", budget, "recall")
                line.append("" if found is None else cell(spread(by_task(found))))
            for figure in ("agreement", "divergence"):
                found = self._series(f"pages: {name}", "6%", figure)
                line.append("" if found is None else cell(spread(by_task(found)), 3))
            right = self._series(f"pages: {name}", "6%", "right")
            needles = right is not None and "needle" in right.index.get_level_values("task")
            line.append(cell(spread(by_task(right.loc[["needle"]]))) if needles else "")
            lines.append(line)
        recalls = [f"recall at {budget}" for budget in ("3 %", "6 %", "12 %")]
        figures = ["agreement at 6 %", "divergence at 6 %", "needles at 6 %"]
        return markdown(["score", *recalls, *figures], lines)

    def _meter(self) -> str:
        lines = []
        for budget, rows in self.meter.groupby("budget", sort=False):
            prompts = [part for _, part in rows.groupby(PROMPT)]
            means = [f"{rows[name].mean():.2f}" for name in ("true", "differs")]
            figures: list[Callable[[pd.DataFrame], float]] = [
                lambda r: float(np.corrcoef(r["true"], r["estimated"])[0, 1]),
                lambda r: area(r["true"], r["differs"]),
                lambda r: area(r["estimated"], r["differs"]),
                lambda r: false_alarms(r["estimated"], r["differs"]),
            ]
            lines.append([str(budget), *means, *(_drawn(prompts, figure) for figure in figures)])
        head = [
            "kept",
            "evicted mass, mean",
            "tokens that differ",
            "estimate against truth, r",
            "area, true mass",
            "area, estimate",
            f"false alarms of the estimate at {_CAUGHT:.0%} caught",
        ]
        return markdown(head, lines)

    def _ridge(self) -> str:
        lines = []
        for way in sorted(self.ways["way"][self.ways["way"].str.startswith("ridge")].unique()):
            line = [way.removeprefix("ridge: ")]
            for budget in ("3%", "6%", "12%", "25%"):
                found = self._series(way, budget, "divergence")
                plain = self._series("snapkv-expected", budget, "divergence")
                both = None if found is None or plain is None else (found - plain).dropna()
                line.append("" if both is None else cell(spread(by_task(both)), 3))
            lines.append(line)
        return markdown(["ridge", "3%", "6%", "12%", "25%"], lines)

    def _tiles(self) -> str:
        lines = []
        for top_p, rows in self.tiles.groupby("top_p"):
            found = rows.groupby(PROMPT)["density"].mean()
            layers = rows.groupby("layer")["density"].mean()
            least = f"{layers.min():.2f} to {layers.max():.2f}"
            lines.append([f"{top_p}", cell(spread(by_task(found))), least])
        return markdown(["top-p", "density", "of the layers"], lines)


def area(scores: pd.Series, differs: pd.Series) -> float:
    """Return the area under the curve: how often a differing token has the greater score."""
    ranks = scores.rank().to_numpy()
    wrong = differs.to_numpy().astype(bool)
    n, m = int(wrong.sum()), int((~wrong).sum())
    return float((ranks[wrong].sum() - n * (n + 1) / 2) / (n * m)) if n and m else np.nan


def false_alarms(scores: pd.Series, differs: pd.Series) -> float:
    """Return the share of agreeing tokens above the score that catches most differing ones."""
    wrong = differs.to_numpy().astype(bool)
    if not wrong.any() or wrong.all():
        return np.nan
    values = scores.to_numpy()
    threshold = np.quantile(values[wrong], 1 - _CAUGHT)
    return float((values[~wrong] >= threshold).mean())


def _drawn(prompts: list[pd.DataFrame], figure: Callable[[pd.DataFrame], float]) -> str:
    """Return a figure over all positions, with its interval over draws of prompts."""
    source = np.random.default_rng(0)
    count = len(prompts)
    drawn: Floats = np.array(
        [
            figure(pd.concat([prompts[i] for i in source.integers(0, count, count)]))
            for _ in range(DRAWS // 10)
        ]
    )
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return cell((figure(pd.concat(prompts)), float(low), float(high)))


def gate_parts(folder: Path, lengths: list[int], seed: int, tasks: list[str]) -> list[str]:
    """Return the text of a folder's gates."""
    if not (folder / "gates.csv").exists():
        return ["Not there yet.\n"]
    parts = []
    for length in lengths:
        rows = GateRows(folder, length, seed, tasks)
        if rows.ways.empty:
            continue
        parts.append(f"Prompts of {length:,} tokens: {rows.prompts()}.\n")
        parts += [part for title, text in rows.tables() for part in (f"{title}:\n", f"{text}\n")]
    return parts or ["Not there yet.\n"]
