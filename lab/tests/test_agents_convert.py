# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.agents.convert`: logs become recorded sessions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.agents.convert import convert

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SYSTEM, ASK = message("system", "Be brief."), message("user", "How?")
SAID, MORE = message("assistant", "So.", refusal=None), message("user", "And then?")


def _convert(*log: dict[str, Any], names: str | None = None) -> list[Any]:
    return convert(list(log), names, "body.messages", "response.choices.0.message", "body.tools")


def request(*messages: dict[str, Any], answer: dict[str, Any] | None = None, **more: Any) -> Any:
    response = {"choices": [{"message": answer}]} if answer else None
    return {
        "body": {"messages": list(messages), "tools": [{"name": "t"}]},
        "response": response,
    } | {**more}


def test_requests_of_one_session_become_one() -> None:
    """A client need not send back all keys of a response."""
    sent_back = message("assistant", "So.")
    (line,) = _convert(
        request(SYSTEM, ASK, answer=SAID | {"annotations": []}),
        request(SYSTEM, ASK, sent_back, MORE, answer=SAID),
        request(SYSTEM, ASK, answer=SAID),  # once more
    )
    assert line["session"] == "session-1" and line["tools"] == [{"name": "t"}]
    said = [(one["role"], one["content"]) for one in line["messages"]]
    assert said == [(m["role"], m["content"]) for m in (SYSTEM, ASK, SAID, MORE, SAID)]
    assert all("refusal" not in one for one in line["messages"])


def test_a_request_that_leaves_another_branches() -> None:
    other = message("user", "And else?")
    first, branch, longer = _convert(
        request(SYSTEM, ASK, SAID, MORE, answer=SAID, name="a"),
        request(SYSTEM, ASK, SAID, other, answer=SAID, name="a"),
        request(SYSTEM, other, answer=SAID, name="b"),
        request(SYSTEM, ASK, SAID, other, SAID, ASK, name="a"),
        names="name",
    )
    assert (first["session"], longer["session"]) == ("a", "b") and "branch_of" not in longer
    assert branch["branch_of"] == "a" and branch["after"] == 3 and "tools" not in branch
    assert [one["content"] for one in branch["messages"]] == ["And else?", "So.", "How?"]
    with pytest.raises(ValueError, match=r"record 0 has no messages at 'body\.messages'"):
        _convert({"messages": [ASK]})


def test_the_command(tmp_path: Path) -> None:
    log, output = tmp_path / "log.json", tmp_path / "sessions.jsonl"
    odd = message("user", "A line,\u2028and another\x85.")
    case = {"id": "a", "messages": [SYSTEM, ASK], "reference": "So."}
    log.write_text(json.dumps({"cases": [case, {**case, "id": "b", "messages": [odd]}]}))
    command = [sys.executable, "-m", "lab.agents.convert", str(log), str(output)]
    done = subprocess.run(
        [*command, "--records", "cases", "--answer", "reference", "--name", "id"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 records: 2 sessions with 2 answers" in done.stdout
    lines = [json.loads(line) for line in output.read_text("utf-8").split("\n") if line]
    assert lines[1]["messages"][0] == odd
    assert [line["session"] for line in lines] == ["a", "b"]
    failed = subprocess.run(
        [*command, "--records", "none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2 and "--records none: there is no array" in failed.stderr
