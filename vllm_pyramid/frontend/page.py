# SPDX-License-Identifier: Apache-2.0
"""The API server's live page (`/pyramid`), and the operator's lists of sessions and applications.

The page holds no data. While it is open it asks for `/pyramid/data`, which comes from the
schedulers, so a closed page costs nothing.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from vllm_pyramid.compat.page_server import ask_engines, input_processor_of, is_authorized
from vllm_pyramid.frontend.follow_sessions import sessions_of
from vllm_pyramid.frontend.shadow import shadow_of
from vllm_pyramid.version import __version__

PATH = "/pyramid"
# All viewers of a moment share one answer, so that their number costs the engines nothing.
SHARED_S = 0.5
_TIMEOUT_S = 10.0
_T = TypeVar("_T")
_NEEDS_KEY = "this server needs its API key: Authorization: Bearer KEY"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class LiveData:
    """The answer for `/pyramid/data`, asked for at most every `SHARED_S` seconds.

    Viewers share a failure, too, so that an engine that hangs keeps each of them waiting once.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._answer: dict[str, Any] = {}
        self._failure: str | None = None
        self._until = 0.0

    async def get(self, engine_client: Any) -> dict[str, Any]:
        """Return the engines' numbers; RuntimeError if the engines do not answer."""
        async with self._lock:
            if time.monotonic() >= self._until:
                try:
                    engines = await asyncio.wait_for(ask_engines(engine_client), _TIMEOUT_S)
                except TimeoutError:
                    self._failure = f"no answer within {_TIMEOUT_S:.0f} seconds"
                else:
                    self._failure = None
                    self._answer = {"version": __version__, "time": time.time(), "engines": engines}
                self._until = time.monotonic() + SHARED_S
            if self._failure is not None:
                raise RuntimeError(self._failure)
            return self._answer


def attach(app: FastAPI) -> None:
    """Add the routes to an API server."""
    router, live, text = APIRouter(include_in_schema=False), LiveData(), _page()

    @router.get(PATH)
    async def page() -> Response:
        return HTMLResponse(text, headers=_HEADERS)

    @router.get(f"{PATH}/data")
    @_with_key
    async def data(request: Request) -> Any:
        try:
            return await live.get(request.app.state.engine_client)
        except Exception as error:  # vLLM's own for an engine that has ended
            return _refuse(503, f"the engine does not answer: {error}")

    @router.get(f"{PATH}/sessions")
    @_with_key
    async def sessions(request: Request) -> Any:
        known = _found(request.app, sessions_of)
        return {"sessions": [] if known is None else known.listing()}

    @router.delete(f"{PATH}/sessions")
    @_with_key
    async def forget(request: Request) -> Any:
        named = _parameters(request, "session", "tenant")
        known = _found(request.app, sessions_of)
        return {"forgotten": 0 if known is None else known.forget(*named)}

    @router.get(f"{PATH}/shadow")
    @_with_key
    async def compared(request: Request) -> Any:
        shadow = _found(request.app, shadow_of)
        return {"applications": [] if shadow is None else shadow.judge.listing()}

    @router.delete(f"{PATH}/shadow")
    @_with_key
    async def restore(request: Request) -> Any:
        named = _parameters(request, "application", "tenant")
        shadow = _found(request.app, shadow_of)
        return {"restored": 0 if shadow is None else shadow.judge.restore(*named)}

    @router.get(PATH + "/{rest:path}")
    async def elsewhere(rest: str) -> Response:
        names = ("data", "sessions", "shadow")
        there = f"there are {PATH} and, below it, {', '.join(names)}"
        return _refuse(404, f"{there}, and no {rest[:80]!r}")

    app.include_router(router)


def _page() -> str:
    """Return the page, with its style and scripts inside."""
    folder = files(__package__).joinpath("live_page")
    text = folder.joinpath("index.html").read_text(encoding="utf-8")
    for name in ("style.css", "page.js"):
        part = folder.joinpath(name).read_text(encoding="utf-8")
        assert text.count(f"/*{name}*/") == 1
        text = text.replace(f"/*{name}*/", part)
    return text


def _found(app: FastAPI, of: Callable[[Any], _T | None]) -> _T | None:
    """Return what belongs to the server's engine; None before its first request."""
    processor = input_processor_of(app.state.engine_client)
    return None if processor is None else of(processor)


def _with_key(
    answer: Callable[[Request], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """Answer requests with the server's API key alone: the others get 401, wrong parameters 400."""

    @functools.wraps(answer)
    async def route(request: Request) -> Response:
        if not is_authorized(request.app, request.headers):
            return _refuse(401, _NEEDS_KEY)
        try:
            found = await answer(request)
        except _WrongParameterError as error:
            return _refuse(400, str(error))
        return found if isinstance(found, Response) else JSONResponse(found, headers=_HEADERS)

    return route


class _WrongParameterError(ValueError):
    """A parameter that an endpoint does not have."""


def _parameters(request: Request, *names: str) -> tuple[str | None, ...]:
    """Return the parameters of a request by name, None where one is not given."""
    given = request.query_params
    if unknown := given.keys() - set(names):
        known = " and ".join(names)
        raise _WrongParameterError(f"the parameters are {known}, not {min(unknown)[:80]!r}")
    return tuple(given.get(name) for name in names)


def _refuse(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status, headers=_HEADERS)
