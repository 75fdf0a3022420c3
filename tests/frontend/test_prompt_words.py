# SPDX-License-Identifier: Apache-2.0
"""`/pyramid/prompt`: who gets the words of a prompt, who does not, and what the words are."""

from __future__ import annotations

import asyncio
import base64
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from vllm_pyramid.frontend import server
from vllm_pyramid.frontend.flags import add_flags, take_flags
from vllm_pyramid.frontend.prompt_words import pieces
from vllm_pyramid.policy.served_settings import asks_for_policy
from vllm_pyramid.step.trace_files import file_name
from vllm_pyramid.tools.demo import model_path

pytestmark = pytest.mark.cpu

KEY = "the key"
TEXT = "One tree: \u6728, and <b>two</b>.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


class Engines:
    """Two engines, of which the second runs requests."""

    def __init__(self, prompts: dict[str, list[int]], tokenizer: Any, ranks: int = 1) -> None:
        self.prompts, self.tokenizer, self.fails = prompts, tokenizer, False
        self.engine_core = self
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    async def call_utility_all_async(self, method: str, name: str) -> list[str]:
        assert method == "vllm_pyramid_prompt"
        if self.fails:
            raise RuntimeError("it has ended")
        return ["null", json.dumps(self.prompts.get(name))]


def ask(engines: Engines, settings: dict[str, Any], query: str, key: str | None) -> Any:
    """The status and the answer of a server with these settings."""
    app = FastAPI()
    keys = [] if key is None else [KEY]
    app.state.args, app.state.engine_client = Namespace(api_key=keys), engines
    server.attach(app, {"kv_page": True, **settings})

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.get(f"/pyramid/prompt{query}", headers=headers)

    answer = asyncio.run(get())
    assert answer.headers["cache-control"] == "no-store"
    return answer.status_code, answer.json()


def trace(folder: Path, name: str, tokens: int) -> None:
    """Layer 2 of the model keeps the first and the last token in one head, layer 5 all in both."""
    np.savez(
        folder / f"{file_name(name)}.npz",
        request_id=name,
        prompt_len=tokens,
        layers=[2, 5],
        held=[2, tokens],
        kept_0=[[0, tokens - 1]],
        kept_1=[list(range(tokens))] * 2,
    )


def test_the_words_and_what_kept_them(tokenizer: Any, tmp_path: Path) -> None:
    tokens = tokenizer(TEXT)["input_ids"]
    engines = Engines({"a/b #1": tokens}, tokenizer)
    trace(tmp_path, "a/b #1", len(tokens))
    settings = {"kv_page_prompts": True, "kv_trace": str(tmp_path)}
    status, found = ask(engines, settings, "?request=a%2Fb%20%231", KEY)
    assert status == 200 and found["request"] == "a/b #1"
    assert "".join(found["pieces"]).endswith(TEXT)
    assert found["layers"] == [2, 5] and found["heads"] == [1, 2]
    counts = np.frombuffer(base64.b64decode(found["counts"]), "<u2").reshape(2, -1)
    assert counts[0].tolist() == [1, *[0] * (len(tokens) - 2), 1]
    assert counts[1].tolist() == [2] * len(tokens)


@pytest.mark.parametrize(
    ("query", "key", "changes", "status", "reason"),
    [
        ("?request=r", "wrong", {}, 401, "needs its API key"),
        ("?request=r", None, {}, 401, "a server with an API key alone"),
        ("?request=other", KEY, {}, 404, "no request 'other' runs here"),
        ("?request=../r", KEY, {}, 404, "no request '../r' runs here"),
        ("?request=embedded", KEY, {}, 404, "came as embeddings"),
        ("?request=later", KEY, {}, 404, "not been evicted from yet"),
        ("?request=shorter", KEY, {}, 404, "not been evicted from yet"),
        ("?request=damaged", KEY, {}, 404, "cannot be read"),
        ("", KEY, {}, 400, "say which"),
        ("?id=r", KEY, {}, 400, "not 'id'"),
        ("?request=r", KEY, {"kv_page_prompts": False}, 404, "does not show prompts"),
    ],
)
def test_everything_else_is_refused(
    query: str, key: str | None, changes: dict[str, Any], status: int, reason: str, tmp_path: Path
) -> None:
    names = ("r", "later", "shorter", "damaged")
    engines = Engines({name: [5, 6, 7] for name in names} | {"embedded": []}, None)
    trace(tmp_path, "r", 3)
    trace(tmp_path, "shorter", 2)
    (tmp_path / "damaged.npz").write_bytes(b"PK nothing")
    settings = {"kv_page_prompts": True, "kv_trace": str(tmp_path), **changes}
    found, answer = ask(engines, settings, query, key)
    assert (found, reason in answer["error"]) == (status, True), answer
    assert "pieces" not in answer
    assert ask(engines, {**settings, "kv_page_prompts": True}, "?request=r", KEY)[0] == 200


def test_engines_that_have_ended(tmp_path: Path) -> None:
    engines = Engines({"r": [5]}, None)
    engines.fails = True
    settings = {"kv_page_prompts": True, "kv_trace": str(tmp_path)}
    assert ask(engines, settings, "?request=r", KEY)[0] == 503


def test_pieces_are_the_text(tokenizer: Any) -> None:
    tokens = tokenizer(TEXT)["input_ids"]
    found = pieces(tokens, tokenizer)
    assert len(found) == len(tokens) and "".join(found) == tokenizer.decode(tokens)
    assert "\ufffd" not in "".join(found) and any("\u6728" in piece for piece in found)
    half = tokens[: next(i for i, piece in enumerate(found) if "\u6728" in piece) + 1]
    assert len(pieces(half, tokenizer)) == len(half), "a prompt may end inside a character"
    assert pieces([3, 4], None) == ["\u27e83\u27e9", "\u27e84\u27e9"]


def test_spaces_of_sentencepiece_stay() -> None:
    names = {1: "\u2581One", 2: "\u2581\u2581two", 3: "three"}

    class Strips:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [names[token] for token in ids]

        def decode(self, ids: list[int]) -> str:
            return "".join(names[token] for token in ids).replace("\u2581", " ").lstrip()

    assert pieces([1, 2, 3, 1], Strips()) == [" One", "  two", "three", " One"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "give --kv-page and --kv-trace"),
        (["--kv-page"], "give --kv-page and --kv-trace"),
        (["--kv-trace", "x"], "give --kv-page and --kv-trace"),
        (["--kv-page", "--kv-trace", "x", "--kv-policy", "full"], "keeps every token"),
        (["--kv-page", "--kv-trace", "x"], "it has none: give --api-key"),
        (["--kv-page", "--kv-trace", "x", "--api-key", "k"], None),
        (["--kv-page", "--kv-trace", "x", "--headless"], None),
    ],
)
def test_the_flag_needs_a_page_traces_and_a_key(
    flags: list[str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from argparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--additional-config", default={})
    parser.add_argument("--api-key", nargs="*")
    parser.add_argument("--headless", action="store_true")
    add_flags(parser)
    command = ["--kv-policy", "snapkv", "--kv-page-prompts", *flags]
    namespace = parser.parse_args(command)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if reason is None:
        take_flags(namespace)
        assert asks_for_policy(namespace.additional_config)
        assert namespace.additional_config["kv_page_prompts"] is True
        return
    with pytest.raises(ValueError, match=reason):
        take_flags(namespace)
    if "API" in reason or "api-key" in reason:
        monkeypatch.setenv("VLLM_API_KEY", "k")
        take_flags(parser.parse_args(command))
