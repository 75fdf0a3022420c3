# SPDX-License-Identifier: Apache-2.0
"""Gates: would a planned feature be worth building? Measured on the prompts of the study.

- drafts: the agreement of a reduced cache with the whole one, token by token along a given
  continuation, is the share of its drafts that the whole cache would accept.
- pages: what page scores find of the attention, and what attending to their pages costs.
- meter: does the attention that evicted tokens would have had foretell other tokens?
- ridge: do changed values of the kept tokens bring the whole cache's outputs back?
- tiles: which part of a prefill would be left of the whole, if tiles were chosen by worth?
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gates_meter import Metered
from gates_pages import SCORERS, Pages, Survey
from gates_ridge import Ridged
from gates_tiles import density
from model import Way, Whole, way_of

if TYPE_CHECKING:
    from methods import Method, Prompt

KEY = ("model", "seed", "task", "length", "index")
FIGURES = ("right", "nats", "agreement", "divergence")
FILES = {
    "gates": (*KEY, "way", "budget", *FIGURES, "recall"),
    "tiles": (*KEY, "layer", "top_p", "density"),
    "meter": (*KEY, "budget", "position", "true", "estimated", "differs", "divergence"),
}
SHARES = (0.03, 0.06, 0.12)
METERED = (0.06, 0.12)
RIDGED = (0.03, 0.06, 0.12, 0.25)
RIDGES = (0.1, 1.0)
TOP_P = (0.9, 0.95)
# Forward passes with pages: all scores in the middle, one and the ceiling around.
WAYS = [(scorer, 0.06) for scorer in SCORERS] + [
    (scorer, share) for scorer in ("spread", "exact") for share in (0.03, 0.12)
]
TOKENS = 32  # of a continuation, at most

Key = tuple[str, ...]


def percent(share: float) -> str:
    """Return a share as budgets are written."""
    return f"{share:.0%}"


@dataclass
class Gates:
    """The files of a folder, and which prompts they have.

    Attributes:
        recent, auto: the methods that drafts and the meter are measured with.
    """

    folder: Path
    recent: Method
    auto: Method
    known: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Read what is there; a prompt's rows are written at once, those of `gates` last.

        Raises:
            ValueError: a file has other columns.
        """
        for name, columns in FILES.items():
            path = self.folder / f"{name}.csv"
            if not path.exists():
                path.write_text(",".join(columns) + "\n")
            with path.open() as file:
                rows = csv.DictReader(file)
                if tuple(rows.fieldnames or ()) != columns:
                    raise ValueError(f"{path} has the columns {rows.fieldnames}, not {columns}")
                if name == "gates":
                    self.known = {tuple(row[key] for key in KEY) for row in rows}

    def measure(
        self, key: Key, prompt: Prompt, following: list[int], skip: int, full: torch.Tensor
    ) -> None:
        """Append the rows of a prompt.

        Args:
            following, skip: as in the study. full: logits `[n, vocabulary]` of the whole cache.
        """
        from study import measured

        following = following[: skip + TOKENS]
        full = full[: len(following)]
        ways: dict[tuple[str, str], Way] = {("whole", "100%"): Whole()}
        for share in RIDGED:
            budget = percent(share)
            kept = self.auto.kept(prompt, budget)
            assert kept is not None
            auto = Metered(kept) if share in METERED else way_of(kept)
            ways[self.auto.label, budget] = auto
            for ridge in RIDGES if share == 0.12 else RIDGES[-1:]:
                way = Ridged(kept, self.auto.policy.window, ridge)
                ways[f"ridge: {ridge}", budget] = way
            if share in SHARES:
                ways[self.recent.label, budget] = way_of(self.recent.kept(prompt, budget))
        ways |= {(f"pages: {name}", percent(s)): Pages(name, s) for name, s in WAYS}
        survey = Survey(SHARES, skip)
        ways["survey", "100%"] = survey
        tables = {name: io.StringIO() for name in FILES}
        out = {name: csv.writer(text, lineterminator="\n") for name, text in tables.items()}
        logits = prompt.model.continued(prompt.recorded, following, list(ways.values()))
        for ((name, budget), way), its in zip(ways.items(), logits, strict=True):
            figures = measured(full, its, following, skip)
            out["gates"].writerow([*key, name, budget, *figures, ""])
            if isinstance(way, Metered):
                rows = self._positions(key, budget, way, its, full, skip)
                out["meter"].writerows(rows)
        for (name, share), recalls in survey.recalls.items():
            recall = round(sum(recalls) / len(recalls), 5)
            out["gates"].writerow([*key, f"recall: {name}", percent(share), *[""] * 4, recall])
        for top_p, (layer, cache) in product(TOP_P, enumerate(prompt.recorded.layers)):
            found = round(density(cache, prompt.model.scale, top_p), 5)
            out["tiles"].writerow([*key, layer, top_p, found])
        for name in ("meter", "tiles", "gates"):
            with (self.folder / f"{name}.csv").open("a", encoding="utf-8") as file:
                file.write(tables[name].getvalue())
        self.known.add(key)

    def _positions(
        self,
        key: Key,
        budget: str,
        way: Metered,
        its: torch.Tensor,
        full: torch.Tensor,
        skip: int,
    ) -> Iterator[list[object]]:
        """Yield a row for each token of the continuation, the first one left out."""
        true, estimated = (
            torch.stack(layers).mean(dim=0)[skip - 1 : -1] for layers in (way.true, way.estimated)
        )
        mine, theirs = (x[skip - 1 : -1].log_softmax(dim=-1) for x in (its, full))
        differs = mine.argmax(-1) != theirs.argmax(-1)
        divergence = (theirs.exp() * (theirs - mine)).sum(-1)
        columns = (true, estimated, differs.int(), divergence)
        for position, row in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
            yield [*key, budget, position, *(round(number, 5) for number in row)]
