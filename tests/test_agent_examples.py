# SPDX-License-Identifier: Apache-2.0
"""The agents of the examples, against a server that answers as a model with tools would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PATH = "station/sensors.py"
REPORT = {"prompt_tokens": 90, "kept_tokens": [40, 20], "kv_turns": [50, 90]}
# What the model calls: a file, one that there is not, and a tool that there is not.
CALLS = [("read_file", {"path": PATH}), ("read_file", {"path": "/etc/passwd"}), ("delete", {})]


class Model(ThreadingHTTPServer):
    """Calls tools behind each task, and speaks behind their results; or always calls."""

    def __init__(self, always: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.always = always
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Model

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "m", "object": "model", "type": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, self.headers["X-KV-Session"], body))
        last = body["messages"][-1]
        calls = self.server.always or (last["role"] == "user" and isinstance(last["content"], str))
        name = "_anthropic" if self.path == "/v1/messages" else "_openai"
        self._answer({**getattr(self, name)(calls), "kv_transfer_params": REPORT})

    def _openai(self, calls: bool) -> dict[str, Any]:
        made = [
            {"id": str(i), "type": "function", "function": {"name": name, "arguments": text}}
            for i, (name, text) in enumerate((name, json.dumps(given)) for name, given in CALLS)
        ]
        said = {"content": None, "tool_calls": made} if calls else {"content": "Done."}
        message = {"role": "assistant", **said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m"} | {
            "choices": [choice]
        }

    def _anthropic(self, calls: bool) -> dict[str, Any]:
        made = [
            {"type": "tool_use", "id": str(i), "name": name, "input": given}
            for i, (name, given) in enumerate(CALLS)
        ]
        usage = {"input_tokens": 90, "output_tokens": 1}
        return {"id": "1", "type": "message", "role": "assistant", "model": "m", "usage": usage} | {
            "stop_reason": "end_turn",
            "content": made if calls else [{"type": "text", "text": "Done."}],
        }

    def _answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    server = Model(always=request.param)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(name: str, model: Model) -> list[str]:
    """Run an agent; the lines that it printed."""
    url = f"http://127.0.0.1:{model.server_port}" + ("/v1" if name == "openai" else "")
    command = [sys.executable, str(EXAMPLES / f"agent_{name}.py"), "--base-url", url]
    done = subprocess.run(
        [*command, "--session", "mine"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def results(body: dict[str, Any]) -> list[str]:
    """The results of tools with which a request ends."""
    if body["messages"][-1]["role"] == "tool":
        return [message["content"] for message in body["messages"][-3:]]
    return [part["content"] for part in body["messages"][-1]["content"]]


@pytest.mark.parametrize("model", [False], indirect=True)
@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_an_agent_calls_tools_and_goes_on_with_their_results(name: str, model: Model) -> None:
    printed = run(name, model)
    expected = "turn 1: 90 tokens in the prompt, 30 kept in a layer, 2 turns in the session, 3 tool"
    assert printed[0].startswith(expected) and printed[1].endswith(" 0 tool calls")
    assert len(printed) == len(model.requests) == 6, "three tasks of two turns"
    path = "/v1/messages" if name == "anthropic" else "/v1/chat/completions"
    assert {request[:2] for request in model.requests} == {(path, "mine")}
    bodies = [body for *_, body in model.requests]
    assert all(len(body["tools"]) == 2 for body in bodies)
    for body in bodies[1::2]:
        file, missing, unknown = results(body)
        assert file.startswith("OFF = -999.0")
        assert missing == "the call is wrong: KeyError('/etc/passwd')"
        assert unknown == "there is no tool 'delete'"
    lengths = [len(body["messages"]) for body in bodies]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0]
    for before, after in pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]


@pytest.mark.parametrize("model", [True], indirect=True)
@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_an_agent_that_only_calls_tools_ends(name: str, model: Model) -> None:
    assert len(run(name, model)) == len(model.requests) == 3 * 4
