# SPDX-License-Identifier: Apache-2.0
"""Tables of what `study.py` wrote, with 95 % bootstrap intervals over the prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

DRAWS = 2000
RIGHT = (
    *("needle", "multi-key", "few-shot", "second-turn", "third-turn", "conversation"),
    *("quote", "instructions"),
)
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


def cell(numbers: Iterable[float], digits: int = 2) -> str:
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
        """Divergence, agreement and perplexity, alone and less one method's; some budgets' tasks.

        One budget has a table with a column for each of them, several a table each.
        """
        for length in self.lengths():
            order = self._order(length)
            about = f"prompts of {length:,} tokens"
            each = [dict(self._compared(length, b, order, against)) for b in self.budgets]
            columns = {title: [found[title] for found in each] for title in each[0]}
            if len(self.budgets) == 1:
                head = ["method", *columns]
                cells = zip(order, *(column for (column,) in columns.values()), strict=True)
                yield f"At {self.budgets[0]}, {about}", markdown(head, list(map(list, cells)))
            else:
                for title, found in columns.items():
                    cells = zip(order, *found, strict=True)
                    yield (
                        f"{title[0].upper()}{title[1:]}, {about}",
                        markdown(["method", *self.budgets], list(map(list, cells))),
                    )
            for budget in tasks_at:
                yield f"Tasks at {budget}, {about}", self._tasks(length, budget, order)

    def _compared(
        self, length: int, budget: str, order: Sequence[str], against: str
    ) -> Iterator[tuple[str, list[str]]]:
        """Columns of one budget, a cell a method; differences are paired."""
        for figure in ("divergence", "agreement"):
            wide = self.wide(figure, length, budget)
            yield figure, [cell(spread(by_task(wide[m])), 3) for m in order]
            less = [cell(spread(by_task(wide[m] - wide[against])), 3) for m in order]
            yield f"{figure} less that of `{against}`, paired", less
        if "perplexity" in self.rows["task"].unique():
            nats = self.wide("nats", length, budget).loc[["perplexity"]]
            ratios = (np.exp(spread(by_task(nats[m] - nats["full"]))) for m in order)
            yield "perplexity, times the whole cache's", [cell(tuple(r), 3) for r in ratios]

    def lines(self, order: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield a title and a table a length, of methods at the only budget in this order."""
        (budget,) = self.budgets
        for length in self.lengths():
            divergence = self.wide("divergence", length, budget)
            right = self.wide("right", length, budget)
            tasks = sorted(set(RIGHT) & set(self.rows["task"]), key=RIGHT.index)
            found = []
            for method in order:
                answers = [cell(spread(by_task(right[method].loc[[task]]))) for task in tasks]
                found.append([method, cell(spread(by_task(divergence[method])), 3), *answers])
            head = ["", "divergence", *(f"{task}: right" for task in tasks)]
            yield f"Divergence and right answers at {length:,} tokens", markdown(head, found)

    def _order(self, length: int) -> list[str]:
        """The methods, least divergence first."""
        wide = [self.wide("divergence", length, budget) for budget in self.budgets]
        means = {m: np.mean([spread(by_task(w[m]))[0] for w in wide]) for m in wide[0].columns}
        return sorted(means, key=lambda method: means[method])

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
