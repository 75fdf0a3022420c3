#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure and print every table of a YAML file; stopped, the same command goes on.

    .venv/bin/python lab/method_study/tables.py run --out FOLDER [--minutes 60] [TABLE ...]
    .venv/bin/python lab/method_study/tables.py show --out FOLDER [TABLE ...]

FOLDER gets study.csv, a line for each prompt, method and budget; a folder of `python -m lab.eval`
for each table of the engine; tables.md, which `show` writes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pandas as pd
import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from rich.console import Console

if TYPE_CHECKING:
    from report import Rows

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))  # for `lab.eval`
app = typer.Typer(
    add_completion=False,
    help=__doc__.split("\n")[0],
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console(stderr=True, highlight=False)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Prompts(_Strict):
    """Some prompts, `samples` of each task and length.

    Attributes:
        gates: tasks on whose prompts the gates are measured too.
    """

    tasks: list[str] = Field(min_length=1)
    lengths: list[int] = Field(min_length=1)
    samples: int = Field(gt=0)
    seed: int
    gates: list[str] = []


class StudyTable(_Prompts):
    """Methods on the same prompts, each at all budgets."""

    methods: list[str] = Field(min_length=2)
    budgets: list[str] = Field(min_length=1)

    def pairs(self) -> list[tuple[list[str], list[str]]]:
        """Return methods and their budgets."""
        return [(self.methods, self.budgets)]


class LinesTable(_Prompts):
    """A line for each of some methods, each at a budget of its own, on the same prompts.

    Attributes:
        ways: what a line is called, its method and budget.
    """

    ways: dict[str, tuple[str, str]] = Field(min_length=2)

    @property
    def methods(self) -> list[str]:
        """Return the methods of the lines."""
        return [method for method, _ in self.ways.values()]

    def pairs(self) -> list[tuple[list[str], list[str]]]:
        """Return methods and their budgets."""
        return [([method], [budget]) for method, budget in self.ways.values()]


class Table(_Strict):
    """One entry of the file: `study`, `lines`, or flags of `python -m lab.eval` in `engine`.

    Attributes:
        against: the method that others are compared with. tasks_at: budgets to show task by task.
        figure: to show by length and budget instead, of the only method but `full`.
    """

    title: str
    study: StudyTable | None = None
    lines: LinesTable | None = None
    engine: dict[str, str | int] | None = None
    against: str | None = None
    tasks_at: list[str] = []
    figure: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Table:
        if sum(kind is not None for kind in (self.study, self.lines, self.engine)) != 1:
            raise ValueError("a table has either `study`, `lines` or `engine`")
        if self.study is not None:
            if "full" not in self.study.methods:
                raise ValueError("the methods of a study begin with `full`")
            if (self.against is None) == (self.figure is None):
                raise ValueError("a study has either `against` or `figure`")
            if self.against not in (None, *self.study.methods):
                raise ValueError(f"`against: {self.against}` is none of its methods")
        return self


def read_tables(file: Path, names: list[str]) -> dict[str, Table]:
    """The tables of that name, or all.

    Raises:
        typer.BadParameter: an unknown name, or a file that is no list of tables.
    """
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        tables = TypeAdapter(dict[str, Table]).validate_python(raw)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file}: {error}") from None
    if unknown := set(names) - set(tables):
        raise typer.BadParameter(f"no table {sorted(unknown)}; there are: {', '.join(tables)}")
    return {name: table for name, table in tables.items() if not names or name in names}


Names = Annotated[list[str] | None, typer.Argument(metavar="[TABLE]...", help="all if none")]
Out = Annotated[Path, typer.Option(help="folder of the results")]
Tables = Annotated[Path, typer.Option(help="YAML: the tables")]
Methods = Annotated[Path, typer.Option(help="YAML: the methods of the studies")]


@app.command()
def run(
    names: Names = None,
    out: Out = Path("quality-tables"),
    tables: Tables = HERE / "tables.yaml",
    methods: Methods = HERE / "methods.yaml",
    model: Annotated[str, typer.Option(help="folder, or a name of `lab.models`")] = "smollm2",
    minutes: Annotated[float, typer.Option(help="stop after that time")] = float("inf"),
    samples: Annotated[int, typer.Option(help="prompts of a task at most")] = sys.maxsize,
    device: Annotated[str, typer.Option(help="of the studies: cpu or cuda")] = "cpu",
) -> None:
    """Measure what is not there yet."""
    chosen = read_tables(tables, names or [])
    folder = _model_folder(model)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    if left := _run_studies(chosen, out, methods, folder, deadline, samples, device):
        console.print(f"stopped: {left} prompts are left; the same command goes on")
        raise typer.Exit(1)
    for name, table in chosen.items():
        if table.engine is None:
            continue
        flags = dict(table.engine)
        if samples < int(flags.get("samples", sys.maxsize)):
            flags["samples"] = samples
        if not _run_engine(name, flags, out, folder, deadline):
            console.print(f"stopped in the table {name!r}; the same command goes on")
            raise typer.Exit(1)
    show(names, out, tables)


def _model_folder(model: str) -> Path:
    from lab.models.folders import MODELS, model_folder

    return model_folder(model) if model in MODELS else Path(model)


def _run_studies(
    tables: dict[str, Table],
    out: Path,
    methods: Path,
    folder: Path,
    deadline: float,
    samples: int,
    device: str,
) -> int:
    """Measure the studies' prompts in turns, and return how many the deadline left."""
    import torch
    from code_task import Repository
    from gates import Gates
    from methods import Method, load_methods
    from model import Model
    from study import Place, Study

    from vllm_pyramid.tools.eval.haystack import load_tokens

    known = load_methods(methods)
    places: dict[Place, list[tuple[list[Method], list[str]]]] = {}
    with_gates: set[Place] = set()
    for name, table in tables.items():
        spec = table.study or table.lines
        if spec is None:
            continue
        if unknown := set(spec.methods) - set(known):
            raise typer.BadParameter(f"table {name!r}: no method {sorted(unknown)} in {methods}")
        wanted = [([known[label] for label in some], budgets) for some, budgets in spec.pairs()]
        for which in product(
            range(min(samples, spec.samples)), [spec.seed], spec.lengths, spec.tasks
        ):
            place = Place(*which)
            places.setdefault(place, []).extend(wanted)
            if place.task in spec.gates:
                with_gates.add(place)
    if not places:
        return 0
    torch.set_grad_enabled(False)
    try:
        torch.set_default_device(device)
        torch.zeros(1)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"--device {device}: {reason}") from None
    study = Study(Model(folder), load_tokens(folder), folder.name)
    try:
        if any(place.task == Repository.name for place in places):
            _check_sources(out)
        study.read(out / "study.csv")
        if with_gates:
            study.gates = Gates(out, known["streaming-llm"], known["snapkv-expected"])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with_gates = {place for place in with_gates if study.misses_gates(place)}
    todo = {
        place: missing
        for place in sorted(places)
        # A dictionary: tables share methods.
        if (missing := dict.fromkeys(m for w in places[place] for m in study.missing(place, *w)))
        or place in with_gates
    }
    with (out / "study.csv").open("a", encoding="utf-8") as file:
        for done, (place, missing) in enumerate(todo.items()):
            if time.monotonic() > deadline:
                return len(todo) - done
            begun = time.process_time(), time.monotonic()
            study.measure(place, missing, file, place in with_gates)
            spent, passed = time.process_time() - begun[0], time.monotonic() - begun[1]
            console.print(
                f"{done + 1} of {len(todo)}: {place}, {spent:.1f} s of processor time in "
                f"{passed:.1f} s"
            )
    return 0


def _check_sources(out: Path) -> None:
    """Keep the version of this project's files in the folder, which prompts are made of.

    Raises:
        ValueError: the folder has another.
    """
    from code_task import sources_of_this_project

    kept, own = out / "repository.txt", sources_of_this_project()
    if kept.exists() and kept.read_text() != own:
        raise ValueError(
            f"{out} has prompts over other files of this project ({kept.read_text()}, and here are "
            f"{own}): go on in the checkout that they are of, or take another folder"
        )
    kept.write_text(own)


def _run_engine(
    name: str, flags: dict[str, str | int], out: Path, folder: Path, deadline: float
) -> bool:
    """Let `python -m lab.eval` measure a table; False at the deadline. It continues by itself."""
    command = [sys.executable, "-m", "lab.eval", "--model", str(folder)]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    for flag, path in (("out", name), ("markdown", f"{name}.md"), ("csv", f"{name}.csv")):
        command += [f"--{flag}", str(out.resolve() / path)]
    left = deadline - time.monotonic()
    timeout = None if left == float("inf") else max(left, 0)
    try:
        subprocess.run(
            [*command, "--no-pictures"], cwd=HERE.parents[1], check=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return False
    return True


@app.command()
def show(
    names: Names = None, out: Out = Path("quality-tables"), tables: Tables = HERE / "tables.yaml"
) -> None:
    """Print the tables of what is there, and write them to tables.md."""
    study = out / "study.csv"
    rows = pd.read_csv(study) if study.exists() else None
    parts = []
    for name, table in read_tables(tables, names or []).items():
        parts.append(f"## {table.title}\n")
        file = out / f"{name}.md"
        if table.study is not None and table.study.gates:
            from gates_report import gate_parts

            spec = table.study
            parts += gate_parts(out, spec.lengths, spec.seed, spec.gates)
        elif table.study is not None and rows is not None:
            parts += _study_parts(table, table.study, rows)
        elif table.lines is not None and rows is not None:
            parts += _line_parts(table.lines, rows)
        elif table.engine is not None and file.exists():
            parts.append(file.read_text(encoding="utf-8"))
        else:
            parts.append("Not there yet.\n")
    text = "\n".join(parts)
    (out / "tables.md").write_text(text, encoding="utf-8")
    print(text)


def _study_parts(table: Table, spec: StudyTable, rows: pd.DataFrame) -> list[str]:
    from report import Rows

    rows = rows[
        rows["method"].isin(spec.methods)
        & rows["task"].isin(spec.tasks)
        & rows["length"].isin(spec.lengths)
        & rows["budget"].isin([*spec.budgets, "100%"])
        & (rows["seed"] == spec.seed)
        & (rows["index"] < spec.samples)
    ]
    if rows.empty:
        return ["Not there yet.\n"]
    found = Rows(rows)
    if table.figure is not None:
        titled = found.by_length(table.figure)
    else:
        assert table.against is not None
        titled = found.tables(table.against, table.tasks_at)
    return _titled(found, titled)


def _line_parts(spec: LinesTable, rows: pd.DataFrame) -> list[str]:
    from report import Rows

    some = rows[
        rows["task"].isin(spec.tasks)
        & rows["length"].isin(spec.lengths)
        & (rows["seed"] == spec.seed)
        & (rows["index"] < spec.samples)
    ]
    named = []
    for label, (method, budget) in spec.ways.items():
        own = some[(some["method"] == method) & some["budget"].isin([budget, "100%"])]
        named.append(own.assign(method=label, budget="0%"))
    found = Rows(pd.concat(named))
    if found.rows.empty or len(found.methods) < len(spec.ways):
        return ["Not there yet.\n"]
    return _titled(found, found.lines(list(spec.ways)))


def _titled(found: Rows, tables: Iterable[tuple[str, str]]) -> list[str]:
    parts = [part for title, text in tables for part in (f"{title}:\n", f"{text}\n")]
    return [f"Prompts: {found.prompts()}.\n", *parts]


if __name__ == "__main__":
    app()
