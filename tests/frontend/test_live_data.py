# SPDX-License-Identifier: Apache-2.0
"""The live page's numbers: viewers share an answer, and a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllm_pyramid.frontend import page

pytestmark = pytest.mark.cpu


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
