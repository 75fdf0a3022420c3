# SPDX-License-Identifier: Apache-2.0
"""How much of a server an open page takes: processor time, and speed of decoding.

    python -m scripts.page_cost

It starts a server and measures twice:

    a look      Requests decode together and are paused (vLLM's /pause), so the server is idle with
                all of them running. The processor time of its processes over many looks, without
                that of as many idle seconds before and after, is what a look costs. Waiting and
                other programs of the machine do not count. Looks a second times that is the share
                of one core; no step can be later by more.
    decoding    Rounds in which the same tokens are decoded while nothing looks and while a page
                does, in another order each time: ratios of processor time and of wall time to
                `closed`. Run it on an idle machine; ratios are as noisy as the machine.

A page asks for its data every second, and for /metrics every fifth time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.plumbing.server import Server, members, serving
from vllm_pyramid.frontend.page import SHARED_S
from vllm_pyramid.tools.demo import model_path

FLAGS = (
    *("--kv-policy", "pyramidkv", "--kv-budget", "15%", "--kv-min-tokens", "0", "--kv-page"),
    *("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
)
DATA, METRICS = "/pyramid/data", "/metrics"
# Looks a second, by who looks.
RATES = {"page": {DATA: 1.0, METRICS: 0.2}}
PROMPT_TOKENS, LONGEST = 512, 1500
ENGINE, FRONT_END = "engine core", "API server"


class Load:
    """Requests to a server, and looks at it."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self._server, self._session = server, session

    async def look(self, path: str) -> None:
        """Ask for one page."""
        async with self._session.get(self._server.url + path) as got:
            assert got.status == 200, (path, got.status)
            await got.read()

    async def keep_looking(self, rates: dict[str, float]) -> None:
        """Look at some paths, at most as many times a second as each is asked for."""

        async def at_one(path: str, rate: float) -> None:
            while True:
                await self.look(path)
                await asyncio.sleep(1 / rate)

        await asyncio.gather(*(at_one(path, rate) for path, rate in rates.items()))

    async def order(self, path: str) -> None:
        """Pause or resume the engine."""
        async with self._session.post(self._server.url + path) as got:
            assert got.status == 200, await got.text()

    async def decode(self, requests: int, tokens: int, begun: Callable[[], None]) -> float:
        """Run requests together; return the mean seconds between the pieces of an answer."""
        source = random.Random(0)

        async def one(prompt: list[int]) -> float:
            body: dict[str, Any] = {"model": str(model_path()), "prompt": prompt}
            body |= {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
            first = last = 0.0
            async with self._session.post(f"{self._server.url}/v1/completions", json=body) as got:
                assert got.status == 200, await got.text()
                async for line in got.content:
                    if line.startswith(b"data: {"):
                        last = time.monotonic()
                        if not first:
                            first = last
                            begun()
            return (last - first) / (tokens - 1)

        prompts = [
            [source.randrange(8, 500) for _ in range(PROMPT_TOKENS)] for _ in range(requests)
        ]
        return statistics.mean(await asyncio.gather(*map(one, prompts)))

    def processor_seconds(self) -> dict[str, float]:
        """Return what the server's processes have used since their start, by what they are."""
        used = {ENGINE: 0.0, FRONT_END: 0.0}
        for pid, title in members(self._server.process.pid):
            clock = (~pid << 3) | 2  # clock_getcpuclockid(3)
            part = ENGINE if "EngineCore" in title or "Worker" in title else FRONT_END
            used[part] += time.clock_gettime(clock)
        return used

    async def used_by(self, work: Awaitable[Any]) -> tuple[dict[str, float], float]:
        """Return the processor seconds of some work, by process, and its seconds."""
        before, start = self.processor_seconds(), time.monotonic()
        await work
        seconds = time.monotonic() - start
        after = self.processor_seconds()
        return {part: after[part] - before[part] for part in after}, seconds


@contextlib.asynccontextmanager
async def paused(load: Load, requests: int) -> AsyncIterator[None]:
    """Requests that run and do nothing: each has begun to answer when the engine is paused."""
    begun = asyncio.Semaphore(0)
    task = asyncio.create_task(load.decode(requests, LONGEST, begun.release))
    for _ in range(requests):
        await begun.acquire()
    await load.order("/pause?mode=keep")
    await asyncio.sleep(2)
    try:
        yield
    finally:
        assert not task.done(), "the requests ended before they were paused"
        await load.order("/resume")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def cost_of_looks(load: Load, requests: int, looks: int) -> dict[str, dict[str, float]]:
    """Return the processor seconds of one look, by path and process."""

    async def look_often(path: str) -> None:
        for _ in range(looks):
            await load.look(path)
            await asyncio.sleep(SHARED_S)  # so that the engine is asked each time

    def rest() -> Awaitable[None]:
        return asyncio.sleep(looks * SHARED_S)

    found = {}
    async with paused(load, requests):
        idle = [await load.used_by(rest())]
        for path in (DATA, METRICS):
            used, seconds = await load.used_by(look_often(path))
            idle.append(await load.used_by(rest()))
            (before, first), (after, second) = idle[-2:]
            found[path] = {
                part: (used[part] - seconds * (before[part] + after[part]) / (first + second))
                / looks
                for part in used
            }
    return found


async def alternate(
    load: Load, rounds: int, requests: int, tokens: int
) -> dict[str, list[tuple[float, float]]]:
    """Return processor seconds and seconds of a token by kind; a first round warms up."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ("closed", *RATES)}
    for number in range(rounds + 1):
        for kind in random.sample(list(found), len(found)):
            looking = None
            if kind in RATES:
                looking = asyncio.create_task(load.keep_looking(RATES[kind]))
            task = asyncio.create_task(load.decode(requests, tokens, lambda: None))
            used, _ = await load.used_by(task)
            if looking is not None:
                assert not looking.done(), "the looking ended before the answers"
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking
            if number:
                found[kind].append((sum(used.values()) / (requests * tokens), task.result()))
    return found


def print_looks(found: dict[str, dict[str, float]]) -> None:
    """Print what looks cost, and what a page makes of it."""
    for path, used in found.items():
        parts = ", ".join(f"{part} {1000 * seconds:.2f}" for part, seconds in used.items())
        print(f"a look at {path}: {1000 * sum(used.values()):.2f} ms of processor time ({parts})")
    for kind, rates in RATES.items():
        share = {
            part: sum(rate * found[path][part] for path, rate in rates.items())
            for part in (ENGINE, FRONT_END)
        }
        parts = ", ".join(f"{part} {seconds:.3%}" for part, seconds in share.items())
        print(f"{kind}: {sum(share.values()):.3%} of a core ({parts})")


def print_rounds(found: dict[str, list[tuple[float, float]]]) -> None:
    """Print the medians and the ranges of the ratios to `closed`."""
    closed = found.pop("closed")
    medians = [1000 * statistics.median(values) for values in zip(*closed, strict=True)]
    print(
        f"closed: {medians[0]:.3f} ms of processor time a token, {medians[1]:.3f} ms between "
        f"tokens; {len(closed)} rounds"
    )
    for kind, pairs in found.items():
        for what, index in (("processor time", 0), ("time between tokens", 1)):
            ratios = sorted(a[index] / b[index] for a, b in zip(pairs, closed, strict=True))
            median = statistics.median(ratios)
            print(f"{kind}: {median:.3f} times the {what} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


async def measure(server: Server, args: argparse.Namespace) -> None:
    """Measure and print."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        load = Load(server, session)
        await load.decode(args.requests, 32, lambda: None)
        print_looks(await cost_of_looks(load, args.requests, args.looks))
        if args.rounds:
            print_rounds(await alternate(load, args.rounds, args.requests, args.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--looks", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=6, help="0 for looks alone")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="page-cost-")) / "server.log"
    developer = {"VLLM_SERVER_DEV_MODE": "1"}  # for /pause
    with serving(model_path(), *FLAGS, log=log, environment=developer) as server:
        asyncio.run(measure(server, args))


if __name__ == "__main__":
    main()
