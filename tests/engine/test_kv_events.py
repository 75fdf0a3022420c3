# SPDX-License-Identifier: Apache-2.0
"""Routers hear of the same blocks of the same prompts, with a policy or without."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved

from tests.engine.support import Engine, EnginePool, Job, Start, greedy, random_prompts
from tests.plumbing.kv_events import Subscriber, blocks, subscribed

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "block_size": 32}
SALT = "a tenant"


def jobs(max_tokens: int) -> list[Job]:
    """Prompts that share their beginnings, end at a block's edge or not, and one of a tenant."""
    first, second, alone = random_prompts((400, 300, 37), seed=5, vocab_size=2048)
    prompts = [first, first[:160] + second, first[:70], alone, first[:9]]
    params = greedy(max_tokens)
    found = [Job(prompt, params, arrival=2 * number) for number, prompt in enumerate(prompts)]
    return [*found, Job(first[:64], params, arrival=3, salt=SALT)]


def run(engine: Engine, subscriber: Subscriber, max_tokens: int) -> list[dict[str, Any]]:
    """Return what is told of each block in an engine that begins and ends with an empty cache."""
    engine.run(jobs(max_tokens))
    assert engine.client.reset_prefix_cache()
    engine.generate([[7]], greedy(1))  # events are sent with the next step
    events = subscriber.until_cleared()
    assert not any(isinstance(event, BlockRemoved) for event in events)
    return blocks(events)


def in_order(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(told, key=lambda block: block["hash"])


@pytest.mark.long
def test_a_policy_announces_what_vllm_announces(demo: Start, engines: EnginePool) -> None:
    """Prompts also where they are evicted; answers where the whole cache is kept."""
    prompts, answers = {}, {}
    for policy in ("none", "full", "snapkv"):
        with subscribed() as subscriber:
            events = {"kv_events_config": subscriber.config}
            own = {} if policy != "snapkv" else {"kv_budget": 48}
            engine = demo(kv_policy=policy, **own, **events, **SETTINGS)
            prompts[policy] = run(engine, subscriber, 1)
            answers[policy] = run(engine, subscriber, 40)
            if policy == "snapkv":
                assert engine.coordinator.counters.num_evictions >= 4
            engines.close()
    stock = prompts["none"]
    assert len(stock) == 12 + 9 + 1 + 2 and {one["medium"] for one in stock} == {"GPU"}
    assert sum(one["extra_keys"] == (SALT,) for one in stock) == 1
    for policy in ("full", "snapkv"):
        assert in_order(prompts[policy]) == in_order(stock), policy
    assert in_order(answers["full"]) == in_order(answers["none"])
    assert len(answers["none"]) > len(stock)
    # No other request can begin with what follows an eviction; two prompts are too short for one.
    names = {told: {block["hash"] for block in answers[told]} for told in answers}
    assert {block["hash"] for block in stock} < names["snapkv"] < names["full"]
