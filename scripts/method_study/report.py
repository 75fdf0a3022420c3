#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of what `study.py` wrote, in Markdown, with 95 % bootstrap intervals over the prompts.

.venv/bin/python scripts/method_study/report.py results.jsonl [--budget 12%] [--against LABEL]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

DRAWS = 2000
RIGHT = ("needle", "multi-key", "few-shot", "second-turn")


def cell(values: npt.NDArray[np.float64], *, exponential: bool = False) -> str:
    """The mean of a number a prompt, with its interval; prompts are drawn alike for all methods."""
    drawn = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    means = np.array([values.mean(), *np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))])
    mean, low, high = np.exp(means) if exponential else means
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def over_tasks(table: pd.DataFrame) -> str:
    """The mean over the tasks of each one's mean; prompts are drawn within their task."""
    source = np.random.default_rng(0)
    means, drawn = [], []
    for column in table.columns:
        values = table[column].dropna().to_numpy()
        means.append(values.mean())
        drawn.append(values[source.integers(0, len(values), (DRAWS, len(values)))].mean(axis=1))
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    return f"{np.mean(means):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--budget", default="12%")
    parser.add_argument("--against", default="snapkv-expected", help="others less this one, paired")
    args = parser.parse_args()
    rows = pd.read_json(args.results, lines=True)
    rows = rows[rows["budget"].isin([args.budget, "100%"])]
    wanted = rows["method"].nunique()
    whole = rows.groupby(["task", "length", "index"])["method"].transform("nunique") == wanted
    rows = rows[whole]  # prompts that every method has had

    def wide(figure: str) -> pd.DataFrame:
        """`[prompts, method]` of a task, prompts in the index."""
        return rows.pivot_table(index=["task", "length", "index"], columns="method", values=figure)

    divergence, right, nats = wide("divergence"), wide("right"), wide("nats")
    agreement = wide("agreement")
    tasks = list(rows["task"].unique())
    print(f"Prompts: {rows.groupby('task', sort=False)['index'].nunique().to_dict()}\n")
    head = ["method", "divergence", f"less that of `{args.against}`", *tasks]
    print(f"| {' | '.join(head)} |\n|---{'|---:' * (len(head) - 1)}|")
    by_task = {m: divergence[m].unstack("task") for m in divergence.columns}
    order = sorted(by_task, key=lambda m: by_task[m].mean().mean())
    for method in order:
        less = by_task[method] - by_task[args.against]
        cells = [f"{divergence[method][task].mean():.2f}" for task in tasks]
        print(
            f"| {method} | {over_tasks(by_task[method])} | {over_tasks(less)} | "
            f"{' | '.join(cells)} |"
        )
    scored = [task for task in tasks if task in RIGHT]
    said = [task for task in ("explain", "summary") if task in tasks]
    forced = [task for task in ("perplexity",) if task in tasks]
    head = ["method", *scored, *(f"{task}: agreement" for task in said), *forced]
    print(f"\n| {' | '.join(head)} |\n|---{'|---:' * (len(head) - 1)}|")
    for method in order:
        cells = [cell(right[method][task].to_numpy()) for task in scored]
        cells += [cell(agreement[method][task].to_numpy()) for task in said]
        cells += [cell(nats[method][task].to_numpy(), exponential=True) for task in forced]
        print(f"| {method} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
