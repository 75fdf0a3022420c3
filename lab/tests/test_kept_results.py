# SPDX-License-Identifier: Apache-2.0
"""The rows in lab/results: each has the command that makes it, and a page that names it."""

from __future__ import annotations

import csv
import itertools
import re
import shlex
from pathlib import Path

import pytest

from vllm_pyramid.tools.bench.options import MEASURES, parse
from vllm_pyramid.tools.cli import _build_parser

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*DOCS.rglob("*.md"), *(ROOT / "lab" / "results").glob("*.md")]
# Runs of a bench that had programs outside of vLLM too, or measures that it has no more.
GONE = ("one-request", "peers", "latency", "pressure")


def _table(name: str) -> list[dict[str, str]]:
    with (ROOT / "lab" / "results" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


RUNS = _table("bench-commands.csv")


def _words(run: dict[str, str]) -> list[str]:
    """The words of a run's command, from `vllm-pyramid` on."""
    words = shlex.split(run["command"])
    if re.fullmatch(r"VLLM_PYRAMID_\w+=\w+", words[0]):  # a variable of this package's own
        del words[0]
    return words


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["run"])
def test_kept_figures_have_the_command_that_makes_them(run: dict[str, str]) -> None:
    """The command names no path of the machine that ran it, and a page names the run."""
    words = _words(run)
    assert words[:2] == ["vllm-pyramid", "bench"] and not any(w.startswith("/") for w in words)
    rows = [row for row in _table("bench.csv") if row["run"] == run["run"]]
    assert rows and run["processor"] and run["date"]
    given = dict(itertools.pairwise(words))
    if "--pool-prompts" in given:
        pools = set(map(float, given["--pool-prompts"].split(",")))
        assert {float(row["pool_prompts"]) for row in rows} == pools
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert any(f"`{run['run']}`" in text for text in pages), f"no page names {run['run']}"


def test_every_kept_row_belongs_to_a_run() -> None:
    runs = {run["run"] for run in RUNS}
    assert {row["run"] for row in _table("bench.csv")} == runs
    assert {row["run"] for row in _table("bench-profiles.csv")} <= runs


@pytest.mark.parametrize(
    "run", [run for run in RUNS if run["run"] not in GONE], ids=lambda run: run["run"]
)
def test_commands_of_kept_results_are_still_options(run: dict[str, str]) -> None:
    words = [word for word in _words(run)[1:] if word != "--profile"]  # a flag that is gone
    args = _build_parser().parse_args(words)
    options = parse(MEASURES[args.measure], vars(args))
    for row in _table("bench.csv"):
        if row["run"] == run["run"]:
            assert float(row["pool_prompts"]) in [pool for pool, _ in options.rounds]
            assert row["policy"] in (*options.policies, "full")  # the first policy was `full` once
