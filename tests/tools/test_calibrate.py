# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate` without its engine: prompts, shares, the file it writes, its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy import load_policy
from vllm_pyramid.tools import calibrate
from vllm_pyramid.tools.calibrate import collect, policy_text, read_prompts
from vllm_pyramid.tools.cli import main

REPORTS: list[dict[str, Any]] = [
    {"solved_tokens": [18, 38, 8, 28]},  # 10, 30, 0, 20 beyond the window of 8
    {"kept_tokens": [9, 9, 9, 9]},  # shorter than the budget
    {"solved_tokens": [38, 38, 8, 28]},  # 30, 30, 0, 20
]


def test_the_shares_are_the_mean_over_the_prompts() -> None:
    calibration = collect(REPORTS, floor=8)
    assert calibration.skipped == 1
    assert calibration.shares.shape == (2, 4)
    assert calibration.mean == pytest.approx(
        [(1 / 6 + 3 / 8) / 2, (3 / 6 + 3 / 8) / 2, 0, (2 / 6 + 2 / 8) / 2]
    )
    assert calibration.mean.sum() == pytest.approx(1.0)


def test_prompts_that_all_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the 2 prompts is longer than the budget"):
        collect([{"kept_tokens": [5, 5]}] * 2, floor=8)


def test_the_file_is_a_policy_with_these_shares(tmp_path: Path) -> None:
    solving = load_policy("xkv", 40, {"window": 16, "kernel_size": 9})
    calibration = collect(REPORTS, floor=8)
    file = tmp_path / "mine.yaml"
    file.write_text(policy_text(solving, calibration, "mine", "a/model"))
    policy = load_policy(str(file))
    assert policy.name == "mine" and not policy.allocator.defers
    same = set(type(policy).model_fields) - {"name", "description", "allocator"}
    assert policy.model_dump(include=same) == solving.model_dump(include=same)
    plan = policy.plan(2000, 4, 16)
    assert isinstance(plan, RetentionPlan)
    assert plan.end.keep.sum() == 4 * 40
    wanted = 16 + 4 * 24 * calibration.mean
    assert np.abs(plan.end.keep - wanted).max() < 1.01
    with pytest.raises(ValueError, match="shares for 4 layers, but this model has 8"):
        policy.plan(2000, 8, 16)
    assert load_policy(str(file), "25%").plan(2000, 4, 16).end.keep.sum() == 4 * 500


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello", "id": 3}\n\n{"prompt_token_ids": [1, 2]}\n')
    assert read_prompts(file) == [{"prompt": "Hello"}, {"prompt_token_ids": [1, 2]}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2: one of .* not empty"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 1: one of"),
        ("{", "line 1: not valid JSON"),
    ],
)
def test_wrong_prompts(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(file)


def _argv(tmp_path: Path, *more: str) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2]}\n{"prompt_token_ids": [3, 4]}\n')
    output = str(tmp_path / "budgets.yaml")
    return ["calibrate", "--model", "m", "--prompts", str(file), "-o", output, *more]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--kv-policy", "pyramidkv"], "beforehand.*xkv"),
        (["--kv-policy", "adakv"], "single KV heads, which are not calibrated"),
        (["--kv-policy-args", '{"retention": 0.9}'], "no set total"),
        (["--kv-policy-args", '{"sample_share": 0.5}'], "calibration needs all of them"),
        (["-o", "budgets.txt"], "must end in .yaml"),
        (["--prompts", "/nowhere.jsonl"], "cannot read the prompts"),
        (["--engine-args", '{"kv_budget": 3}'], "leave kv_budget out"),
    ],
)
def test_errors_are_one_line_and_come_before_the_engine(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(calibrate, "_solve", lambda *args: pytest.fail("the engine was started"))
    assert main(_argv(tmp_path, *more)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("vllm-pyramid: error: ") and captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err


def test_the_command(capsys, tmp_path, monkeypatch) -> None:
    seen: list[Any] = []

    def solve(model: str, settings: Any, prompts: Any, engine_args: Any) -> Any:
        seen.append((model, settings.to_additional_config(), prompts, engine_args))
        return iter(REPORTS)

    monkeypatch.setattr(calibrate, "_solve", solve)
    argv = _argv(tmp_path, "--kv-budget", "30", "--engine-args", json.dumps({"seed": 1}))
    assert main(argv) == 0
    (call,) = seen
    assert call[0] == "m" and call[3] == {"seed": 1}
    assert call[1] == {"kv_policy": "xkv", "kv_budget": "30", "kv_min_tokens": 0}
    assert call[2] == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3, 4]}]
    out = capsys.readouterr().out
    assert "4 layers over 2 prompts (1 fitted into the budget)" in out
    policy = load_policy(str(tmp_path / "budgets.yaml"))
    assert policy.name == "budgets" and policy.budget.tokens == 30 and policy.min_tokens is None
    assert main([*argv, "--kv-policy-args", '{"min_tokens": 70}']) == 0
    assert load_policy(str(tmp_path / "budgets.yaml")).min_tokens == 70
