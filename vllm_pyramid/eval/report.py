# SPDX-License-Identifier: Apache-2.0
"""The tables of a run, for the terminal and as Markdown: one a score, policies by budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from vllm_pyramid.eval.results import Row, Score

__all__ = ["as_markdown", "tables"]


@dataclass(frozen=True)
class _Grid:
    """One table of a task. A policy that evicts nothing has its figure in the last column."""

    title: str
    budgets: list[str]
    lines: list[tuple[str, list[str]]]


def _grids(rows: Sequence[Row]) -> Iterator[_Grid]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.task, row.length), []).append(row)
    budgets = list(dict.fromkeys(row.budget for row in rows if row.budget != "100%"))
    if any(row.budget == "100%" for row in rows):
        budgets.append("100%")
    for group in groups.values():
        first = group[0]
        better = "lower" if first.lower_is_better else "higher"
        for index, score in enumerate(first.scores):
            title = (
                f"{first.task}, {first.prompts}: {score.metric} ({better} is better, n = {first.n})"
            )
            lines = []
            for policy in dict.fromkeys(row.policy for row in group):
                cells = {
                    row.budget: _cell(row.scores[index]) for row in group if row.policy == policy
                }
                lines.append((policy, [cells.get(budget, "") for budget in budgets]))
            yield _Grid(title, budgets, lines)


def _cell(score: Score) -> str:
    text = f"{score.mean:.2f}"
    return text if score.spread is None else f"{text} ± {score.spread:.2f}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each task and length, and one for the digits of an answer that is a number."""
    made = []
    for grid in _grids(rows):
        table = Table(title=grid.title)
        table.add_column("policy", no_wrap=True)
        for budget in grid.budgets:
            table.add_column(budget, justify="right")
        for policy, cells in grid.lines:
            table.add_row(Text(policy), *cells)  # arguments may look like markup
        made.append(table)
    return made


def as_markdown(rows: Sequence[Row]) -> str:
    """The same tables in Markdown."""
    parts = []
    for grid in _grids(rows):
        head = ["policy", *grid.budgets]
        lines = [f"**{grid.title}**", ""]
        lines.append(f"| {' | '.join(head)} |")
        lines.append("|---" + "|---:" * len(grid.budgets) + "|")
        lines += [f"| {policy} | {' | '.join(cells)} |" for policy, cells in grid.lines]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
