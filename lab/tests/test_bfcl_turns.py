# SPDX-License-Identifier: Apache-2.0
"""How `lab.bfcl_turns` reads BFCL's tools, calls and conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.bfcl_turns import cell, converse, read_tools

pytestmark = pytest.mark.cpu


def test_a_conversation_ends_in_its_last_question(tmp_path: Path) -> None:
    properties = {
        "folder": {"type": "string"},
        "depth": {"type": "dict", "properties": {"type": {"type": "float"}}},
    }
    parameters = {"type": "dict", "properties": properties, "required": ["folder"]}
    doc = {"name": "cd", "description": "Go.", "parameters": parameters, "response": {"type": "x"}}
    (tmp_path / "files.json").write_text(json.dumps(doc) + "\n")
    tools = read_tools(tmp_path, ["files.json"])
    function = tools[0]["function"]
    assert [*function] == ["name", "description", "parameters"]
    assert function["parameters"]["properties"]["depth"] == {
        "type": "object",
        "properties": {"type": {"type": "number"}},
    }

    executed = []

    def execute(calls: Sequence[str], entry: dict[str, Any]) -> list[str]:
        executed.append((list(calls), entry["id"]))
        return [f"at {number}" for number in range(len(calls))]

    questions = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    truth = [["cd('a')", "cd(folder='b', depth=-1)"], [], ["cd(folder='c')", "cd('d')"]]
    found = converse({"id": "x", "question": questions}, truth, tools, execute)
    assert executed == [(truth[0], "x"), ([], "x")], "no call of the last turn"
    assert [message["role"] for message in found.messages] == [
        *("user", "assistant", "tool", "assistant", "tool"),
        *("user", "user"),
    ]
    calls = [one["tool_calls"][0] for one in found.messages if one["role"] == "assistant"]
    assert [call["function"]["arguments"] for call in calls] == [
        {"folder": "a"},
        {"folder": "b", "depth": -1},
    ]
    results = [one for one in found.messages if one["role"] == "tool"]
    assert [one["content"] for one in results] == ["at 0", "at 1"]
    assert [one["tool_call_id"] for one in results] == [call["id"] for call in calls]
    assert found.call == {"name": "cd", "arguments": {"folder": "c"}}


def test_cells_have_wilsons_interval() -> None:
    assert cell([True, False]) == "1 of 2 (0.09 to 0.91)"
