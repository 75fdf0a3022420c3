# SPDX-License-Identifier: Apache-2.0
"""`lab/method_study/tables.py`: it measures tables of a YAML file and goes on where it stopped.

On the built-in model. The packaged file of tables is read, and every name in it is known.
"""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from lab.eval.__main__ import parse_args
from lab.eval.registry import load_task
from lab.eval.variants import parse_variants
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.eval.haystack import load_tokens

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

FOLDER = Path(__file__).parents[1] / "method_study"
SMALL = {
    "small": {
        "title": "A small table",
        "study": {
            "methods": ["full", "snapkv", "snapkv-expected", "xkv"],
            "tasks": ["needle", "perplexity"],
            "lengths": [256],
            "budgets": ["25%", "50%"],
            "samples": 2,
            "seed": 3,
        },
        "against": "snapkv",
        "tasks_at": ["25%"],
    },
    "short": {
        "title": "A table by length",
        "study": {
            "methods": ["full", "snapkv"],
            "tasks": ["needle"],
            "lengths": [192, 256],
            "budgets": ["64"],
            "samples": 1,
            "seed": 3,
        },
        "figure": "agreement",
    },
    "apart": {
        "title": "Budgets of their own",
        "lines": {
            "ways": {"all": ["full", "100%"], "half": ["snapkv", "50%"], "read": ["select", "25%"]},
            "tasks": ["needle"],
            "lengths": [256],
            "samples": 1,
            "seed": 3,
        },
    },
}
# Prompts, by methods and budgets that evict and one row of the whole cache; `short` shares one
# prompt with `small` and adds a budget of one method there, `apart` a method.
ROWS = 4 * (3 * 2 + 1) + (1 + 1) + 1 + 1


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The scripts, as they see each other."""
    sys.path.insert(0, str(FOLDER))
    names = ("own_tasks", "methods", "report", "tables")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(FOLDER))
    others = (
        "model",
        "study",
        "gates",
        "selected",
        "static_heads",
        "code_task",
        "instruction_task",
    )
    for name in (*names, *others):
        sys.modules.pop(name, None)


def command(folder: Path, *more: str, tables: object = SMALL) -> subprocess.CompletedProcess[str]:
    """`tables.py run` into a folder."""
    file = folder / "tables.yaml"
    file.write_text(yaml.safe_dump(tables))
    script = [sys.executable, str(FOLDER / "tables.py"), "run", "--model", str(model_path())]
    return subprocess.run(
        [*script, "--tables", str(file), "--out", str(folder / "out"), *more],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        cwd=FOLDER.parents[1],
    )


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "out" / "study.csv").open()))


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    stopped = command(tmp_path, "--minutes", "0")
    assert stopped.returncode == 1
    assert "stopped: 5 prompts are left" in stopped.stderr
    whole = command(tmp_path)
    assert whole.returncode == 0, whole.stderr
    rows = rows_of(tmp_path)
    assert len(rows) == ROWS
    assert len({tuple(row[k] for k in list(row)[:8]) for row in rows}) == ROWS

    # A run that was killed in the middle of a prompt, and of a line: only what is missing is
    # measured, alike.
    file = tmp_path / "out" / "study.csv"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:12])[:-40])
    assert command(tmp_path).returncode == 0
    again = rows_of(tmp_path)
    assert again[:10] == rows[:10]

    def key(row: dict[str, str]) -> list[str]:
        return [row[name] for name in ("task", "length", "index", "method", "budget")]

    for before, after in zip(sorted(rows, key=key), sorted(again, key=key), strict=True):
        assert key(before) == key(after)
        for figure in ("right", "nats", "agreement", "divergence"):
            assert float(after[figure]) == pytest.approx(float(before[figure]), abs=1e-3)
    nothing = command(tmp_path)
    assert nothing.returncode == 0
    assert len(rows_of(tmp_path)) == ROWS

    text = (tmp_path / "out" / "tables.md").read_text()
    for part in (
        "## A small table",
        "## Budgets of their own\n\nPrompts: 1 of needle at 256.",
        "| all | 0.000 | 1.00 |",
        "Prompts: 2 of needle at 256, 2 of perplexity at 256.",
        "Divergence less that of `snapkv`, paired, prompts of 256 tokens:",
        "Agreement less that of `snapkv`, paired, prompts of 256 tokens:",
        "| full | 1.000 (1.000 to 1.000) | 1.000 (1.000 to 1.000) |",
        "Perplexity, times the whole cache's, prompts of 256 tokens:",
        "| full | 0.000 (0.000 to 0.000) | 0.000 (0.000 to 0.000) |",
        "Tasks at 25%",
        "## A table by length",
        "| tokens kept | prompts of 192 | prompts of 256 |",
    ):
        assert part in text, part


def test_gates_are_measured_once(tmp_path: Path) -> None:
    """With the study's rows, on the tasks that ask for them; their tables are shown."""
    spec = SMALL["small"]["study"] | {"lengths": [320], "tasks": ["needle", "code"]}
    tables = {"gates": SMALL["small"] | {"study": spec | {"gates": ["code"]}}}
    for _ in range(2):
        done = command(tmp_path, tables=tables)
        assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "out" / "gates.csv").open()))
    assert len({(row["index"], row["way"], row["budget"]) for row in rows}) == len(rows)
    assert {(row["task"], row["index"]) for row in rows} == {("code", "0"), ("code", "1")}
    for way in ("whole", "survey"):
        same = [row for row in rows if row["way"] == way]
        assert {float(row["agreement"]) for row in same} == {1.0}
    text = (tmp_path / "out" / "tables.md").read_text()
    for part in ("320 tokens: 2 of code", "what is seen", "`representative`", "false alarms"):
        assert part in text, part


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"study": None}, "either `study`, `lines` or `engine`"),
        ({"against": "nobody"}, "`against: nobody` is none of its methods"),
        ({"sample": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_table_is_refused(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    done = command(tmp_path, tables={"small": SMALL["small"] | change})
    assert done.returncode == 2
    assert reason in done.stderr
    assert not (tmp_path / "out").exists()


def test_rows_of_something_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    other = tmp_path / "out" / "study.csv"
    other.write_text("task,method,right\nneedle,full,1\n")
    done = command(tmp_path)
    assert done.returncode == 2
    assert "has the columns ['task', 'method', 'right'], not ['model', 'seed'," in done.stderr
    assert other.read_text() == "task,method,right\nneedle,full,1\n"


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path, "larger")
    assert done.returncode == 2
    assert "there are: apart, short, small" in done.stderr
    spec = SMALL["small"]["study"] | {"methods": ["full", "snapkv", "snapkw"]}
    done = command(tmp_path, tables={"small": SMALL["small"] | {"study": spec}})
    assert done.returncode == 2
    assert "no method ['snapkw']" in done.stderr


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    done = command(tmp_path, "--device", device)
    assert done.returncode == 2
    assert f"--device {device}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_files_of_this_project_are_continued(modules: dict[str, ModuleType]) -> None:
    """Several to a prompt, in an order of its own; the answer is what follows in the last one."""
    tokens = load_tokens(model_path())
    task = modules["own_tasks"].load_task("repository")
    samples = [task.numbered(tokens, 3000, index, 5) for index in (0, 1, 0)]
    assert samples[0] == samples[2] and samples[0].prompt != samples[1].prompt
    for sample in samples[:2]:
        assert 2900 < tokens.count(sample.prompt) <= 3000
        assert tokens.count(sample.prompt + sample.answers[0]) <= tokens.count(sample.prompt) + 48
        *_, last = re.split(r"^# vllm_pyramid/.*\.py$", sample.prompt, flags=re.MULTILINE)
        (path,) = re.findall(r"^# (vllm_pyramid/.*\.py)$", sample.prompt, flags=re.MULTILINE)[-1:]
        file = (FOLDER.parents[1] / path).read_text(encoding="utf-8")
        assert f"\n{file}\n".startswith(f"{last}{sample.answers[0]}")
    with pytest.raises(ValueError, match="have fewer than 3000000 tokens"):
        task.numbered(tokens, 3_000_000, 0, 5)


def test_prompts_over_other_files_of_this_project_are_not_mixed(tmp_path: Path) -> None:
    """The folder keeps the version of the files; the prompts of another have no row in it."""
    spec = SMALL["small"]["study"] | {"lengths": [320], "tasks": ["repository"], "samples": 1}
    tables = {"files": SMALL["small"] | {"study": spec}}
    assert command(tmp_path, tables=tables).returncode == 0
    kept, rows = tmp_path / "out" / "repository.txt", rows_of(tmp_path)
    assert command(tmp_path, tables=tables).returncode == 0 and rows_of(tmp_path) == rows
    kept.write_text("00000000")
    done = command(tmp_path, tables=tables)
    assert done.returncode == 2
    assert "prompts over other files of this project (00000000" in done.stderr.replace("\n", " ")
    assert rows_of(tmp_path) == rows


def test_the_packaged_tables_name_what_there_is(modules: dict[str, ModuleType]) -> None:
    tables = modules["tables"].read_tables(FOLDER / "tables.yaml", [])
    methods = modules["methods"].load_methods(FOLDER / "methods.yaml")
    used = set()
    for table in tables.values():
        load = load_task
        if (spec := table.study or table.lines) is not None:
            used |= set(spec.methods)
            names = spec.tasks
            load = modules["own_tasks"].load_task
        else:
            flags = [p for key, value in table.engine.items() for p in (f"--{key}", str(value))]
            args = parse_args(flags)
            assert parse_variants(args.policies, "--policies")
            names = args.tasks.split(",")
        assert [load(name).name for name in names] == list(names)
    assert used <= set(methods)


def test_a_press_is_asked_for_what_it_keeps(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no preset, so nothing may ask for its policy."""
    asked = []

    def kept_by(*arguments: object) -> list[list[torch.Tensor]]:
        asked.append(arguments)
        return [[torch.arange(3)]]

    monkeypatch.setitem(sys.modules, "presses", SimpleNamespace(kept_by=kept_by))
    method = modules["methods"].load_methods(FOLDER / "methods.yaml")["kvpress: SnapKV"]
    model = SimpleNamespace(layers=1)
    way = method.way(SimpleNamespace(tokens=256, model=model, recorded="recorded"), "25%")
    assert asked == [("snapkv_press.SnapKVPress", {}, None, model, "recorded", 64)]
    assert type(way).__name__ == "Evicted"


def test_intervals(modules: dict[str, ModuleType]) -> None:
    """The mean over tasks of means; one prompt of a task has no interval."""
    spread, cell = modules["report"].spread, modules["report"].cell
    assert spread([np.array([1.0, 1.0]), np.array([3.0, 3.0])]) == (2.0, 2.0, 2.0)
    assert cell((2.0, 2.0, 2.0)) == "2.00 (2.00 to 2.00)"
    assert cell(spread([np.array([1.0, 1.0]), np.array([3.0])])) == "2.00"
    values = np.random.default_rng(1).normal(0.0, 1.0, 400)
    mean, low, high = spread([values])
    assert mean == pytest.approx(values.mean())
    expected = 1.96 * values.std() / 20
    assert high - mean == pytest.approx(expected, rel=0.15)
    assert mean - low == pytest.approx(expected, rel=0.15)


@pytest.mark.engine
def test_a_table_of_the_engine(tmp_path: Path) -> None:
    """Its flags reach `python -m lab.eval`, whose tables are shown."""
    flags = {"policies": "full", "tasks": "needle", "lengths": "128", "samples": 1}
    done = command(tmp_path, tables={"served": {"title": "The engine", "engine": flags}})
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "out" / "tables.md").read_text()
    assert text.startswith("## The engine")
    assert "needle" in text and "full" in text
    assert (tmp_path / "out" / "served.csv").exists()
