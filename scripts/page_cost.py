# SPDX-License-Identifier: Apache-2.0
"""How much slower answers decode while the page of a server is open, and while `top` looks.

    python scripts/page_cost.py --rounds 20

Three kinds of round alternate, in another order each time. In each, requests decode together:

    closed      nothing looks
    page        a page asks for its data every second, and for /metrics every fifth time
    top         `vllm-pyramid top` reads /metrics every two seconds

Run it on an idle machine: it prints the median and the range of the rounds' ratios to `closed`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from tests.plumbing.server import serving
from vllm_pyramid.tools.demo import model_path

FLAGS = (
    *("--kv-policy", "pyramidkv", "--kv-budget", "15%", "--kv-min-tokens", "0", "--kv-page"),
    *("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
)
KINDS = ("closed", "page", "top")
PAGE_SECONDS, METRICS_EVERY, TOP_SECONDS = 1.0, 5, 2.0


class Looking:
    """What a page and `top` ask a server for."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def _get(self, path: str) -> None:
        async with self._session.get(self._url + path) as got:
            assert got.status == 200, (path, got.status)
            await got.read()

    async def page(self) -> None:
        """Ask as an open page does."""
        number = 0
        while True:
            await self._get("/pyramid/data")
            if number % METRICS_EVERY == 0:
                await self._get("/metrics")
            number += 1
            await asyncio.sleep(PAGE_SECONDS)

    async def top(self) -> None:
        """Ask as `vllm-pyramid top` does."""
        while True:
            await self._get("/metrics")
            await asyncio.sleep(TOP_SECONDS)


async def decode(url: str, session: aiohttp.ClientSession, requests: int, tokens: int) -> float:
    """Return the mean seconds between the pieces of an answer, of requests that run together."""
    source = random.Random(0)

    async def one(prompt: list[int]) -> float:
        body: dict[str, Any] = {"model": str(model_path()), "prompt": prompt, "max_tokens": tokens}
        body |= {"ignore_eos": True, "temperature": 0, "stream": True}
        first = last = 0.0
        async with session.post(f"{url}/v1/completions", json=body) as got:
            assert got.status == 200, await got.text()
            async for line in got.content:
                if line.startswith(b"data: {"):
                    last = time.monotonic()
                    first = first or last
        return (last - first) / (tokens - 1)

    prompts = [[source.randrange(8, 500) for _ in range(512)] for _ in range(requests)]
    return statistics.mean(await asyncio.gather(*map(one, prompts)))


async def measure(url: str, rounds: int, requests: int, tokens: int) -> dict[str, list[float]]:
    """Return the seconds of a token by kind of round; a first pass over all kinds warms up."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        looking = Looking(url, session)
        looks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "page": looking.page,
            "top": looking.top,
        }
        for number in range(rounds + 1):
            for kind in random.sample(KINDS, len(KINDS)):
                task = asyncio.create_task(looks[kind]()) if kind in looks else None
                taken = await decode(url, session, requests, tokens)
                if task is not None:
                    assert not task.done(), "the looking ended before the answers"
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                if number:
                    seconds[kind].append(taken)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="page-cost-")) / "server.log"
    with serving(model_path(), *FLAGS, log=log) as server:
        seconds = asyncio.run(measure(server.url, args.rounds, args.requests, args.tokens))
    closed = seconds["closed"]
    print(f"closed: {1000 * statistics.median(closed):.3f} ms a token, {len(closed)} rounds")
    for kind in KINDS[1:]:
        found = [a / b for a, b in zip(seconds[kind], closed, strict=True)]
        print(
            f"{kind}: {statistics.median(found):.3f} times that "
            f"({min(found):.3f} to {max(found):.3f})"
        )


if __name__ == "__main__":
    main()
