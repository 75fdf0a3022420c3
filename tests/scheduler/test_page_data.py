# SPDX-License-Identifier: Apache-2.0
"""What the live page shows: blocks add up to the pool, and strips are what requests hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.scheduler.harness import Setup
from tests.scheduler.test_scheduler import Pair
from vllm_pyramid.scheduler import page_data as module

CACHED = Setup(prefix_caching=True)
STAGES = Setup(prefix_caching=True, num_layers=4, stages=(1, 3))


def look(pair: Pair) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(pair.scheduler.page_data()))
    return data


def check(pair: Pair, data: dict[str, Any]) -> None:
    pool, managers = data["pool"], pair.coordinator.layer_managers
    whole = pair.coordinator.block_pool
    free = sum(BlockPool.get_num_free_blocks(one) for one in getattr(whole, "pools", [whole]))
    assert pool["held"] + pool["other"] + pool["cached"] + free == pool["blocks"]
    for row in data["requests"]:
        for layer, own in enumerate(managers):
            held = [block for block in own.req_to_blocks[row["id"]] if not block.is_null]
            assert row["blocks"][layer] == len(held), (row, layer)


@pytest.mark.parametrize("setup", [CACHED, STAGES], ids=["one stage", "two stages"])
def test_a_life_as_the_page_sees_it(setup: Setup) -> None:
    pair = Pair(setup)
    pair.add("r", 40, max_tokens=6)
    plan = pair.scheduler.pyramid.policy.plan(40, setup.num_layers, setup.block_size)
    seen = []
    while pair.scheduler.requests:
        pair.step()
        seen.append(look(pair))
        check(pair, seen[-1])
    rows = [row for data in seen for row in data["requests"]]
    assert rows[0]["prompt"] == 40 and rows[0]["policy"] == "pyramidkv"
    assert rows[0]["budget"] == plan.budget_tokens
    assert next(row["freed"] for row in rows if any(row["freed"])) == plan.end.skip.tolist()
    assert [row["computed"] for row in rows] == sorted(row["computed"] for row in rows)
    last = seen[-1]
    assert last["running"] == 0 and last["requests"] == [] and last["pool"]["held"] == 0
    assert last["pool"]["blocks"] == last["stats"]["pool_blocks"]


def test_requests_that_share_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REQUESTS", 2)
    pair = Pair(CACHED)
    for name in ("a", "b", "c"):
        pair.add(name, 40, max_tokens=30)
        pair.step()
        check(pair, look(pair))
    data = look(pair)
    assert data["running"] + data["waiting"] == 3 and len(data["requests"]) <= 2


def test_what_generated_tokens_read() -> None:
    sizes = {"budget": 24, "dense_layers": 1, "sinks": 4, "recent": 4}
    args = tuple((f"attend.{name}", size) for name, size in sizes.items())
    setup = Setup(policy="select", budget="100%", policy_args=args)
    pair = Pair(setup)
    pair.add("r", 60, max_tokens=4)
    pair.add("own", 20, max_tokens=4, extra_args={"kv_attend_budget": 20})
    seen: dict[str, dict[str, Any]] = {}
    while pair.scheduler.requests:
        pair.step()
        seen |= {row["id"]: row for row in look(pair)["requests"]}
    assert seen["r"]["read"] == [seen["r"]["computed"], 24, 24]
    assert seen["own"]["read"] == [seen["own"]["computed"], 20, 20]
    plain = Pair(CACHED)
    plain.add("r", 40)
    plain.step()
    (row,) = look(plain)["requests"]
    assert row["read"] is None and row["host"] == [0, 0]


def test_what_came_from_the_host_cache() -> None:
    setup = Setup(prefix_caching=True, host_slots=64)
    pair = Pair(setup)
    size = setup.block_size
    for name, prompt in (("a", [1] * 60), ("b", [2] * 90), ("c", [1] * 60)):
        pair.add(name, prompt, max_tokens=2, hash_block_size=size)
        pair.step()
        (row,) = look(pair)["requests"]
        if name != "c":
            assert row["host"] == [0, 0]
            while pair.scheduler.requests:
                pair.step()
    first, last = row["host"]
    counters = pair.coordinator.block_pool.tier.counters
    assert last - first == counters.hits > 0 and last <= row["computed"]
