# SPDX-License-Identifier: Apache-2.0
"""The router of examples/, before stand-ins for engines and before two real servers over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import runpy
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.plumbing.server import Server, free_port, serving

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROUTER = runpy.run_path(str(EXAMPLES / "disaggregated_router.py"))
PROMPT = "The quick brown fox jumps over the lazy dog. " * 30
TICKET = {"do_remote_prefill": True, "pyramid_state": "a" * 32}


class StandIns:
    """Engines without a model, which note what they are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.first: tuple[int, dict[str, Any]] = 200, self.length()
        self.gone: set[str] = set()
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        for path in ROUTER["PATHS"]:
            self.app.add_api_route(path, self._answer, methods=["POST"], response_model=None)

    @staticmethod
    def length(reason: str = "length", **own: Any) -> dict[str, Any]:
        choice = {"text": "one", "finish_reason": reason}
        return {"choices": [choice], "kv_transfer_params": {**TICKET, "kv_policy": "auto"}, **own}

    async def _models(self, request: Request) -> Response:
        if (host := str(request.url.hostname)) in self.gone:
            raise httpx.ConnectError("gone")
        return JSONResponse({"from": host})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        host = str(request.url.hostname)
        self.asked.append((host, body))
        if body.get("kv_transfer_params") == {"do_remote_decode": True}:
            status, answer = self.first
            if status == 0:
                raise httpx.ConnectError("gone")
            return JSONResponse(answer, status)
        if body.get("stream"):
            return StreamingResponse(
                (f"data: {word}\n\n" for word in ("one", "two")), media_type="text/event-stream"
            )
        return JSONResponse({"from": host})


@pytest.fixture
def engines() -> StandIns:
    return StandIns()


def ask(engines: StandIns, *bodies: Any, path: str = "/v1/completions") -> list[httpx.Response]:
    """Send bodies, or a request without one, to a router before two engines of each kind."""

    async def run() -> list[httpx.Response]:
        inner = httpx.AsyncClient(transport=httpx.ASGITransport(engines.app))
        app = ROUTER["make_app"](["http://p1", "http://p2"], ["http://d1", "http://d2"], inner)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            if not bodies:
                return [await client.get(path)]
            return [await client.post(path, content=json.dumps(body)) for body in bodies]

    return asyncio.run(run())


@pytest.mark.cpu
def test_a_request_goes_to_both_with_a_ticket(engines: StandIns) -> None:
    body = {"prompt": "x", "max_tokens": 9, "min_tokens": 3, "vllm_xargs": {"kv_budget": "5%"}}
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    forged = {**body, "kv_transfer_params": {"do_remote_prefill": True}}
    answers = ask(engines, body, stream, forged)
    assert answers[0].json() == {"from": "d1"}
    assert answers[1].text == "data: one\n\ndata: two\n\n"
    assert answers[1].headers["content-type"].startswith("text/event-stream")
    assert [host for host, _ in engines.asked] == ["p1", "d1", "p2", "d2", "p1", "d1"]
    first, second = engines.asked[2][1], engines.asked[3][1]
    assert first == {
        **body,
        "max_tokens": 1,
        "min_tokens": 0,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert second == {**stream, "kv_transfer_params": {**TICKET, "kv_policy": "auto"}}
    assert engines.asked[4][1]["kv_transfer_params"] == {"do_remote_decode": True}


@pytest.mark.cpu
@pytest.mark.parametrize(
    "own",
    [
        *({"n": 2}, {"max_tokens": 1}, {"logprobs": 0}, {"logprobs": True}),
        *({"prompt": ["a", "b"]}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_one_engine_answers_alone(engines: StandIns, own: dict[str, Any]) -> None:
    ask(engines, {"prompt": "x", "max_tokens": 9, **own})
    assert [host for host, _ in engines.asked] == ["d1"]
    assert "kv_transfer_params" not in engines.asked[0][1]


@pytest.mark.cpu
@pytest.mark.parametrize("status", [0, 500, 503])
def test_without_an_engine_that_prefills(engines: StandIns, status: int) -> None:
    engines.first = status, {}
    (answer,) = ask(engines, {"messages": [], "max_tokens": 9}, path="/v1/chat/completions")
    assert answer.json() == {"from": "d1"}
    assert "kv_transfer_params" not in engines.asked[-1][1]


@pytest.mark.cpu
def test_what_the_first_engine_says_last(engines: StandIns) -> None:
    """A mistake of the client, and an answer of one token."""
    engines.first = 400, {"error": "wrong"}
    (answer,) = ask(engines, {"prompt": "x"})
    assert (answer.status_code, answer.json()) == (400, {"error": "wrong"})
    engines.first = 200, StandIns.length("stop")
    answer, stream = ask(engines, {"prompt": "x"}, {"prompt": "x", "stream": True})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert stream.text.startswith("data: one")
    assert [host for host, _ in engines.asked] == ["p1", "p1", "p2", "p2"]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("gone", "answered"), [((), (200, "d1")), (("d1",), (200, "d2")), (("d1", "d2"), (502, None))]
)
def test_models_of_an_engine_that_answers(engines, gone, answered) -> None:
    engines.gone |= {*gone}
    (answer,) = ask(engines, path="/v1/models")
    assert (answer.status_code, answer.json().get("from")) == answered


@pytest.mark.cpu
@pytest.mark.parametrize("body", [[], "text", None, 3])
def test_a_body_that_is_no_object(engines: StandIns, body: Any) -> None:
    (answer,) = ask(engines, body)
    assert answer.status_code == 400
    assert not engines.asked


# Two servers ------------------------------------------------------------------------------------


def _flags(role: str, **extra: Any) -> tuple[str, ...]:
    connector = {
        "kv_connector": "PyramidConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    return (
        *("--kv-policy", "auto", "--kv-budget", "12%", "--kv-min-tokens", "0", "--enforce-eager"),
        *("--max-model-len", "4096", "--max-num-seqs", "8", "--dtype", "float32"),
        *("--kv-cache-memory-bytes", str(128 << 20), "--max-num-batched-tokens", "512"),
        *("--kv-transfer-config", json.dumps(connector)),
    )


@pytest.fixture(scope="module")
def servers(random_model, tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("servers")
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        sender = _flags("kv_producer", listen=address)
        fetcher = _flags("kv_consumer", peers=[address], wait_s=2)
        yield (
            stack.enter_context(serving(random_model, *sender, log=folder / "p.log")),
            stack.enter_context(serving(random_model, *fetcher, log=folder / "d.log")),
        )


@pytest.fixture(scope="module")
def router(servers: tuple[Server, Server]) -> Iterator[str]:
    with _routing(servers[0], servers[1]) as url:
        yield url


@contextlib.contextmanager
def _routing(prefill: Server, *decode: Server) -> Iterator[str]:
    """The router in a thread, while it is needed."""
    port = free_port()
    app = ROUTER["make_app"]([prefill.url], [one.url for one in decode])
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def _model(url: str) -> str:
    return str(httpx.get(f"{url}/v1/models").json()["data"][0]["id"])


def _post(url: str, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    return httpx.post(url + path, json=body, timeout=60).json()


def _handed(server: Server) -> dict[str, float]:
    found = re.findall(
        r'vllm_pyramid:handed_total\{.*reason="(\w+)"\} (\S+)', server.metrics_text()
    )
    return {reason: float(count) for reason, count in found}


def _streamed(url: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of a stream and its last chunk that is one."""
    text, last = "", {}
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                for choice in last["choices"]:
                    text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return text, last


@pytest.mark.engine
@pytest.mark.long
def test_two_servers_answer_as_one(servers: tuple[Server, Server], router: str) -> None:
    """Completions and chats, whole and streamed, with usage and report of one engine."""
    _, decoder = servers
    model = _model(router)
    common = {"model": model, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    chat = [{"role": "user", "content": PROMPT}]
    for path, body in (
        ("/v1/completions", {**common, "prompt": PROMPT}),
        ("/v1/chat/completions", {**common, "messages": chat}),
    ):
        alone = _post(decoder.url, body, path)
        together = _post(router, body, path)
        report, own = together["kv_transfer_params"], alone["kv_transfer_params"]
        assert report.pop("handed") == {"tokens": own["prompt_tokens"]}
        assert report == own
        assert report["evicted_tokens"] > 0
        assert together["usage"]["completion_tokens"] == 12
        assert together["usage"] == alone["usage"]
        message = alone["choices"][0]
        assert together["choices"][0] == message
        expected = message.get("text") or message["message"]["content"]
        text, last = _streamed(router + path, body)
        assert text == expected
        assert last["kv_transfer_params"]["handed"]["tokens"] == own["prompt_tokens"]
    assert _handed(decoder)["loaded"] == 4


@pytest.mark.engine
@pytest.mark.slow
def test_engines_are_killed_among_requests(random_model: Path, tmp_path: Path) -> None:
    """First one of two that decode, then the one that prefills: all answers are one engine's."""
    address, ttl_s = f"127.0.0.1:{free_port()}", 5.0
    to_fetch = {"peers": [address], "wait_s": 2}
    roles: list[tuple[str, dict[str, Any]]] = [
        ("kv_producer", {"listen": address, "ttl_s": ttl_s}),
        *[("kv_consumer", to_fetch)] * 2,
    ]
    with contextlib.ExitStack() as stack:
        prefill, first, second = (
            stack.enter_context(
                serving(random_model, *_flags(role, **own), log=tmp_path / f"{number}.log")
            )
            for number, (role, own) in enumerate(roles)
        )
        url = stack.enter_context(_routing(prefill, first, second)) + "/v1/completions"
        common = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        common["model"] = _model(second.url)
        bodies = [{**common, "prompt": f"{number} {PROMPT}"} for number in range(12)]

        def ask(number: int, to: str = url) -> str | None:
            answer = httpx.post(to, json=bodies[number % len(bodies)], timeout=120)
            return answer.json()["choices"][0]["text"] if answer.status_code == 200 else None

        alone = [ask(number, second.url + "/v1/completions") for number in range(len(bodies))]
        first_token = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        unused = [  # clients that go away with their tickets
            _post(prefill.url, body | first_token) for body in bodies[:4]
        ]
        states = [one["kv_transfer_params"]["pyramid_state"] for one in unused]

        def ask_all(to_kill: Server) -> list[str | None]:
            """Ask for all, six at a time, and kill a server when four have been answered."""
            with ThreadPoolExecutor(6) as pool:
                answers = [pool.submit(ask, number) for number in range(len(bodies))]
                [answer.result() for answer in answers[:4]]
                to_kill.kill()
                return [answer.result() for answer in answers]

        # Requests whose engine dies before the answer has begun are sent to the other one.
        assert ask_all(first) == alone
        assert _is_idle(prefill, 30)
        end = time.monotonic() + ttl_s + 10
        while any(_is_served(address, state) for state in states):
            assert time.monotonic() < end, "states that no engine fetched are still there"
            time.sleep(0.2)
        assert ask_all(prefill) == alone
        assert _is_idle(second, 30)
        assert _handed(second)["loaded"] >= 4


def _is_served(address: str, state: str) -> bool:
    """Whether an engine still has the head or the part of a state."""
    host, port = address.split(":")
    found = False
    for offset, name in enumerate((f"{state}.head", f"{state}.0")):
        with socket.create_connection((host, int(port) + offset), 5) as connection:
            connection.sendall(f"GET {name}\n".encode())
            found |= connection.recv(8) != b"\xff" * 8
    return found


def _is_idle(server: Server, seconds: float) -> bool:
    """Whether a server comes to hold no block and no request."""
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = server.metrics_text()
        held = [re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names]
        assert all(held), "these metrics are there"
        if not any(float(value) for values in held for value in values):
            return True
        time.sleep(0.2)
    return False


@pytest.mark.engine
@pytest.mark.long
def test_a_stop_string_in_the_first_token(servers: tuple[Server, Server], router: str) -> None:
    _, decoder = servers
    model = _model(router)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = _post(decoder.url, body)
    text = whole["choices"][0]["text"]
    assert len(text) > 3
    for stop in (text[:1], text[1:3]):
        own = {**body, "stop": [stop]}
        alone = _post(decoder.url, own)
        together = _post(router, own)
        assert together["choices"] == alone["choices"]
        assert together["usage"] == alone["usage"]


@pytest.mark.engine
@pytest.mark.long
def test_several_answers_are_refused_with_a_ticket(servers: tuple[Server, Server]) -> None:
    sender, _ = servers
    body = {"model": _model(sender.url), "prompt": "x", "max_tokens": 1, "n": 2}
    body["kv_transfer_params"] = {"do_remote_decode": True}
    answer = httpx.post(f"{sender.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "send n requests" in answer.text


@pytest.mark.engine
@pytest.mark.long
def test_when_the_engine_that_prefills_dies(servers: tuple[Server, Server], router: str) -> None:
    """Behind a ticket, and before one: the other computes the prompt, and says why. Last here."""
    sender, decoder = servers
    model = _model(router)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    alone = _post(decoder.url, body)
    first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    ticket = _post(sender.url, first)
    sender.kill()
    late = {**body, "kv_transfer_params": ticket["kv_transfer_params"]}
    found = _post(decoder.url, late)
    assert found["choices"] == alone["choices"]
    assert "cannot be reached" in found["kv_transfer_params"]["handed"]["because"]
    again = _post(router, body)
    assert again["choices"] == alone["choices"]
    assert _handed(decoder)["unreachable"] == 1
