# SPDX-License-Identifier: Apache-2.0
"""Scores put together: a row for each task, length, policy and budget, as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from vllm_pyramid.eval.run import Answer

__all__ = ["Row", "Score", "as_csv", "as_json", "check_mergeable", "merged_json", "rows_of"]


class Score(NamedTuple):
    """One figure of a row: its name, the mean over the seeds and its spread."""

    metric: str
    mean: float
    spread: float | None


@dataclass(frozen=True)
class Row:
    """One figure of a table.

    Attributes:
        task, metric, policy, budget, length: what was measured; length in tokens,
            0 where each prompt of a file has its own.
        score: the mean over the seeds; for a forced continuation the perplexity.
        spread: standard deviation of the seeds' means; None with one seed.
        n: samples over all seeds. seeds: how many.
        memory: cache blocks held after the prompt, as a share of the full cache's.
        lower_is_better: how to read the score.
        digits, digits_spread: as score and spread, of the share of the answer's digits that are
            right at their place (`Task.digits`); None where the answer is not one number.
    """

    task: str
    metric: str
    policy: str
    budget: str
    length: int
    score: float
    spread: float | None
    n: int
    seeds: int
    memory: float
    lower_is_better: bool
    digits: float | None
    digits_spread: float | None

    @property
    def scores(self) -> list[Score]:
        """What there is to show of the row: its score, and that of the digits."""
        scores = [Score(self.metric, self.score, self.spread)]
        if self.digits is not None:
            scores.append(Score("digits right at their place", self.digits, self.digits_spread))
        return scores

    @property
    def prompts(self) -> str:
        """How long the prompts were, for headings."""
        return f"{self.length:,} tokens" if self.length else "lengths of the file"


def rows_of(answers: Iterable[Answer]) -> list[Row]:
    """One row for each task, length, policy and budget, in the order of the answers."""
    groups: dict[tuple[str, int, str, str], list[Answer]] = {}
    for answer in answers:
        key = (answer.task.name, answer.length, answer.policy, answer.budget)
        groups.setdefault(key, []).append(answer)
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[Answer]) -> Row:
    first = group[0]
    means = _means((answer.seed, answer.score) for answer in group)
    if first.sample.forced:
        means = [math.exp(mean) for mean in means]
    digits = _means((a.seed, a.digits) for a in group if a.digits is not None)
    return Row(
        task=first.task.name,
        metric="perplexity" if first.sample.forced else first.task.metric,
        policy=first.policy,
        budget=first.budget,
        length=first.length,
        score=statistics.fmean(means),
        spread=_spread(means),
        n=len(group),
        seeds=len(means),
        memory=statistics.fmean(answer.result.memory for answer in group),
        lower_is_better=first.task.lower_is_better,
        digits=statistics.fmean(digits) if digits else None,
        digits_spread=_spread(digits),
    )


def _means(scores: Iterable[tuple[int, float]]) -> list[float]:
    """The mean of each seed's."""
    by_seed: dict[int, list[float]] = {}
    for seed, score in scores:
        by_seed.setdefault(seed, []).append(score)
    return [statistics.fmean(of_seed) for of_seed in by_seed.values()]


def _spread(means: Sequence[float]) -> float | None:
    return statistics.stdev(means) if len(means) > 1 else None


def as_json(rows: Sequence[Row], about: Mapping[str, object]) -> str:
    """`runs`: what was run, by which command; `rows`, each with its run's place in that list."""
    return _dumps([dict(about)], [{**asdict(row), "run": 0} for row in rows])


def merged_json(known: str, rows: Sequence[Row], about: Mapping[str, object], name: str) -> str:
    """As `as_json`, with the runs and rows of an earlier file.

    A row takes the place of an earlier one of the same model, task, length, policy and budget.
    A run of which no row is left is dropped.

    Args:
        known: the file's text, empty for none. name: of the file, for the message.

    Raises:
        ValueError: it is not such a file.
    """
    runs, before = _read(known, name)
    new = [{**asdict(row), "run": len(runs)} for row in rows]
    runs.append(dict(about))
    after = {_identity(runs, row): row for row in [*before, *new]}
    kept = sorted({row["run"] for row in after.values()})
    return _dumps(
        [runs[place] for place in kept],
        [{**row, "run": kept.index(row["run"])} for row in after.values()],
    )


def check_mergeable(text: str, name: str) -> None:
    """Find out before a long run whether rows can be merged into a file of that text.

    Raises:
        ValueError: see `merged_json`.
    """
    _read(text, name)


def _read(text: str, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not text.strip():
        return [], []
    try:
        data = json.loads(text)
        runs, rows = data["runs"], data["rows"]
        for row in rows:
            _identity(runs, row)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name} does not hold the `runs` and `rows` that `vllm-pyramid eval --json` writes "
            f"({error!r}): name another file"
        ) from None
    return list(runs), list(rows)


def _identity(runs: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("task", "length", "policy", "budget")
    return (runs[row["run"]]["model"], *(row[name] for name in names))


def _dumps(runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    return json.dumps({"runs": runs, "rows": rows}, indent=1) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
