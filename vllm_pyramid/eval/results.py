# SPDX-License-Identifier: Apache-2.0
"""Scores put together: a row for each task, length, policy and budget, as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from vllm_pyramid.eval.run import Answer

__all__ = ["Row", "as_csv", "as_json", "rows_of"]


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
    by_seed: dict[int, list[float]] = {}
    for answer in group:
        by_seed.setdefault(answer.seed, []).append(answer.score)
    first = group[0]
    means = [statistics.fmean(scores) for scores in by_seed.values()]
    if first.sample.forced:
        means = [math.exp(mean) for mean in means]
    return Row(
        task=first.task.name,
        metric="perplexity" if first.sample.forced else first.task.metric,
        policy=first.policy,
        budget=first.budget,
        length=first.length,
        score=statistics.fmean(means),
        spread=statistics.stdev(means) if len(means) > 1 else None,
        n=len(group),
        seeds=len(means),
        memory=statistics.fmean(answer.result.memory for answer in group),
        lower_is_better=first.task.lower_is_better,
    )


def as_json(rows: Sequence[Row], about: dict[str, object]) -> str:
    """What was run, and the rows."""
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
