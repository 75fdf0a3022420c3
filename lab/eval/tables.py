# SPDX-License-Identifier: Apache-2.0
"""Scores put together: a row for each task, metric, length, policy and budget.

Rows are a pandas table with the columns `COLUMNS`, shown in the terminal and written as JSON, CSV
and Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from lab.eval.run import Answer

# score: over all seeds' samples. low, high: its 95 % interval. n: samples over all seeds. memory:
# cache blocks held after the last eviction, as a share of the full cache's. read: of the pages that
# generated tokens see, those that they read, where a policy selects. length: in tokens, 0 where
# each prompt of a file has its own.
COLUMNS = [
    "task", "metric", "policy", "budget", "length", "score", "low", "high", "n", "seeds", "memory",
    "read", "lower_is_better",
]  # fmt: skip


def rows_of(answers: Iterable[Answer]) -> pd.DataFrame:
    """Return the rows, in the order of the answers."""
    groups: dict[tuple[Any, ...], list[Answer]] = {}
    for answer in answers:
        key = (answer.task.name, answer.length, answer.policy, answer.budget)
        groups.setdefault(key, []).append(answer)
    rows = [
        {
            **dict(zip(("task", "length", "policy", "budget"), key, strict=True)),
            **asdict(figure),
            "n": len(group),
            "seeds": len({answer.seed for answer in group}),
            "memory": fmean(answer.result.eviction.memory for answer in group),
            "read": _mean(answer.result.eviction.read for answer in group),
        }
        for key, group in groups.items()
        for figure in group[0].task.figures([a.sample for a in group], [a.result for a in group])
    ]
    return pd.DataFrame(rows).astype(dict.fromkeys(("low", "high", "read"), float))[COLUMNS]


def _mean(shares: Iterable[float | None]) -> float | None:
    """Return the mean of those that there are."""
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def titled(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with `prompts`, how long they were, and `title`, that of a table."""
    rows = rows.assign(
        prompts=[f"{n:,} tokens" if n else "lengths of the file" for n in rows.length]
    )
    better = {True: "lower is better, ", False: "higher is better, "}
    order = [better.get(lower, "") for lower in rows.lower_is_better]
    heading = rows.task + ", " + rows.prompts + ": " + rows.metric
    return rows.assign(title=heading + " (" + order + "n = " + rows.n.astype(str) + ")")


def _grids(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield title and cells of every table, policies by budgets.

    A policy that evicts nothing has its figure in the last column.
    """
    budgets = sorted(rows["budget"].unique(), key=lambda budget: bool(budget == "100%"))
    for title, group in titled(rows).groupby("title", sort=False):
        cells = group.assign(cell=list(map(_cell, group["score"], group["low"], group["high"])))
        grid = cells.pivot(index="policy", columns="budget", values="cell")
        yield str(title), grid.reindex(index=group["policy"].unique(), columns=budgets).fillna("")


def _cell(score: float, low: float, high: float) -> str:
    return f"{score:.2f}" if pd.isna(low) else f"{score:.2f} ({low:.2f} to {high:.2f})"


def tables(rows: pd.DataFrame) -> list[Table]:
    """Return a table for each figure of a task and length."""
    made = []
    for title, grid in _grids(rows):
        table = Table(title=title)
        table.add_column("policy", no_wrap=True)
        for budget in grid.columns:
            table.add_column(budget, justify="right")
        for policy, cells in grid.iterrows():
            table.add_row(Text(str(policy)), *cells)  # arguments may look like markup
        made.append(table)
    return made


def as_markdown(rows: pd.DataFrame) -> str:
    """Return the same tables in Markdown."""
    parts = []
    for title, grid in _grids(rows):
        lines = [f"**{title}**", "", f"| {' | '.join(['policy', *grid.columns])} |"]
        lines.append("|---" + "|---:" * len(grid.columns) + "|")
        lines += [f"| {policy} | {' | '.join(cells)} |" for policy, cells in grid.iterrows()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def as_json(rows: pd.DataFrame, about: Mapping[str, str]) -> str:
    """Return the rows, and what was run by which command."""
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    return json.dumps({"run": dict(about), "rows": records}, indent=1) + "\n"
