# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: requests of attackers over HTTP, among honest ones whose tokens must not change.

FUZZ_REQUESTS=100000 FUZZ_SECONDS=1800 make fuzz
FUZZ_SEED=1234 FUZZ_NUMBER=77 make fuzz    # one request of an earlier run again
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.attack.bodies import COMPLETIONS, HONEST, MAX_MODEL_LEN, VOCAB_SIZE, Attack, draw, encode
from tests.attack.findings import Findings, report, settings_of
from tests.plumbing.server import Server, members, serving

BLOCKS = 8 * 200 + 1  # a dozen prompts of the longest kind: requests wait, some are preempted
FLAGS = (
    *("--kv-policy", "pyramidkv", "--kv-budget", "64", "--kv-min-tokens", "0", "--enforce-eager"),
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"),
    *("--num-gpu-blocks-override", str(BLOCKS), "--enable-prompt-tokens-details"),
)
HONEST_PROMPTS, HONEST_TOKENS = 12, 8
# A token that leads by less may be another where the same sums are rounded in another order.
CLEAR_LEAD = 0.05
# An answer that takes longer counts as one that never came.
LONGEST_SECONDS = 120.0
LONGEST_HONEST_SECONDS = 60.0


def honest_bodies(model: str, seed: int) -> list[bytes]:
    """Candidates: greedy answers to random prompts, with how far each token leads."""
    source = random.Random(f"{seed}/honest")
    return [
        encode(
            {
                "model": model,
                "prompt": [source.randrange(8, VOCAB_SIZE) for _ in range(source.randint(90, 400))],
                "max_tokens": HONEST_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 2,
                "return_token_ids": True,
            }
        )
        for _ in range(8 * HONEST_PROMPTS)
    ]


class Client:
    """Sends requests to one server and judges the answers."""

    def __init__(self, url: str, model: str, seed: int, session: aiohttp.ClientSession) -> None:
        self.url, self.model, self.seed, self.session = url, model, seed, session
        self.honest: list[tuple[bytes, list[int]]] = []
        self.findings = Findings()

    async def learn_honest_answers(self) -> None:
        """Send honest prompts to the idle server; those whose tokens lead clearly are kept."""
        headers = {"Content-Type": "application/json"}
        for body in honest_bodies(self.model, self.seed):
            if len(self.honest) == HONEST_PROMPTS:
                return
            start = time.monotonic()
            async with self.session.post(self.url + COMPLETIONS, data=body, headers=headers) as got:
                assert got.status == 200, await got.text()
                choice = (await got.json())["choices"][0]
            self.findings.idle_seconds.append(time.monotonic() - start)
            leads = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
            if all(len(top) == 2 and top[1] - top[0] > CLEAR_LEAD for top in leads):
                self.honest.append((body, choice["token_ids"]))
        raise AssertionError(f"only {len(self.honest)} prompts have clear answers")

    async def send(self, number: int) -> None:
        """Send the request of that number; what is wrong with its answer goes to the findings."""
        attack = draw(self.seed, number, self.model)
        expected: list[int] | None = None
        if attack.kind == HONEST:
            body, expected = self.honest[number % len(self.honest)]
            attack = Attack(HONEST, attack.path, body, "served")
        start = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                try:
                    status, answer = await self._answer(attack)
                except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                    # The server has closed a connection that was idle.
                    self.findings.reconnected += 1
                    status, answer = await self._answer(attack)
        except TimeoutError:
            self._count(attack, "none")
            self.findings.fail(number, attack, f"no answer in {LONGEST_SECONDS:.0f} s")
            return
        except aiohttp.ClientError as error:
            self._count(attack, type(error).__name__)
            self.findings.fail(number, attack, f"the connection broke: {error!r}")
            return
        self._count(attack, str(status) if status else "disconnected")
        if expected is not None:
            seconds = time.monotonic() - start
            self.findings.honest_seconds.append(seconds)
            if seconds > LONGEST_HONEST_SECONDS:
                self.findings.fail(number, attack, f"an honest answer took {seconds:.0f} s")
        if reason := self._judge(attack, status, answer, expected):
            self.findings.fail(number, attack, reason)

    def _count(self, attack: Attack, status: str) -> None:
        self.findings.counts[attack.kind][status] += 1

    async def _answer(self, attack: Attack) -> tuple[int, bytes]:
        """The status, 0 where the client left first, and the answer as far as it was read."""
        url = self.url + attack.path
        async with self.session.post(url, data=attack.body, headers=attack.headers) as got:
            if attack.disconnect_after is None or got.status != 200:
                return got.status, await got.read()
            for _ in range(attack.disconnect_after):
                if not await got.content.readline():
                    break
            got.close()
            return 0, b""

    def _judge(
        self, attack: Attack, status: int, answer: bytes, expected: list[int] | None
    ) -> str | None:
        """What is wrong with an answer; None if it is right."""
        if not status:
            return None
        if status == 500 and (known := known_in_vllm(attack, answer)):
            self.findings.of_vllm[known] += 1
            return None
        if not attack.accepts(status):
            reason = f"{status} where it should be {attack.expected}"
            said = answer.decode(errors="replace") if status != 200 else settings_of(attack)
            return f"{reason}: {said[:300]}"
        # vLLM reports errors of a stream that has begun in the stream.
        if status == 200 and (found := re.search(rb'"code": ?(5\d\d)', answer)):
            return f"{found.group(1).decode()} in a stream: {answer[-300:].decode()}"
        if expected is not None:
            found_tokens = json.loads(answer)["choices"][0]["token_ids"]
            if found_tokens != expected:
                return f"honest tokens changed: {found_tokens} where the idle server had {expected}"
        return None


def known_in_vllm(attack: Attack, answer: bytes) -> str | None:
    """A fault of vLLM's own front end that a status of 500 tells; None if it is no known one.

    Its validators, which run before the field's type is checked, call `get` on what should be an
    object (`check_structured_outputs_count` of both endpoints). What JSON can carry and MessagePack
    cannot fails where the request is encoded for the engine. Beam search divides by a power of the
    length (`get_beam_search_score`), which is 0 where `length_penalty` is -Infinity or near it,
    and looks at the last token of a prompt that was truncated to none.
    """
    try:
        body = json.loads(attack.body)
        message = json.loads(answer)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(body, dict):
        return None
    value = body.get("structured_outputs")
    no_object = re.fullmatch(r"'\w+' object has no attribute 'get'", message)
    if no_object and value is not None and not isinstance(value, dict):
        return "structured_outputs that is no object"
    divides = re.fullmatch(r"(float )?division by zero", message)
    if divides and body.get("use_beam_search") and _is_zero_power(body.get("length_penalty")):
        return "beam search with a length_penalty whose power of a length is 0"
    is_empty = str(body.get("truncate_prompt_tokens")) == "0"
    if message == "list index out of range" and body.get("use_beam_search") and is_empty:
        return "beam search of a prompt that is truncated to no tokens"
    if isinstance(xargs := body.get("vllm_xargs"), dict):  # what the policy reads is no excuse
        body["vllm_xargs"] = {k: v for k, v in xargs.items() if not k.lower().startswith("kv")}
    if not message and not _is_encodable(body):
        return "half a surrogate pair, or an integer of more than 64 bits"
    return None


def _is_zero_power(exponent: Any) -> bool:
    """Whether that power of the greatest length is 0."""
    try:
        return float(MAX_MODEL_LEN) ** float(exponent) == 0
    except (TypeError, ValueError, OverflowError):
        return False


def _is_encodable(value: Any) -> bool:
    """Whether MessagePack, in which the engine gets requests, has a form for a value."""
    if isinstance(value, dict | list):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return all(map(_is_encodable, parts))
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**64


async def attack_server(
    server: Server, model: str, seed: int, numbers: range, *, seconds: float, connections: int = 32
) -> Findings:
    """Send requests until all are sent or the time is over; then the server must be idle again."""
    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(server.url, model, seed, session)
        await client.learn_honest_answers()
        before = resident(server)
        start = time.monotonic()
        remaining = iter(numbers)

        async def work() -> None:
            for number in remaining:
                if time.monotonic() - start > seconds or server.process.poll() is not None:
                    return
                await client.send(number)

        await asyncio.gather(*(work() for _ in range(connections)))
        findings = client.findings
        findings.seconds = time.monotonic() - start
        findings.health = await _health(session, server)
        if not findings.health:
            findings.leaks = await _held(session, server)
            after = resident(server)
            findings.memory = {name: (before.get(name, 0), after[name]) for name in after}
        return findings


async def _health(session: aiohttp.ClientSession, server: Server) -> str:
    if (status := server.process.poll()) is not None:
        return f"the server ended with status {status}"
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(30), session.get(f"{server.url}/health") as got:
            return "" if got.status == 200 else f"/health answers {got.status}"
    return "/health does not answer"


IDLE_GAUGES = re.compile(
    r"^((?:vllm_pyramid:\w*(?:tokens|blocks)_held|vllm:kv_cache_usage_perc"
    r"|vllm:num_requests_running|vllm:num_requests_waiting)(?:\{.*\})?) (\S+)$",
    re.MULTILINE,
)


async def _held(session: aiohttp.ClientSession, server: Server) -> list[str]:
    """Gauges that are not zero after half a minute; an idle server holds nothing."""
    for _ in range(60):
        async with session.get(f"{server.url}/metrics") as got:
            gauges = IDLE_GAUGES.findall(await got.text())
        assert gauges, "the server has no gauges"
        held = [f"{name} {value}" for name, value in gauges if float(value)]
        if not held:
            break
        await asyncio.sleep(0.5)
    return held


def resident(server: Server) -> dict[str, int]:
    """MiB of each process of the server, by what it calls itself."""
    found = {}
    for pid, title in members(server.process.pid):
        with contextlib.suppress(OSError, AttributeError):
            status = Path(f"/proc/{pid}/status").read_text()
            size = re.search(r"VmRSS:\s+(\d+)", status)
            name = title if title.startswith("VLLM::") else "front end"
            if size and "resource_tracker" not in title:
                found[name] = int(size.group(1)) >> 10
    return found


def main() -> int:
    from tests.random_model import Shape, write_model
    from vllm_pyramid.tools.eval.haystack import topics

    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--number", type=int, default=None)
    parser.add_argument("--python", default=sys.executable, help="of the environment that serves")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("flags", nargs="*", help="of the server, behind those of every run")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))
    print(f"FUZZ_SEED={seed}, folder {folder}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # the server ends, too
    (model := folder / "model").mkdir(parents=True)
    write_model(model, Shape(max_length=MAX_MODEL_LEN), list(topics().values()))
    first = arguments.number
    numbers = range(arguments.requests) if first is None else range(first, first + 1)
    settings: dict[str, Any] = {
        "log": folder / "server.log",
        "unset": ("PYTHONPATH",),
        "command": (arguments.python, "-m", "vllm.entrypoints.cli.main", "serve"),
        "fresh": True,
    }
    with serving(model, *FLAGS, *arguments.flags, **settings) as server:
        run = attack_server(
            server,
            str(model),
            seed,
            numbers,
            seconds=arguments.seconds,
            connections=arguments.connections,
        )
        findings = asyncio.run(run)
        log = (folder / "server.log").read_text(errors="replace")
        print(report(findings, server.url, seed, folder, log))
    return 0 if findings.good() else 1


if __name__ == "__main__":
    sys.exit(main())
