# SPDX-License-Identifier: Apache-2.0
"""`bench agents FILE` from its command line to its rows; no engine is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.bench.test_command import SAMPLE, FakeEngines
from vllm_pyramid.tools.bench import measures
from vllm_pyramid.tools.bench.job import Variant
from vllm_pyramid.tools.cli import main

pytestmark = pytest.mark.cpu


class FakeReplays(FakeEngines):
    """Answers as the whole cache does, or all but the first token otherwise where it evicts."""

    salts: list[str]
    evicts = True

    def ask(
        self,
        variant: Variant,
        do: str,
        on_progress: Callable[[int], None] = lambda _: None,
        **task: Any,
    ) -> dict[str, Any]:
        cls = type(self)
        assert do == "replay" and task["budget"] == variant.budget
        assert task["turn_mode"] == (None if variant.turn_mode == "none" else variant.turn_mode)
        cls.salts.append(task["salt"])
        if not task["salt"].startswith("warm-up"):
            cls.runs.append((variant.policy, variant.turn_mode, self.limits[variant]))
        made: dict[str, Any] = {"first": 1.0, "last": 2.0, "prompt_len": 100, "cached": 50}
        made["evicted"] = variant.budget is not None and cls.evicts
        made["answer"] = [9, 8 if variant.budget is None else 7, 6]
        requests = [
            {"agent": number, "index": index, "turn": turn["number"], **made}
            for number, turns in enumerate(task["agents"])
            for index, turn in enumerate(turns)
        ]
        return {"output_tokens_per_s": 1.0, "requests_per_min": 5.0, "requests": requests}


RECORDED = ["bench", "agents", SAMPLE, "--policies", "auto,full", "--turn-modes", "resume,none"]
RECORDED += ["--model", "built-in", "--turns", "2", "--repetitions", "2", "--pool-prompts", "1.5"]


def test_recorded_agents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variants alternate, each in a salt of its own, and are compared with the one that is whole,
    wherever it stands.
    """
    monkeypatch.setattr(FakeReplays, "runs", [], raising=False)
    monkeypatch.setattr(FakeReplays, "salts", [], raising=False)
    monkeypatch.setattr(measures, "Engines", FakeReplays)
    assert main([*RECORDED, "--out", str(tmp_path)]) == 0
    turn = [("auto", "resume", 1.5), ("auto", "none", 1.5), ("full", None, 1.5)]
    assert FakeReplays.runs == turn * 2 and len(set(FakeReplays.salts)) == 3 + 6
    written = json.loads((tmp_path / "agents.json").read_text())
    rows = written["rows"]
    assert [(row["policy"], row["turn_mode"]) for row in rows] == [
        *(("auto", "resume"), ("auto", "none"), ("full", ""))
    ]
    assert [row["agreement"] for row in rows] == pytest.approx([1 / 3, 1 / 3, 1])
    assert rows[0]["num_prompts"] == 2 and rows[0]["turns"] == 2 and rows[0]["shared_len"] == 0
    assert rows[0]["requests_per_min"] == 5.0 and rows[0]["output_ratio"] == 1.0
    by_turn = written["by_turn"]
    assert [row["turn"] for row in by_turn] == [1] * 3 + [2] * 3 + ["all"] * 3
    assert by_turn[3]["cached_share"] == 0.5 and by_turn[3]["requests"] == 4
    assert (tmp_path / "agents-by-turn.csv").read_text().count("\n") == 10
    assert "cached_share" in capsys.readouterr().out
    monkeypatch.setattr(FakeReplays, "evicts", False)
    assert main([*RECORDED, "--out", str(tmp_path)]) == 2
    assert "auto 12% resume evicted nothing from any prompt" in capsys.readouterr().err
