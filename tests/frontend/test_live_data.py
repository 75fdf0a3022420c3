# SPDX-License-Identifier: Apache-2.0
"""The live page's numbers: viewers share an answer, and a failure; what its routes refuse."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from vllm_pyramid.frontend import page, server


def test_viewers_share_what_the_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    hangs = True

    async def ask(engine_client: Any) -> list[Any]:
        asked.append(hangs)
        if hangs:
            await asyncio.Event().wait()
        return ["numbers"]

    monkeypatch.setattr(page, "ask_engines", ask)
    monkeypatch.setattr(page, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(page, "SHARED_S", 1000.0)
    live = page.LiveData()

    async def look() -> list[Any]:
        views = (live.get(None) for _ in range(3))
        return await asyncio.gather(*views, return_exceptions=True)

    async def look_twice() -> None:
        nonlocal hangs
        found = await look()
        assert [str(error) for error in found] == ["no answer within 0 seconds"] * 3
        assert asked == [True], "each viewer waited behind the others"
        hangs, live._until = False, 0.0
        found = await look()
        assert [answer["engines"] for answer in found] == [["numbers"]] * 3
        assert asked == [True, False]

    asyncio.run(look_twice())


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "reason"),
    [
        ("GET", "data", "wrong", 401, "needs its API key"),
        ("GET", "data", "right", 503, "it has ended"),
        ("DELETE", "sessions?id=x", "right", 400, "session and tenant, not 'id'"),
        ("GET", "prompt", "right", 404, "data, sessions, shadow, and no 'prompt'"),
    ],
)
def test_what_is_refused(method: str, path: str, key: str, status: int, reason: str) -> None:
    async def fail(method: str) -> list[str]:
        raise RuntimeError("it has ended")

    app = FastAPI()
    app.state.args = Namespace(api_key=["right"])
    engine_core = SimpleNamespace(call_utility_all_async=fail)
    app.state.engine_client = SimpleNamespace(engine_core=engine_core)
    server.attach(app, {"kv_page": True})

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.request(method, f"/pyramid/{path}", headers=headers)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers["cache-control"]) == (status, "no-store")
    assert reason in answer.json()["error"]
