# SPDX-License-Identifier: Apache-2.0
"""The tools of `lab.tool_turns`, and how answers are scored."""

from __future__ import annotations

import json

import pytest

from lab.tool_turns import QUESTIONS, TURNS, count_names, make_call, make_tools, make_turns
from lab.tool_turns import score_call as score

pytestmark = pytest.mark.cpu


def test_answers_are_scored_by_names_and_arguments_alone() -> None:
    tools = make_tools()
    functions = [tool["function"] for tool in tools]
    names = {function["name"] for function in functions}
    parameters = [name for one in functions for name in one["parameters"]["properties"]]
    assert len(names) == 20 and len(set(parameters)) == len(parameters) == 80
    question, call = make_call(tools, 3, 1)
    assert not any(name in question for name in (*names, *parameters)), "only in the schemas"
    assert all(str(value) in question for value in call["arguments"].values())
    said = json.dumps(call)
    for text in (said, f"<tool_call>\n{said}\n</tool_call>", f"Use {{it}}:\n```json\n{said}\n```"):
        assert score(text, call) == (True, True)
    as_text = {key: str(value) for key, value in call["arguments"].items()}
    assert score(json.dumps({**call, "arguments": as_text}), call) == (True, True)
    more = {**call["arguments"], "roo_ref": "KX-1042"}
    assert score(json.dumps({**call, "arguments": more}), call) == (True, False)
    fewer = dict(list(call["arguments"].items())[1:])
    assert score(json.dumps({**call, "arguments": fewer}), call) == (True, False)
    other = json.dumps(make_call(tools, 4, 1)[1])
    for text in (other, f"{other}\n{said}", said[:-2], "", "[1]", '{"name": "x", "arguments": 1}'):
        assert score(text, call) == (False, False)
    assert count_names(f"{', '.join(names)}, {call['name']}, {call['name']}x", tools) == 20
    assert count_names(f"`{call['name']}`: {functions[0]['name']}s", tools) == 1


def test_no_question_repeats_a_call_of_the_turns_before() -> None:
    tools = make_tools()
    called = {
        turn[1]["tool_calls"][0]["function"]["name"] for turn in make_turns(tools, max(TURNS))
    }
    asked = {(2 * (turn + n) + 3) % 20 for turn in TURNS for n in range(QUESTIONS)}
    assert called.isdisjoint(tools[number]["function"]["name"] for number in asked)
