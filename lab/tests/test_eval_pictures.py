# SPDX-License-Identifier: Apache-2.0
"""What the pictures show is what the rows and answers hold."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.eval import run as run_module
from lab.eval.pictures import _style, draw, kept_shares
from lab.eval.recall import Measured
from lab.eval.registry import load_task
from lab.eval.run import Answer, Run, Settings
from lab.eval.tables import rows_of
from lab.eval.variants import parse_variants
from lab.tests.test_eval_tasks import WordTokenizer, eviction
from vllm_pyramid.tools.eval.haystack import Tokens

pytestmark = pytest.mark.cpu

WIDE = "snapkv(kernel_size=11)"
DEPTHS = [round(i / 9, 2) for i in range(10)]


def result_of(job: Any) -> Measured:
    """With a budget the lower half of the text is lost but for two digits; the wide one is not."""
    evicted = job.variant.label == "snapkv"
    answer = job.sample.answers[0]
    if evicted and job.sample.facts.get("depth", 0) > 0.5:
        answer = answer[:2]
    full = job.variant.label == "full"
    return Measured(
        text=f" {answer}.",
        eviction=eviction(
            [200, 200] if full else [40, 10],
            200,
            1.0 if full else 0.25 if job.request.budget == "25%" else 0.5,
        ),
        nats=math.log(8.0) if job.sample.forced else None,
        recall=[[0.5, 0.75], [0.25, 0.25]] if job.task.needs_recall else None,
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(run_module, "longest_of_model", lambda model: None)
    settings = Settings(
        model="some/model",
        policies=parse_variants('full,snapkv,snapkv:{"kernel_size":11}', "--policies"),
        budgets=("25%", "50%"),
        tasks=tuple(map(load_task, ("needle", "perplexity", "attention-recall"))),
        lengths=(256,),
        samples=10,
        seeds=(0, 1),
    )
    evaluation = Run(settings, Tokens(WordTokenizer()))
    results = {job.request.key: result_of(job).model_dump() for job in evaluation.jobs}
    answers: list[Answer] = list(evaluation.answers(results))  # type: ignore[arg-type]
    rows = rows_of(answers)
    figures: dict[str, Any] = {}
    save = figure.Figure.savefig

    def keep(self: Any, path: Path, **arguments: Any) -> None:
        figures[path.name] = self
        save(self, path, **arguments)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    paths = draw(answers, rows, tmp_path / "new")
    return SimpleNamespace(paths=paths, figures=figures, rows=rows)


def test_every_picture_is_written(drawn: SimpleNamespace) -> None:
    assert [path.name for path in drawn.paths] == [
        "quality-against-memory.png",
        "needle.png",
        "kept-by-layer.png",
        "recall-by-layer.png",
    ]
    for path in drawn.paths:
        assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 5000


def test_quality_against_memory(drawn: SimpleNamespace) -> None:
    axes = drawn.figures["quality-against-memory.png"].axes
    assert [(axis.get_title().split(",")[0], axis.get_ylabel()) for axis in axes] == [
        ("needle", "exact match"),
        ("needle", "digits right at their place"),
        ("perplexity", "perplexity"),
        ("attention-recall", "share of attention"),
    ]
    labels = axes[0].get_legend_handles_labels()[1]
    assert labels == ["full", "snapkv", WIDE]
    assert len({tuple(_style(place).values()) for place in range(40)}) == 40
    # Depths above 0.5 are half of the ten; two digits of five are left of these.
    lines = [[list(lines[0].get_ydata()) for lines in axis.containers] for axis in axes[:2]]
    assert lines[0] == [[0.5, 0.5], [1.0, 1.0]]
    assert lines[1][0] == pytest.approx([0.7, 0.7]) and lines[1][1] == [1.0, 1.0]
    for lines in axes[0].containers:
        assert list(lines[0].get_xdata()) == [25.0, 50.0]


def test_the_needle_map(drawn: SimpleNamespace) -> None:
    maps = {
        axis.get_title().split(":")[0]: axis.images[0].get_array()[:, 0].tolist()
        for axis in drawn.figures["needle.png"].axes
        if axis.images and axis.get_title()
    }
    lost = [float(depth <= 0.5) for depth in DEPTHS]
    kept = [1.0] * 10
    assert maps == {
        "full, 100%": kept,
        **{f"snapkv, {budget}": lost for budget in ("25%", "50%")},
        **{f"{WIDE}, {budget}": kept for budget in ("25%", "50%")},
    }


def test_layers(drawn: SimpleNamespace) -> None:
    for name, expected in (
        ("kept-by-layer.png", [0.2, 0.05]),
        ("recall-by-layer.png", [0.625, 0.25]),
    ):
        axes = drawn.figures[name].axes
        assert [axis.get_title() for axis in axes] == ["budget 25%", "budget 50%"]
        for axis in axes:
            assert [line.get_label() for line in axis.lines] == ["snapkv", WIDE]
            for line in axis.lines:
                assert list(line.get_ydata()) == pytest.approx(expected)


def test_shares_of_layers_are_means_of_their_heads() -> None:
    report = eviction([400, 200, 100, 20], 1000, 0.25)
    assert kept_shares(report) == [0.4, 0.2, 0.1, 0.02]
    assert kept_shares(report.model_copy(update={"kv_heads": 2})) == pytest.approx([0.3, 0.06])
