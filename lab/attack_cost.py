# SPDX-License-Identifier: Apache-2.0
"""`make attack-cost`: how much slower an honest answer decodes while hostile requests come.

    ATTACK_ROUNDS=40 make attack-cost

Four kinds of round alternate, in another order each time. In each an honest request decodes:

    quiet       alone
    refused     two requests a second come with settings that must be refused, of up to 64 KB
    plain       two prompts a second come, for a token each
    accepted    the same prompts come with the most expensive settings that are accepted

`refused` is compared with `quiet`, and `accepted` with `plain`, whose tokens cost the same. Run it
on an idle machine: it fails where the median of the rounds' ratios is 1.03 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tests.attack.bodies import COMPLETIONS, VOCAB_SIZE, encode
from tests.attack.fuzz import FLAGS
from tests.plumbing.server import serving

MOST = 1.03  # times as long as without the attack
ATTACKS_PER_SECOND = 2.0
HONEST_TOKENS = 256
ATTACK_PROMPT = 1200
PREPARED = 128  # attacks of a round; an answer that takes longer than these is not measured
HEADERS = {"Content-Type": "application/json"}
# What is compared with what.
PAIRS = {"refused": "quiet", "accepted": "plain"}
KINDS = (*PAIRS, *PAIRS.values())


def settings(kind: str, number: int) -> dict[str, Any]:
    """The settings of an attack; no two are the same, so that no cache of plans helps."""
    if kind == "plain":
        return {}
    if kind == "accepted":
        start = 100 + number % 37
        turns = list(range(start, ATTACK_PROMPT - 1, 2))[:512]
        return {
            "kv_budget": f"{5 + number % 80}.{number % 1000:03d}%",
            "kv_turns": turns,
            **{f"other {index}": "x" * 300 for index in range(100)},
        }
    choices: list[dict[str, Any]] = [
        {"kv_budget": f"12.{number}{'3' * 4200}%"},
        {"kv_budget": "9" * 60_000},
        {f"kv_{number}_{index:04d}": 1 for index in range(3200)},
        {f"kv_budge{index}{number}": 1 for index in range(2500)},
        {"kv_" + "y" * 60_000: number},
        {"kv_turns": [*range(1, 9000), number]},
        {"kv_policy": "pyramidkv" * 6000},
        {"kv-budget": "12%"},
    ]
    return choices[number % len(choices)]


def attack_body(model: str, kind: str, number: int) -> bytes:
    """A hostile request, of less than 64 KB."""
    source = random.Random(number)
    prompt = [source.randrange(8, VOCAB_SIZE) for _ in range(ATTACK_PROMPT)]
    if kind == "refused":
        prompt = prompt[:8]
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    return encode({**body, "vllm_xargs": settings(kind, number)})


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How much longer a token takes with each attack: the median over the rounds.

    Args:
        seconds: of each kind of round, the mean time of a token in each round.
    """
    return {
        kind: statistics.median(a / b for a, b in zip(seconds[kind], seconds[other], strict=True))
        for kind, other in PAIRS.items()
    }


class Attacker:
    """Sends hostile requests while an honest one decodes."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self.url, self.model, self.session = url + COMPLETIONS, model, session
        self._numbers = itertools.count()

    async def round(self, kind: str) -> float:
        """The mean time of a token of an honest answer, with attacks of a kind.

        The attacks are written before the round, since the client shares the server's cores.
        """
        numbers = range(PREPARED if kind != "quiet" else 0)
        bodies = [attack_body(self.model, kind, next(self._numbers)) for _ in numbers]
        attacks = asyncio.create_task(self._attack(kind, bodies))
        try:
            taken = await self._honest()
            assert kind == "quiet" or not attacks.done(), "the answer outlived the attacks"
            return taken
        finally:
            attacks.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attacks

    async def _attack(self, kind: str, bodies: Sequence[bytes]) -> None:
        expected = 400 if kind == "refused" else 200
        for body in bodies:
            start = time.monotonic()
            assert len(body) < 1 << 16, f"{len(body)} bytes"
            async with self.session.post(self.url, data=body, headers=HEADERS) as got:
                assert got.status == expected, (kind, got.status, await got.text())
            await asyncio.sleep(max(0.0, start + 1 / ATTACKS_PER_SECOND - time.monotonic()))

    async def _honest(self) -> float:
        body = {
            "model": self.model,
            "prompt": [8 + index % 900 for index in range(300)],
            "max_tokens": HONEST_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        times = []
        async with self.session.post(self.url, data=encode(body), headers=HEADERS) as got:
            assert got.status == 200, await got.text()
            async for line in got.content:
                if line.startswith(b"data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    times.append(time.monotonic())
        assert len(times) > HONEST_TOKENS // 2, f"{len(times)} pieces of {HONEST_TOKENS} tokens"
        return (times[-1] - times[0]) / (HONEST_TOKENS - 1)


async def measure(url: str, model: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a token by kind of round; a first pass over all kinds warms up."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        attacker = Attacker(url, model, session)
        for number in range(rounds + 1):
            for kind in random.sample(KINDS, len(KINDS)):
                taken = await attacker.round(kind)
                if number:
                    seconds[kind].append(taken)
    return seconds


def main() -> int:
    from tests.random_model import Shape, write_model
    from vllm_pyramid.tools.eval.haystack import topics

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("flags", nargs="*", help="of the server, behind those of `make fuzz`")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="attack-cost-"))
    (model := folder / "model").mkdir()
    write_model(model, Shape(max_length=2048), list(topics().values()))
    settings: dict[str, Any] = {"log": folder / "server.log", "fresh": True}
    with serving(model, *FLAGS, *arguments.flags, **settings) as server:
        seconds = asyncio.run(measure(server.url, str(model), arguments.rounds))
    for kind, times in seconds.items():
        print(f"{kind}: {1000 * statistics.median(times):.3f} ms a token, {len(times)} rounds")
    found = ratios(seconds)
    for kind, ratio in found.items():
        print(f"{kind} to {PAIRS[kind]}: {ratio:.3f}")
    good = max(found.values()) < MOST
    print("good" if good else f"FAILED: {MOST} or more")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
