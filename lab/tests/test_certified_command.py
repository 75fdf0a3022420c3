# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.certified` without its engines: groups, refusals, the file it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.certified import __main__ as command
from lab.certified.__main__ import main
from lab.certified.groups import (
    Group,
    Prompt,
    check_enough,
    find_budget,
    group_prompts,
)
from lab.certified.risk import least_prompts
from vllm_pyramid.policy import load_policy

pytestmark = pytest.mark.cpu

BUDGETS = ("50%", "25%", "12%")


def argv(tmp_path: Path, lines: list[dict[str, Any]], *more: str) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = str(tmp_path / "mine.yaml")
    return ["--model", "m", "--prompts", str(file), "-o", output, *more]


def lines(count: int, tokens: int = 5, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [1] * tokens, **more}] * count


def test_groups() -> None:
    prompts = [Prompt([1] * 10), Prompt([1] * 30), Prompt([1] * 11, "mail"), Prompt([1] * 99)]
    assert group_prompts(prompts, ()) == {
        Group("", 1, None): [0, 1, 3],
        Group("mail", 1, None): [2],
    }
    groups = group_prompts(prompts, (30, 10))
    assert groups == {
        Group("", 1, 10): [0],
        Group("", 11, 30): [1],
        Group("", 31, None): [3],
        Group("mail", 11, 30): [2],
    }
    assert [str(group) for group in groups] == [
        "1 to 10 tokens",
        "11 to 30 tokens",
        "31 tokens and more",
        "'mail', 11 to 30 tokens",
    ]
    assert str(Group("", 1, None)) == "all prompts"
    with pytest.raises(ValueError, match=r"at least 119 prompts .* 'mail', 11 to 30 tokens has 1:"):
        check_enough(groups, 0.02, 0.9)
    check_enough({Group("", 1, None): range(119)}, 0.02, 0.9)


def test_the_budget_of_a_group() -> None:
    losses = np.zeros((3, 400))
    losses[1, :4], losses[2, :100] = 0.5, 0.5
    found = find_budget(Group("", 1, None), losses, BUDGETS, 0.02, 0.9)
    assert found.budget == "25%" and not found.reason
    assert found.losses == {"50%": 0.0, "25%": 0.005, "12%": 0.125}
    # Whatever the order of the file: all losses at its front, at its end, or spread.
    for order in (np.arange(400)[::-1], np.random.default_rng(1).permutation(400)):
        assert find_budget(Group("", 1, None), losses[:, order], BUDGETS, 0.02, 0.9).budget == "25%"


@pytest.mark.parametrize(
    ("hit", "size", "reason"),
    [
        (6, 0.5, r"at 50% 0.0200 of the tokens differ|at 50% 0.020 of the tokens differ"),
        (40, 0.5, "which is not below the risk: add larger budgets"),
        (3, 0.5, r"150 prompts are too few to be sure: about \d+ like these would do"),
    ],
)
def test_no_budget(hit: int, size: float, reason: str) -> None:
    losses = np.zeros((3, 150))
    losses[:, :hit] = size
    found = find_budget(Group("", 1, None), losses, BUDGETS, 0.02, 0.9)
    assert found.budget is None
    assert re.search(reason, found.reason), found.reason


def test_the_file_is_a_policy_with_the_largest_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def measure(model: str, policy: Any, args: Any, prompts: Any, budgets: Any, *rest: Any) -> Any:
        asked.update(policy=policy, args=args, prompts=prompts, budgets=budgets, rest=rest)
        losses = np.zeros((len(budgets), len(prompts)))
        losses[2] = [0.5 * (prompt.application == "mail") for prompt in prompts]
        return losses

    monkeypatch.setattr(command, "measure", measure)
    prompts = [*lines(130, application="mail"), *lines(130, 9)]
    more = ["--risk", "0.02", "--budgets", "12%,50%,25%", "--answer-tokens", "7"]
    assert main(argv(tmp_path, prompts, *more)) == 0
    assert asked["budgets"] == BUDGETS and asked["rest"][0] == 7
    assert asked["args"] == {"kv_policy": "auto", "kv_policy_args": {"min_tokens": 256}}
    text = (tmp_path / "mine.yaml").read_text()
    assert "'mail': 25% (130 prompts, 0.0000 differ)" in text
    assert "all prompts: 12% (130 prompts" in text
    policy = load_policy(str(tmp_path / "mine.yaml"))
    assert policy.name == "mine" and str(policy.budget) == "25%" and policy.min_tokens == 256
    assert policy.scorer == load_policy("auto").scorer
    assert "--kv-policy" in capsys.readouterr().out


def test_nothing_is_written_unless_all_groups_have_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(model: str, policy: Any, args: Any, prompts: Any, budgets: Any, *_: Any) -> Any:
        return np.array([[0.5 * (p.application == "mail") for p in prompts]] * len(budgets))

    monkeypatch.setattr(command, "measure", measure)
    prompts = [*lines(130, application="mail"), *lines(130)]
    assert main(argv(tmp_path, prompts, "--risk", "0.02")) == 2
    said = capsys.readouterr()
    assert "no policy was written; 'mail': at 75% 0.500 of the tokens differ" in said.err
    assert "6% 0.0000" in said.out  # of the other group
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--risk", "0.02"], f"takes at least {least_prompts(0.02, 0.9)} prompts .* has 3"),
        (["--risk", "0.02", "--lengths", "4,8"], "5 to 8 tokens has 3"),
        (["--risk", "0"], "must lie between 0 and 1"),
        (["--risk", "0.02", "--confidence", "1"], "must lie between 0 and 1"),
        (["--risk", "0.02", "--answer-tokens", "1"], "at least two"),
        (["--risk", "0.02", "--budgets", "12%,64"], "mixes numbers of tokens and shares"),
        (["--risk", "0.02", "--budgets", "x"], "budget 'x' cannot be read"),
        (["--risk", "0.02", "--budgets", "3"], "too small for policy"),
        (["--risk", "0.02", "--kv-policy", "full"], "no budget to look for"),
        (["--risk", "0.02", "--lengths", "0"], "not a whole number of at least 1"),
    ],
)
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(argv(tmp_path, lines(3), *more)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_risk_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv(tmp_path, lines(3)))
    assert "--risk" in capsys.readouterr().err


def test_wrong_applications(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv(tmp_path, [*lines(1), *lines(1, application=3)], "--risk", "0.5")) == 2
    assert 'line 2: "application" must be a text' in capsys.readouterr().err
