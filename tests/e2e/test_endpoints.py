# SPDX-License-Identifier: Apache-2.0
"""Each endpoint of one server with settings, sessions and reports, as agents' clients use them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest

from tests.plumbing.server import Server, serving

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAYERS, BLOCK = 8, 16
TEXT = "The quick brown fox jumps over the lazy dog. " * 30
KEYS = ("the-key-of-one", "the-key-of-another")
FLAGS = (
    *("--kv-policy", "auto", "--kv-budget", "12%", "--trust-request-chat-template"),
    "--enforce-eager",
    *("--max-model-len", "8192", "--enable-prompt-tokens-details", "--api-key", *KEYS),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 << 20)),
    *("--kv-session-from", "session_id,x-claude-code-session-id,prompt_cache_key"),
    *("--kv-anchor", "billing,Request id: *"),
)
ENDPOINTS = ("chat", "completions", "messages", "responses")
PATHS = {"chat": "chat/completions"}
# What Anthropic's usage has of a prompt, in parts.
PROMPT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@pytest.fixture(scope="module")
def server(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    store = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with serving(random_model, *FLAGS, log=log, environment=store) as running:
        yield running


def openai_of(server: Server, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


class Answer(NamedTuple):
    """What an endpoint has answered.

    Attributes:
        text, report: the answer and its report. prompt, cached: tokens, as the usage has them.
        data: the body, or the last chunk that is one. id: of the response.
    """

    text: str
    report: dict[str, Any]
    prompt: int
    cached: int
    id: str


class Client:
    """Sends conversations to one endpoint of a server."""

    def __init__(self, server: Server, model: Path, endpoint: str) -> None:
        self._url = f"{server.url}/v1/{PATHS.get(endpoint, endpoint)}"
        self._model, self.endpoint = str(model), endpoint

    def post(
        self, texts: list[str], headers: dict[str, str], key: str = KEYS[0], **body: Any
    ) -> httpx.Response:
        """Send the texts of a user and the server in turns."""
        said: Any = [
            {"role": ("user", "assistant")[number % 2], "content": text}
            for number, text in enumerate(texts)
        ]
        name, limit = "messages", "max_tokens"
        if self.endpoint == "completions":
            name, said = "prompt", "".join(texts)
        elif self.endpoint == "responses":
            name, limit = "input", "max_output_tokens"
        given = {"model": self._model, name: said, limit: 24, "temperature": 0, **body}
        headers = {"Authorization": f"Bearer {key}", **headers}
        return httpx.post(self._url, json=given, headers=headers, timeout=300)

    def ask(self, *texts: str, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        """Send a conversation; what came back, in one piece or as a stream."""
        if body.get("stream") and self.endpoint in ("chat", "completions"):
            body["stream_options"] = {"include_usage": True}
        reply = self.post(list(texts), headers or {}, **body)
        assert reply.status_code == 200, reply.text
        if not body.get("stream"):
            return self._whole(reply.json())
        events = re.findall(r"^data: (\{.*\})$", reply.text, re.M)
        return self._streamed([json.loads(event) for event in events])

    def _whole(self, data: dict[str, Any]) -> Answer:
        usage, report = data["usage"], data.get("kv_transfer_params")
        assert report is not None, data
        if self.endpoint == "messages":
            text = "".join(block.get("text", "") for block in data["content"])
            cached = usage.get("cache_read_input_tokens", 0)
            prompt = sum(usage.get(name, 0) for name in PROMPT)
            return Answer(text, report, prompt, cached, data["id"])
        if self.endpoint == "responses":
            parts = [part for item in data["output"] for part in item["content"]]
            cached = usage["input_tokens_details"]["cached_tokens"]
            text = "".join(part["text"] for part in parts)
            return Answer(text, report, usage["input_tokens"], cached, data["id"])
        choice = data["choices"][0]
        text = choice["message"]["content"] if self.endpoint == "chat" else choice["text"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return Answer(text, report, usage["prompt_tokens"], cached, data["id"])

    def _streamed(self, chunks: list[dict[str, Any]]) -> Answer:
        """The last chunk alone has a report; what the whole answer would be is made of the rest."""
        if self.endpoint == "responses":
            assert chunks[-1]["type"] == "response.completed"
            assert not any(c.get("response", {}).get("kv_transfer_params") for c in chunks[:-1])
            return self._whole(chunks[-1]["response"])
        if self.endpoint == "messages":
            assert [chunk["type"] for chunk in chunks[-2:]] == ["message_delta", "message_stop"]
            chunks = chunks[:-1]
        assert not any("kv_transfer_params" in chunk for chunk in chunks[:-1])
        last = chunks[-1]
        if self.endpoint == "messages":
            pieces = [chunk.get("delta", {}).get("text") or "" for chunk in chunks]
            content = [{"text": "".join(pieces)}]
            return self._whole({**last, "id": chunks[0]["message"]["id"], "content": content})
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        text = "".join(
            choice["delta"].get("content") or "" if self.endpoint == "chat" else choice["text"]
            for choice in choices
        )
        whole = {"message": {"content": text}, "text": text}
        return self._whole({**last, "choices": [whole]})


@pytest.fixture(params=ENDPOINTS)
def client(request: pytest.FixtureRequest, server: Server, random_model: Path) -> Client:
    return Client(server, random_model, request.param)


def test_settings_by_headers_and_keys(client: Client) -> None:
    question = f"{client.endpoint}: {TEXT * 2}"
    by_header = client.ask(question, headers={"X-KV-Budget": "300"})
    assert by_header.report["kv_budget"] == 300 and by_header.report["evicted_tokens"] > 0
    assert by_header.report["prompt_tokens"] == by_header.prompt
    by_key = client.ask(question, vllm_xargs={"kv_budget": 300}, cache_salt="fresh")
    assert (by_key.text, by_key.report) == (by_header.text, by_header.report)
    assert client.ask(question, headers={"X-KV-Policy": "full"}).report["evicted_tokens"] == 0
    wrong: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"X-KV-Budget": "a lot"}, {}, "kv_budget of the request"),
        ({"X-KV-Policy": "nonsense"}, {}, "'nonsense' is not served here"),
        ({"X-KV-Budgt": "300"}, {}, "unknown header 'x-kv-budgt'"),
        ({"X-KV-Session": "two words"}, {}, "a name of 1 to 128 letters"),
        ({"X-KV-Budget": "300"}, {"vllm_xargs": {"kv_budget": 301}}, "two values, '300' in X-KV-B"),
        ({}, {"vllm_xargs": {"kv_budgt": 301}}, "did you mean 'kv_budget'"),
        ({}, {"kv_budget": 300}, "'kv_budget' stands at the top level"),
    ]
    for headers, body, reason in wrong:
        reply = client.post([question], headers, **body)
        assert reply.status_code == 400 and reason in reply.text, (headers, body, reply.text)


def test_a_session_and_why_it_resumed_no_more(client: Client) -> None:
    named = {"X-KV-Session": f"{client.endpoint}-1"}
    question, more = f"{client.endpoint} 1: {TEXT * 2}", f"And {TEXT}"
    first = client.ask(question, headers=named)
    assert "no earlier turn is known" in first.report["resumed"]["because"]
    assert first.report["kv_session"] == named["X-KV-Session"]
    turns = [first.prompt]
    for streamed in (False, True):
        later = client.ask(question, first.text, more, headers=named, stream=streamed)
        assert later.report["kv_turns"] == [*turns, later.prompt]
        assert later.report["resumed"] == {"tokens": later.cached, "from": "session"}
        assert later.cached == later.report["resumed_tokens"] >= first.prompt
    other = client.ask(f"x{question}", first.text, more, headers=named, stream=True)
    assert other.report["kv_turns"] == [other.prompt]
    because = other.report["resumed"]["because"]
    at = re.search(r"first differs between tokens (\d+) and (\d+) from the session's last", because)
    assert at and int(at[1]) < other.prompt // 4, because
    stranger = client.post([question, first.text, more], named, key=KEYS[1])
    assert "no earlier turn is known" in stranger.text, "another API key"


def test_a_stop_string_leaves_the_report(client: Client) -> None:
    question = f"{client.endpoint} stops: {TEXT * 2}"
    answer = client.ask(question)
    name = "stop_sequences" if client.endpoint == "messages" else "stop"
    body = {name: [answer.text[5:8]]}
    for streamed in (False, True):
        stopped = client.ask(question, stream=streamed, **body)
        assert stopped.text == answer.text[: answer.text.index(answer.text[5:8])]
        assert stopped.report == answer.report


def test_names_that_clients_send_anyway(server: Server, random_model: Path) -> None:
    def session(endpoint: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        client = Client(server, random_model, endpoint)
        return client.ask(f"Hello, {endpoint}", headers=headers, **body).report.get("kv_session")

    for endpoint in ENDPOINTS:
        assert session(endpoint, {"X-Session-ID": "s", "X-Claude-Code-Session-Id": "c"}) == "s"
        assert session(endpoint, {"X-Claude-Code-Session-Id": "c"}) == "c"
        assert session(endpoint) is None
    for endpoint in ("chat", "completions", "responses"):
        assert session(endpoint, prompt_cache_key="p") == "p"
        assert session(endpoint, {"X-Session-ID": "s"}, session_id="b") == "b"
    client = Client(server, random_model, "responses")
    first = client.ask(f"Stored: {TEXT * 2}", prompt_cache_key="stored")
    body = {"previous_response_id": first.id, "prompt_cache_key": "stored"}
    second = client.ask(f"And {TEXT}", stream=True, **body)
    assert second.report["kv_turns"] == [first.prompt, second.prompt]
    assert second.report["resumed"]["from"] == "session"
    gone = client.post(["And?"], {}, previous_response_id="resp_none")
    assert gone.status_code == 404


def test_the_clients_see_reports_of_streams(server: Server, random_model: Path) -> None:
    """What OpenAI's and Anthropic's clients give their users, with headers as these send them."""
    named, model = {"X-KV-Session": "sdk", "X-KV-Budget": "300"}, str(random_model)
    messages: Any = [{"role": "user", "content": TEXT * 2}]
    with openai_of(server) as asked:
        stream: Any = asked.chat.completions.create(
            model=model, messages=messages, max_tokens=4, stream=True, extra_headers=named
        )
        *_, last = stream
        assert last.choices[0].finish_reason == "length", "without a chunk for the usage"
        assert last.kv_transfer_params["kv_budget"] == 300
    with anthropic.Anthropic(base_url=server.url, auth_token=KEYS[0], max_retries=0) as client:
        events: Any = client.messages.create(
            model=model, messages=messages, max_tokens=4, stream=True, extra_headers=named
        )
        (report,) = [event.kv_transfer_params for event in events if event.type == "message_delta"]
        assert report["kv_budget"] == 300 and report["kv_session"] == "sdk"


def test_turns_are_counted_by_reason(server: Server) -> None:
    text = server.metrics_text()
    found = dict(re.findall(r'vllm_pyramid:turns_total\{.*reason="(\w+)"\} (\S+)', text))
    assert float(found["unknown"]) > 0 and float(found["missing"]) == 0
    assert float(found["differs"]) > 0 and float(found["resumed"]) > 0


def test_a_system_prompt_as_agents_send_it(server: Server, random_model: Path) -> None:
    """Far longer than the budget; with tools it stays beside it, at each endpoint for chats."""
    schema = {"type": "object", "properties": {}}
    function = {"name": "look", "parameters": schema}
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    tools["tool_choice"] = "none"
    with openai_of(server) as client:
        system, model = TEXT * 4, str(random_model)
        question: Any = {"role": "user", "content": TEXT}
        chat: Any = [{"role": "system", "content": system}, question]

        def ask(**more: Any) -> dict[str, Any]:
            given: Any = {"model": model, "max_tokens": 4, "messages": chat, **more}
            answer: Any = client.chat.completions.create(**given)
            found: dict[str, Any] = answer.kv_transfer_params
            return found

        report = ask(**tools)
        prompt, protected = report["prompt_tokens"], report["protected_tokens"]
        assert protected > 2545 and report["kv_keep"][1] - report["kv_keep"][0] > 2545
        assert report["kv_budget"] == 256 < (prompt - protected) // 2, "the floor of a share"
        for kept in report["kept_tokens"]:
            assert 0 <= kept - report["kv_budget"] - protected < BLOCK
        assert report["evicted_tokens"] == LAYERS * prompt - sum(report["kept_tokens"])
        assert "kv_keep" not in ask(), "a chat without tools"
        # What messages say cannot be found in capital letters; the chat is answered without spans.
        loud = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
        assert "kv_keep" not in ask(**tools, extra_body={"chat_template": loud})
        assert "the tools of a chat are not kept: --kv-keep cannot tell" in server.log.read_text()
    named = {"type": "function", **function}
    for endpoint, tool, choice, place in (
        ("responses", named, "none", "instructions"),
        ("messages", {"name": "look", "input_schema": schema}, {"type": "none"}, "system"),
    ):
        own = {"tools": [tool], "tool_choice": choice, place: system}
        reply = Client(server, random_model, endpoint).ask(question["content"], **own)
        # /v1/responses writes instructions with one more token.
        assert reply.prompt - prompt == reply.report["protected_tokens"] - protected
        assert reply.prompt - prompt == (endpoint == "responses")


def test_a_line_that_changes_with_each_request(server: Server, random_model: Path) -> None:
    """The model does not see it, so its session resumes as if it had never been there."""
    reports = []
    question, more = f"anchored: {TEXT * 2}", f"And {TEXT}"
    with openai_of(server) as client:
        said: list[Any] = []
        for number, text in enumerate((question, more)):
            line = f"Request id: {number}\n" if number else ""
            system = {"role": "system", "content": f"Be brief.\n{line}Be kind."}
            said.append({"role": "user", "content": text})
            chat: Any = [system, *said]
            sent: Any = client.chat.completions.with_raw_response.create(
                model=str(random_model),
                messages=chat,
                max_tokens=4,
                extra_headers={"X-KV-Session": "anchored"},
            )
            assert sent.headers.get("x-kv-anchor") == ("1" if number else None)
            answer = sent.parse()
            said.append({"role": "assistant", "content": answer.choices[0].message.content})
            reports.append(answer.kv_transfer_params)
    assert reports[1]["resumed_tokens"] >= reports[0]["prompt_tokens"]
    assert "vllm_pyramid:anchored_lines_total 1.0" in server.metrics_text()
    tokens = httpx.post(
        f"{server.url}/tokenize",
        json={"model": str(random_model), "messages": [{**system, "content": line}]},
        headers={"Authorization": f"Bearer {KEYS[0]}"},
    )
    assert tokens.headers["x-kv-anchor"] == "1", "positions for kv_keep fit the prompt"


def test_what_users_get_wrong(server: Server, random_model: Path) -> None:
    """Each mistake is answered with its reason, by the status that the clients raise."""
    common: dict[str, Any] = {"model": str(random_model), "max_tokens": 4}
    common["messages"] = [{"role": "user", "content": TEXT}]
    wrong: tuple[tuple[dict[str, str], dict[str, Any], str], ...] = (
        ({"X-KV-Sesion": "a"}, {}, "X-KV-Session"),
        ({"X-KV-Turn-Mode": "fast", "X-KV-Session": "a"}, {}, "auto, resume or exact"),
        ({"X-KV-Session": "a b"}, {}, "kv_session of a request must be a name"),
        ({"X-KV-Turn-Mode": "auto"}, {}, "send kv_turns or kv_session"),
        ({}, {"kv_session": "a"}, "put it into vllm_xargs"),
    )
    asked = openai_of(server)
    said = anthropic.Anthropic(base_url=server.url, auth_token=KEYS[0], max_retries=0)
    creates: tuple[Any, ...] = (asked.chat.completions.create, said.messages.create)
    for headers, body, reason in wrong:
        for create in creates:
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as raised:
                create(**common, extra_headers=headers, extra_body=body)
            assert reason in str(raised.value)
    stranger = openai_of(server, "wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(**common)
    for client in (asked, said, stranger):
        client.close()


def test_nothing_went_wrong(server: Server) -> None:
    """The last test: the log has no traceback of what was asked."""
    assert "Traceback" not in server.log.read_text()
