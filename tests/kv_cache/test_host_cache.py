# SPDX-License-Identifier: Apache-2.0
"""Prefixes and sessions that the pool has given away are found in the host cache, exactly."""

from __future__ import annotations

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from tests.kv_cache.test_prefix_cache import Pair, prompt
from tests.scheduler.harness import make_request
from vllm_pyramid.compat.side_channel import TIER, read_messages
from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.kv_cache.host_cache import HostCache


def named(name: str) -> BlockHash:
    return BlockHash(name.encode())


def names(*given: str) -> list[BlockHash]:
    return [named(name) for name in given]


def blocks(first: int, count: int = 3) -> list[KVCacheBlock]:
    return [KVCacheBlock(block_id) for block_id in range(first, first + count)]


def bundle(name: str, first: int, count: int = 3) -> BlockBundle:
    """A bundle that a pool gives away, by its first block's id."""
    return BlockBundle(named(name), blocks(first, count), refs=0)


def test_the_least_recently_used_goes_first() -> None:
    host = HostCache(num_slots=3, slot_blocks=3)
    for index, name in enumerate("abc"):
        host.store(bundle(name, 3 * index))
    assert host.longest_prefix(names("a", "b", "x", "c")) == 2
    host.store(bundle("a", 30))  # it is there already
    copies = host.take_message()
    assert copies is not None and [copy.blocks[0] for copy in copies.stored] == [0, 3, 6]
    host.store(bundle("d", 9))
    assert host.used_slots == 3 and host.counters.evictions == 1
    assert [name in host for name in names("a", "b", "c", "d")] == [True, False, True, True]
    copies = host.take_message()
    assert copies is not None and [copy.slot for copy in copies.stored] == [1]
    assert host.take_message() is None
    with pytest.raises(RuntimeError, match="into 2 blocks"):
        host.load(named("c"), blocks(0, 2))
    host.clear()
    assert not host.used_slots and not host.longest_prefix(names("a"))


def pushed_out(pair: Pair, tokens: int = 88) -> None:
    """Let other prompts take all blocks of the pool."""
    for index in range(3):
        pair.add(f"other{index}", prompt(tokens, 5000 + 500 * index))
        pair.run()


@pytest.mark.parametrize("policy", ["full", "snapkv"])
def test_a_prefix_is_found_behind_what_the_device_has(policy: str) -> None:
    full = {"budget": "100%", "policy_args": ()} if policy == "full" else {}
    pair = Pair(num_blocks=3 * 30, policy=policy, host_slots=200, **full)
    host = pair.host
    pair.add("first", prompt(40))
    pair.run()
    pushed_out(pair)
    hashes = make_request("q", prompt(40), hash_block_size=4).block_hashes
    assert pair.pool.longest_prefix(hashes) == 0 and host.longest_prefix(hashes) == 10
    before = host.counters.queries
    pair.add("again", prompt(40))
    computed = 40 - 36 if policy == "full" else 40 - (40 - 6) // 4 * 4
    assert pair.step() == {"again": computed}
    assert host.counters.hits == 40 - computed == host.counters.queries - before
    assert pair.worker.num_loaded == (40 - computed) // 4
    pair.run()
    # It is a prefix of the device again: what the two have together is found.
    pair.add("longer", [*prompt(40), *prompt(20, 700)])
    found = 40
    assert pair.step() == {"longer": 60 - found}
    pair.run()
    stored = host.counters.stored
    pushed_out(pair)
    pair.add("once more", prompt(40))
    assert pair.step() == {"once more": computed}
    pair.run()
    assert host.counters.stored - stored < 3 * (15 + 3 * 22), "what is there is not copied again"


def test_a_query_is_counted_once_and_a_miss_too() -> None:
    """A request that waits looks in every step, and counts when it begins."""
    pair = Pair(num_blocks=3 * 30, policy="full", budget="100%", policy_args=(), host_slots=50)
    host = pair.host
    pair.add("long", prompt(80), 12)
    pair.step()
    pair.add("waits", prompt(60, 300), 1)
    pair.run()
    assert (host.counters.queries, host.counters.hits) == (76 + 56, 0)


def test_a_session_comes_back_from_the_host() -> None:
    """The base and what was computed behind it, to the last whole block."""
    pair = Pair(num_blocks=3 * 40, budget=16, host_slots=200, max_model_len=160)
    host = pair.host
    pair.add("first", prompt(40), 9, kv_turns=[])
    first = pair.scheduler.requests["first"]
    pair.run()
    pushed_out(pair, 150)
    said = [*first.all_token_ids, *prompt(44, 900)]
    before = host.counters.hits
    pair.add("second", said, 4, kv_turns=[40])
    step = pair.step()
    assert step == {"second": len(said) - 48}, "all but the last token of the answer"
    assert host.counters.hits - before == 48
    pair.run()


def test_a_reset_empties_both_tiers() -> None:
    """Weights may have changed: nothing is stored on the way out, and nothing found."""
    pair = Pair(num_blocks=3 * 30, host_slots=200)
    host = pair.host
    pair.add("first", prompt(40))
    pair.run()
    pushed_out(pair)
    assert host.used_slots > 10
    assert pair.scheduler.reset_prefix_cache()
    assert not host.used_slots and TIER not in read_messages(pair.scheduler.schedule())
    pair.add("again", prompt(40))
    assert pair.step() == {"again": 40}
    pair.run()
