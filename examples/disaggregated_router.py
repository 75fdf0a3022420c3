# SPDX-License-Identifier: Apache-2.0
"""Route requests: each prompt to an engine that prefills, its answer to one that decodes.

    python examples/disaggregated_router.py --port 8000 \
        --prefill http://10.0.0.1:8100 http://10.0.0.2:8100 \
        --decode http://10.0.0.3:8200 http://10.0.0.4:8200

The prefilling engine gets the request with one token to generate; its response has a ticket, with
which the request then goes to the decoding engine. That engine's answer begins with the first token
and is streamed to the client as it comes. Where there is no ticket, it computes the prompt itself.
An engine that fails or is gone is passed over; an answer that has begun ends with its engine.
docs/disaggregated.md says how to start the engines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator, Iterator
from itertools import count, cycle
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

PATHS = ("/v1/completions", "/v1/chat/completions")
# What the first token of an answer does not suffice for: the decoding engine computes the prompt.
WHOLE = ("logprobs", "prompt_logprobs", "response_format", "structured_outputs")


class Router:
    """Sends requests to engines in turn.

    Args:
        prefill, decode: URLs of the engines. client: for requests to them.
    """

    def __init__(self, prefill: list[str], decode: list[str], client: httpx.AsyncClient) -> None:
        self._prefill: Iterator[str] = cycle(prefill)
        self._decode, self._turns, self._client = decode, count(), client

    async def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        """Answer a client's request."""
        body.pop("kv_transfer_params", None)  # a client has no ticket of its own
        if not self._is_split(body):
            return await self._decoded(path, body, headers)
        prefiller = next(self._prefill)
        try:
            first = await self._client.post(
                prefiller + path, json=self._first_token(body), headers=headers
            )
        except httpx.HTTPError:
            return await self._decoded(path, body, headers)  # that engine is gone
        if 400 <= first.status_code < 500:
            return Response(first.content, first.status_code, media_type="application/json")
        answer = first.json() if first.status_code == 200 else {}
        if any(choice["finish_reason"] != "length" for choice in answer.get("choices", ())):
            if not body.get("stream"):
                return JSONResponse(answer)  # its first token ended it
            return await self._send("POST", prefiller + path, body, headers)
        ticket = answer.get("kv_transfer_params") or {}
        if ticket.get("do_remote_prefill"):
            body["kv_transfer_params"] = ticket
        return await self._decoded(path, body, headers)

    async def _decoded(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        """Send a request to the next engine that decodes, or to one behind it if that one fails."""
        first = next(self._turns) % len(self._decode)
        for url in (*self._decode[first:], *self._decode[:first]):
            answer = await self._send("POST", url + path, body, headers)
            if answer.status_code < 500:
                break
        return answer

    async def models(self, headers: dict[str, str]) -> Response:
        """List the models, as the first decoding engine that answers does."""
        for url in self._decode:
            answer = await self._send("GET", url + "/v1/models", None, headers)
            if answer.status_code < 500:
                break
        return answer

    @staticmethod
    def _is_split(body: dict[str, Any]) -> bool:
        """Return whether two engines share a request: one answer of more than a token."""
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        asked = [body[key] for key in WHOLE if key in body]  # `logprobs: 0` asks for some
        alone = any(one is not None and one is not False for one in asked)
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return not (alone or several or body.get("n", 1) != 1 or most == 1)

    @staticmethod
    def _first_token(body: dict[str, Any]) -> dict[str, Any]:
        """Return the request of the engine that prefills."""
        first = {**body, "stream": False, "max_tokens": 1, "min_tokens": 0}
        for key in ("stream_options", "max_completion_tokens"):
            first.pop(key, None)
        return {**first, "kv_transfer_params": {"do_remote_decode": True}}

    async def _send(
        self, verb: str, url: str, body: dict[str, Any] | None, headers: dict[str, str]
    ) -> Response:
        """Send a request and return what comes, piece by piece where it is streamed."""
        request = self._client.build_request(verb, url, json=body, headers=headers)
        try:
            found = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": {"message": f"{url}: {error!r}"}}, 502)
        media = found.headers.get("content-type", "application/json")
        if found.status_code >= 500:
            content = await found.aread()
            return Response(content, found.status_code, media_type=media)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in found.aiter_raw():
                    yield piece
            finally:
                await found.aclose()  # also where the client has gone: the engine then aborts

        return StreamingResponse(pieces(), found.status_code, media_type=media)


def _passed(request: Request) -> dict[str, str]:
    """Return the headers that engines get: the key, and a request's own settings."""
    return {
        name: value
        for name, value in request.headers.items()
        if name == "authorization" or name.startswith("x-")
    }


def make_app(
    prefill: list[str], decode: list[str], client: httpx.AsyncClient | None = None
) -> FastAPI:
    """Return the router as an application."""
    app = FastAPI()
    router = Router(prefill, decode, client or httpx.AsyncClient(timeout=None))

    async def answer(request: Request) -> Response:
        try:
            body = await request.json()
        except json.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            return JSONResponse({"error": {"message": "the body must be a JSON object"}}, 400)
        return await router.answer(request.url.path, body, _passed(request))

    async def models(request: Request) -> Response:
        return await router.models(_passed(request))

    async def health() -> dict[str, str]:
        return {}

    for path in PATHS:
        app.add_api_route(path, answer, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    app.add_api_route("/health", health, methods=["GET"])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(make_app(args.prefill, args.decode), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
