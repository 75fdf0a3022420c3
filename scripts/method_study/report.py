# SPDX-License-Identifier: Apache-2.0
"""Tables of what `study.py` wrote, with 95 % bootstrap intervals over the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

DRAWS = 2000
RIGHT = ("needle", "multi-key", "few-shot", "second-turn")
PROMPT = ["task", "length", "seed", "index"]
Floats = npt.NDArray[np.float64]


def spread(values: Sequence[Floats]) -> tuple[float, float, float]:
    """The mean over the tasks of each one's mean, and its interval.

    Prompts are drawn within their task; all methods see the same draws. One prompt says nothing of
    its spread: where a task has no more, there is no interval (nan).
    """
    source = np.random.default_rng(0)
    drawn = [v[source.integers(0, len(v), (DRAWS, len(v)))].mean(axis=1) for v in values]
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    mean = float(np.mean([v.mean() for v in values]))
    return (mean, float(low), float(high)) if min(map(len, values)) > 1 else (mean, np.nan, np.nan)


def by_task(series: pd.Series) -> list[Floats]:
    """Numbers a prompt, an array a task in the order of their names."""
    return [group.to_numpy() for _, group in series.groupby(level="task")]


def cell(numbers: tuple[float, float, float], digits: int = 2) -> str:
    """A mean with its interval, if it has one."""
    mean, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{mean} ({low} to {high})" if low != "nan" else mean


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, numbers at the right."""
    rule = f"|---{'|---:' * (len(head) - 1)}|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(r)} |" for r in rows)])


class Rows:
    """The rows of one table: prompts that every method has had at every budget.

    `full` stands at every budget.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        evicting = rows[rows["budget"] != "100%"]
        self.budgets = sorted(evicting["budget"].unique(), key=lambda b: float(b.rstrip("%")))
        whole = rows[rows["budget"] == "100%"].merge(
            pd.Series(self.budgets, name="at"), how="cross"
        )
        whole["budget"] = whole.pop("at")
        rows = pd.concat([evicting, whole])
        wanted = len(rows[["method", "budget"]].drop_duplicates())
        had = rows.groupby(PROMPT)["method"].transform("size") == wanted
        self.rows = rows[had]
        self.methods = list(self.rows["method"].unique())

    def prompts(self) -> str:
        """How many there are."""
        counts = self.rows.drop_duplicates(PROMPT).groupby(["length", "task"], sort=False).size()
        return ", ".join(f"{n} of {task} at {length}" for (length, task), n in counts.items())

    def wide(self, figure: str, length: int, budget: str) -> pd.DataFrame:
        """`[prompt, method]`."""
        some = self.rows[(self.rows["length"] == length) & (self.rows["budget"] == budget)]
        return some.pivot_table(index=PROMPT, columns="method", values=figure)

    def lengths(self) -> list[int]:
        return sorted(self.rows["length"].unique())

    def tables(self, against: str, tasks_at: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Divergence by budget, alone and less one method's; perplexity; tasks at some budgets."""
        for length in self.lengths():
            wide = {b: self.wide("divergence", length, b) for b in self.budgets}
            order = list(wide[self.budgets[0]].columns)
            order.sort(key=lambda m: np.mean([spread(by_task(w[m]))[0] for w in wide.values()]))
            head = ["method", *self.budgets]
            about = f"prompts of {length:,} tokens"
            some = [[m, *(cell(spread(by_task(w[m])), 3) for w in wide.values())] for m in order]
            yield f"Divergence, {about}", markdown(head, some)
            some = [
                [m, *(cell(spread(by_task(w[m] - w[against])), 3) for w in wide.values())]
                for m in order
                if m not in (against, "full")
            ]
            yield f"Divergence less that of `{against}`, paired, {about}", markdown(head, some)
            if "perplexity" in self.rows["task"].unique():
                yield (
                    f"Perplexity of what follows, times the whole cache's, {about}",
                    markdown(head, list(self._perplexity(length, order))),
                )
            for budget in tasks_at:
                yield f"Tasks at {budget}, {about}", self._tasks(length, budget, order)

    def _perplexity(self, length: int, order: Sequence[str]) -> Iterator[list[str]]:
        for method in order:
            cells = []
            for budget in self.budgets:
                nats = self.wide("nats", length, budget).loc[["perplexity"]]
                mean, low, high = np.exp(spread(by_task(nats[method] - nats["full"])))
                cells.append(cell((mean, low, high), 3))
            yield [method, *cells]

    def _tasks(self, length: int, budget: str, order: Sequence[str]) -> str:
        divergence = self.wide("divergence", length, budget)
        right = self.wide("right", length, budget)
        agreement = self.wide("agreement", length, budget)
        tasks = list(self.rows["task"].unique())
        scored = [task for task in tasks if task in RIGHT]
        said = [task for task in tasks if task in ("explain", "summary")]
        head = [
            "method",
            *(f"{task}: divergence" for task in tasks),
            *(f"{task}: right" for task in scored),
            *(f"{task}: agreement" for task in said),
        ]

        def line(method: str) -> list[str]:
            cells = [cell(spread(by_task(divergence[method].loc[[t]]))) for t in tasks]
            cells += [cell(spread(by_task(right[method].loc[[t]]))) for t in scored]
            return [*cells, *(cell(spread(by_task(agreement[method].loc[[t]]))) for t in said)]

        return markdown(head, [[method, *line(method)] for method in order])

    def by_length(self, figure: str) -> Iterator[tuple[str, str]]:
        """One figure of the only evicting method, a column a length, a line a budget."""
        (method,) = (m for m in self.methods if m != "full")
        lines = [
            [b, *(cell(spread(by_task(self.wide(figure, n, b)[method]))) for n in self.lengths())]
            for b in self.budgets
        ]
        head = ["tokens kept", *(f"prompts of {n}" for n in self.lengths())]
        yield f"{figure.capitalize()} of `{method}`", markdown(head, lines)
