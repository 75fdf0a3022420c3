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

from vllm_pyramid.eval.run import Answer

__all__ = [
    "COLUMNS",
    "as_json",
    "as_markdown",
    "check_mergeable",
    "merged_json",
    "rows_of",
    "scores_of",
    "tables",
]

# score: the mean over the seeds. spread: standard deviation of the seeds' means, none with one
# seed. n: samples over all seeds. memory: cache blocks held after the last eviction, as a share of
# the full cache's. length: in tokens, 0 where each prompt of a file has its own.
# digits, digits_spread: as score and spread, of `NumberTask.digits`.
COLUMNS = [
    "task", "metric", "policy", "budget", "length", "score", "spread", "n", "seeds", "memory",
    "lower_is_better", "digits", "digits_spread",
]  # fmt: skip
_GROUP = ["task", "length", "policy", "budget"]


def rows_of(answers: Iterable[Answer]) -> pd.DataFrame:
    """The rows, in the order of the answers."""
    by_seed: dict[tuple[Any, ...], list[Answer]] = {}
    for answer in answers:
        key = (answer.task.name, answer.length, answer.policy, answer.budget, answer.seed)
        by_seed.setdefault(key, []).append(answer)
    figures = [
        {
            **dict(zip([*_GROUP, "seed"], key, strict=True)),
            **asdict(figure),
            "n": len(group),
            "memory": fmean(answer.result.eviction.memory for answer in group),
        }
        for key, group in by_seed.items()
        for figure in group[0].task.figures([a.sample for a in group], [a.result for a in group])
    ]
    table = pd.DataFrame(figures).astype({"digits": float})
    rows = table.groupby([*_GROUP, "metric", "lower_is_better"], sort=False).agg(
        score=("score", "mean"),
        spread=("score", "std"),
        n=("n", "sum"),
        seeds=("seed", "count"),
        memory=("memory", "mean"),
        digits=("digits", "mean"),
        digits_spread=("digits", "std"),
    )
    return rows.reset_index()[COLUMNS]


def scores_of(rows: pd.DataFrame) -> pd.DataFrame:
    """What there is to show: the rows, and behind each task's those of its digits as others.

    Further columns: `prompts`, how long they were, and `title`, the same for rows of one table.
    """
    digits = rows.drop(columns=["score", "spread"])[rows["digits"].notna()]
    digits = digits.rename(columns={"digits": "score", "digits_spread": "spread"})
    digits["metric"] = "digits right at their place"
    parts = []
    for _, group in rows.groupby(["task", "length"], sort=False):
        parts += [group, digits[digits.index.isin(group.index)]]
    scores = pd.concat(parts)
    scores["prompts"] = [f"{n:,} tokens" if n else "lengths of the file" for n in scores["length"]]
    scores["title"] = [
        f"{row.task}, {row.prompts}: {row.metric} "
        f"({'lower' if row.lower_is_better else 'higher'} is better, n = {row.n})"
        for row in scores.itertuples()
    ]
    return scores


def _grids(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Title and cells of every table, policies by budgets.

    A policy that evicts nothing has its figure in the last column.
    """
    budgets = sorted(rows["budget"].unique(), key=lambda budget: bool(budget == "100%"))
    for title, group in scores_of(rows).groupby("title", sort=False):
        cells = group.assign(cell=list(map(_cell, group["score"], group["spread"])))
        grid = cells.pivot(index="policy", columns="budget", values="cell")
        grid = grid.reindex(index=group["policy"].unique(), columns=budgets)
        yield str(title), grid.fillna("")


def _cell(score: float, spread: float) -> str:
    return f"{score:.2f}" if pd.isna(spread) else f"{score:.2f} ± {spread:.2f}"


def tables(rows: pd.DataFrame) -> list[Table]:
    """A table for each figure of a task and length."""
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
    """The same tables in Markdown."""
    parts = []
    for title, grid in _grids(rows):
        lines = [f"**{title}**", "", f"| {' | '.join(['policy', *grid.columns])} |"]
        lines.append("|---" + "|---:" * len(grid.columns) + "|")
        lines += [f"| {policy} | {' | '.join(cells)} |" for policy, cells in grid.iterrows()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def as_json(rows: pd.DataFrame, about: Mapping[str, str]) -> str:
    """`runs`: what was run, by which command; `rows`, each with its run's place in that list."""
    return merged_json("", rows, about, "")


def merged_json(known: str, rows: pd.DataFrame, about: Mapping[str, str], name: str) -> str:
    """As `as_json`, with the runs and rows of an earlier file.

    A row takes the place of an earlier one of the same model, task, metric, length, policy and
    budget. A run of which no row is left is dropped.

    Args:
        known: the file's text, empty for none. name: of the file, for the message.

    Raises:
        ValueError: it is not such a file.
    """
    runs, before = _read(known, name)
    new = rows.assign(run=len(runs), model=about["model"]).astype(object)
    records: list[Any] = [*before, *new.where(new.notna(), None).to_dict("records")]
    after = {tuple(row[column] for column in ("model", "metric", *_GROUP)): row for row in records}
    kept = sorted({row["run"] for row in after.values()})
    runs = [run for place, run in enumerate([*runs, dict(about)]) if place in kept]
    written = [
        {**{column: row[column] for column in COLUMNS}, "run": kept.index(row["run"])}
        for row in after.values()
    ]
    return json.dumps({"runs": runs, "rows": written}, indent=1) + "\n"


def check_mergeable(text: str, name: str) -> None:
    """Find out before a long run whether rows can be merged into a file of that text.

    Raises:
        ValueError: see `merged_json`.
    """
    _read(text, name)


def _read(text: str, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The runs and rows of a file, each row with its run's model."""
    if not text.strip():
        return [], []
    try:
        data = json.loads(text)
        runs = list(data["runs"])
        rows = [{**row, "model": runs[row["run"]]["model"]} for row in data["rows"]]
        if lacking := [name for row in rows for name in COLUMNS if name not in row]:
            raise KeyError(lacking[0])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name} does not hold the `runs` and `rows` that `vllm-pyramid eval --json` writes "
            f"({error!r}): name another file"
        ) from None
    return runs, rows
