# SPDX-License-Identifier: Apache-2.0
"""Requests of an attacker are drawn again from their number, and wrong answers are found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.attack.bodies import COMPLETIONS, HONEST, Attack, draw, encode
from tests.attack.findings import Findings
from tests.attack.fuzz import HONEST_PROMPTS, Client, known_in_vllm

SEED = 7


def _serve(answer: Callable[[bytes, int], tuple[int, bytes]], numbers: list[int]) -> Findings:
    """What is found at a server that gives these answers to a body and its turn."""
    turns: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        turns.append(0)
        status, body = answer(await request.read(), len(turns))
        return web.Response(status=status, body=body, content_type="application/json")

    async def run() -> Findings:
        app = web.Application(client_max_size=1 << 20)
        app.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{port}", "model", SEED, session)
            await client.learn_honest_answers()
            for number in numbers:
                await client.send(number)
        await runner.cleanup()
        return client.findings

    return asyncio.run(run())


def _honest(tokens: list[int]) -> bytes:
    leads: list[dict[str, float]] = [{"a": -0.1, "b": -2.0} for _ in tokens]
    choice: dict[str, Any] = {"token_ids": tokens, "logprobs": {"top_logprobs": leads}}
    return json.dumps({"choices": [choice]}).encode()


def _numbers(kind: str, expected: str) -> list[int]:
    attacks = ((number, draw(SEED, number, "model")) for number in range(500))
    return [n for n, attack in attacks if (attack.kind, attack.expected) == (kind, expected)][:3]


@pytest.mark.parametrize(
    ("kind", "expected", "status", "body", "found"),
    [
        ("served", "served", 200, b"{}", None),
        ("served", "served", 400, b"no", "400 where it should be served: no"),
        ("served", "served", 200, b'{"error": {"code": 500}}', "500 in a stream"),
        ("wrong settings", "refused", 400, b"{}", None),
        ("wrong settings", "refused", 200, b"{}", "200 where it should be refused"),
        ("mutated", "either", 200, b"{}", None),
        ("mutated", "either", 422, b"{}", None),
        ("mutated", "either", 500, b"{}", "500 where it should be either"),
        (HONEST, "served", 200, _honest([1, 2]), None),
        (HONEST, "served", 200, _honest([1, 3]), "honest tokens changed: [1, 3]"),
        (HONEST, "served", 503, b"full", "503 where it should be served"),
    ],
)
def test_wrong_answers_are_found(kind, expected, status, body, found) -> None:
    def answer(_: bytes, turn: int) -> tuple[int, bytes]:
        return (200, _honest([1, 2])) if turn <= HONEST_PROMPTS else (status, body)

    numbers = _numbers(kind, expected)
    assert len(numbers) == 3
    findings = _serve(answer, numbers)
    assert findings.sent == 3 and findings.counts[kind] == {str(status): 3}
    reasons = [reason for _, _, reason in findings.failures]
    assert len(reasons) == (0 if found is None else 3)
    assert all(reason.startswith(str(found)) for reason in reasons), reasons


@pytest.mark.parametrize(
    ("body", "message", "is_known"),
    [
        ({"structured_outputs": "x"}, "'str' object has no attribute 'get'", True),
        ({"structured_outputs": {}}, "'str' object has no attribute 'get'", False),
        ({"session_id": "\ud800"}, "", True),
        ({"top_k": 2**64}, "", True),
        ({"top_k": 2**64 - 1}, "", False),
        ({"vllm_xargs": {"other": "\ud800"}}, "", True),
        ({"vllm_xargs": {"kv_application": "\ud800"}}, "", False),
        ({"vllm_xargs": {"kv_top_n": 2**70}}, "", False),
        ({"top_k": 2**64}, "the engine died", False),
        ({"length_penalty": float("-inf")}, "float division by zero", False),
        (
            {"use_beam_search": True, "length_penalty": float("-inf")},
            "float division by zero",
            True,
        ),
        ({"use_beam_search": True, "length_penalty": -(2**63)}, "float division by zero", True),
        ({"use_beam_search": True, "length_penalty": -1}, "float division by zero", False),
        ({"use_beam_search": True, "length_penalty": float("-inf")}, "a KeyError", False),
        ({"use_beam_search": True, "truncate_prompt_tokens": "0"}, "list index out of range", True),
        ({"use_beam_search": True, "truncate_prompt_tokens": 1}, "list index out of range", False),
    ],
)
def test_faults_of_vllm_excuse_nothing_else(body, message, is_known) -> None:
    attack = Attack("mutated", COMPLETIONS, encode(body))
    answer = json.dumps({"error": {"message": message}}).encode()
    assert bool(known_in_vllm(attack, answer)) == is_known
