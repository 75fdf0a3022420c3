# SPDX-License-Identifier: Apache-2.0
"""Turns of conversations that go on with what the turn before has left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.test_prefixes import Pair, prompt
from vllm_pyramid.scheduler.states import State

pytestmark = pytest.mark.cpu


def _pair(**changes: Any) -> Pair:
    values = {"max_model_len": 384, "max_num_batched_tokens": 96, "budget": 24}
    return Pair(**{**values, **changes})


def _say(pair: Pair, name: str, tokens: list[int], answer: int, turns: list[int], **own: Any) -> list[int]:
    """Run a turn of a conversation; returns its prompt and its answer."""
    pair.add(name, tokens, answer, kv_turns=turns, **own)
    request = pair.scheduler.requests[name]
    pair.run()
    return list(request.all_token_ids)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hits_are_as_long_as_they_can_be(asynchronous: bool) -> None:
    pair = _pair(asynchronous=asynchronous)
    said = _say(pair, "first", prompt(70), 21, [])
    assert len(said) == 91 and pair.worker.num_resumed == 0
    tokens = [*said, *prompt(40, 500)]
    said = _say(pair, "second", tokens, 10, [70])
    assert pair.worker.num_resumed == 1
    assert pair.worker.num_adopted == 90 // 4 * 4
