# SPDX-License-Identifier: Apache-2.0
"""Chats on a real model: short ones are answered as by the whole cache, whatever the share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.support import Engine, EnginePool, Job, greedy
from tests.plumbing.real_model import real_model
from vllm_pyramid.tools.eval.haystack import topics

pytestmark = pytest.mark.engine

TOOL = (
    '{"name": "weather", "description": "The weather of a city", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}'
)
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "system", "content": f"You can call this tool: {TOOL} Answer with a call."},
        {"role": "user", "content": "How will the weather be in Oslo for three days?"},
    ],
    [
        {"role": "user", "content": "My name is Ada. What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3 is 5."},
        {"role": "user", "content": "What is my name?"},
    ],
]
FLOOR = 256


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model("smollm2")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(chat: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    chats = [encode(chat) for chat in CHATS]
    assert max(map(len, chats)) <= FLOOR
    long = topics()["typesmapping"][:4000]
    return [*chats, encode([{"role": "user", "content": f"{long}\n\nWhat is this about?"}])]


@pytest.fixture
def engine(engines: EnginePool, folder: Path) -> Engine:
    return engines.get(
        folder,
        kv_policy="auto",
        kv_budget="25%",
        kv_min_tokens=FLOOR,
        # Blocks, or a long window, would keep many of so few tokens.
        kv_policy_args={"fill_blocks": False, "window": 16},
        dtype="bfloat16",
        enable_prefix_caching=False,  # who finds a prefix computes the rest in other steps
    )


def answers(engine: Engine, prompts: list[list[int]], **extra: Any) -> list[list[int]]:
    outcomes = engine.run([Job(prompt, greedy(24, **extra)) for prompt in prompts])
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        report = outcome.report
        keeps_all = bool(extra) or len(prompt) <= FLOOR
        assert (report["evicted_tokens"] == 0) == (keeps_all and extra != {"kv_min_tokens": 0})
        if "kv_policy" not in extra:
            assert report["kv_policy"] == "snapkv-expected"
            assert report.get("kv_min_tokens", 0) == extra.get("kv_min_tokens", FLOOR)
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.slow
def test_short_chats_are_answered_as_by_the_whole_cache(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """One by one, so that both run in the same steps."""
    chats = prompts[: len(CHATS)]
    floored = [answers(engine, [chat])[0] for chat in chats]
    whole = [answers(engine, [chat], kv_policy="full")[0] for chat in chats]
    assert floored == whole
    bare = [answers(engine, [chat], kv_min_tokens=0)[0] for chat in chats]
    assert bare != whole, "without the floor a share of a short chat loses it"


@pytest.mark.slow
def test_long_chats_are_evicted_to_no_less_than_the_floor(
    engine: Engine, prompts: list[list[int]]
) -> None:
    long = prompts[-1]
    assert len(long) > 2 * FLOOR
    (outcome,) = engine.run([Job(long, greedy(4))])
    assert outcome.report["kv_budget"] == max(FLOOR, -(-len(long) // 4))
    assert outcome.report["evicted_tokens"] > 0
    engine.check_whole()
