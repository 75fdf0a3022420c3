# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid eval` without engines: what it asks for, its figures, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_pyramid.tools.child_process import ChildError
from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.eval import engine
from vllm_pyramid.tools.eval.result import EvictionReport, Reference, Result

PROMPTS = [[7, 8, 9, 10], [1, 2, 3]]


class StandIn:
    """Stands for `run_child`: a reference says the prompt backwards, 12 % lose half of it."""

    def __init__(self) -> None:
        self.work: list[Mapping[str, Any]] = []

    def __call__(
        self, module: str, work: Mapping[str, Any], what: str, *, offline: bool
    ) -> Iterator[dict[str, Any]]:
        self.work.append(work)
        yield {"stage": "starting the engine"}
        for request in reversed(work["requests"]):  # in whatever order they come
            ids, small = request["prompt_token_ids"], request["budget"] == "12%"
            found: dict[str, Any] = {}
            if request["is_reference"]:
                found["reference"] = Reference(token_ids=ids[::-1], likeliest=[], logprobs=[])
            else:
                assert request["forced"] == ids[::-1] == request["reference"]["token_ids"]
                worse = 0.25 * (ids == PROMPTS[0])
                found = {"agreement": 0.75 - worse if small else 1.0, "divergence": 0.5 * small}
            report = EvictionReport(
                kv_policy=work["policy_name"],
                prompt_tokens=len(ids),
                computed_tokens=len(ids),
                kept_tokens=[len(ids)],
                evicted_tokens=0,
                blocks_before=8,
                blocks_after=2 if small else 8,
            )
            result = Result(text="", eviction=report, **found)
            yield {"key": request["key"], "result": result.model_dump()}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(engine, "run_child", stand_in)
    return stand_in


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    return str(file)


def test_figures(asked, prompts, tmp_path, capsys) -> None:
    file = tmp_path / "rows.json"
    more = ("--kv-policy", "snapkv", "--budgets", "100%,12%", "--json", str(file))
    assert main(["eval", "--model", "a/model", "--prompts", prompts, *more]) == 0
    whole, evicted = asked.work
    assert (whole["kv_policy"], evicted["kv_policy"]) == ("full", "snapkv")
    assert evicted["kv_policy_args"] == {"min_tokens": 256}, "the floor of a server"
    assert whole["engine_args"] == evicted["engine_args"] == {"max_model_len": 4 + 64 + 1}
    assert [request["budget"] for request in evicted["requests"]] == ["100%", "12%"] * 2
    found = json.loads(file.read_text())
    assert (found["model"], found["policy"], found["prompts"]) == ("a/model", "snapkv", 2)
    assert found["rows"] == [
        {"budget": "100%", "agreement": 1.0, "worst": 1.0, "divergence": 0.0, "memory": 1.0},
        {"budget": "12%", "agreement": 0.625, "worst": 0.5, "divergence": 0.5, "memory": 0.25},
    ]
    shown = capsys.readouterr().out
    assert "62.5%" in shown and "0.5000" in shown and "25.0%" in shown


def test_an_answer_that_was_not_compared_is_an_error(prompts, monkeypatch) -> None:
    stand_in = StandIn()

    def loses_one(*arguments: Any, **named: Any) -> Iterator[dict[str, Any]]:
        messages = list(stand_in(*arguments, **named))
        yield from messages[: len(messages) - (len(stand_in.work) == 2)]

    monkeypatch.setattr(engine, "run_child", loses_one)
    with pytest.raises(RuntimeError, match="1 answers were not compared"):
        main(["eval", "--model", "a/model", "--prompts", prompts])


def test_a_failed_engine_is_an_error_in_one_line(prompts, monkeypatch, capsys) -> None:
    def fails(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        raise ChildError("the engine failed")
        yield

    monkeypatch.setattr(engine, "run_child", fails)
    assert main(["eval", "--model", "a/model", "--prompts", prompts]) == 2
    assert "error: the engine failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--answer-tokens", "1"], "at least two"),
        (["--prompt-tokens", "20"], "leave no room for a text"),
        (["--budgets", "3"], "too small for policy"),
        (["--engine-args", '{"kv_policy": "x"}'], "leave kv_policy out"),
        (["--json", "/"], "cannot write /: Is a directory"),
    ],
)
def test_wrong_arguments(arguments, said, capsys) -> None:
    assert main(["eval", *arguments]) == 2
    assert said in capsys.readouterr().err
