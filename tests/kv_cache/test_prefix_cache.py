# SPDX-License-Identifier: Apache-2.0
"""What requests find of each other's prompts: exact lengths, order, and no surprise for others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.beside import Beside
from tests.scheduler.checks import check_pool
from tests.scheduler.harness import PlainWorker, Setup, make_request, make_scheduler
from vllm_pyramid.compat.side_channel import PREFIXES, read_messages
from vllm_pyramid.kv_cache.host_cache import HostCache
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.planning import reusable_tokens, shareable_tokens


@pytest.mark.parametrize(
    ("policy", "budget", "tokens", "shareable", "reusable"),
    [
        ("pyramidkv", "12%", 8192, 6272, 8192),
        ("pyramidkv", 512, 8192, 7200, 8192),
        ("pyramidkv", 512, 32768, 31776, 32768),
        ("pyramidkv", 512, 1024, 32, 1024),
        ("snapkv", "12%", 8192, 7200, 8192),
        ("snapkv", "25%", 8192, 6144, 8192),
        ("streaming-llm", 1024, 8192, 7168, 8192),
        ("full", None, 8192, None, None),
        ("kcache", None, 8192, 8192, 8192),  # what is generated attends to chosen keys alone
        ("xkv", "12%", 8192, 0, 8192),
        ("h2o", "12%", 8192, 0, 0),
        ("pyramidinfer", None, 8192, 0, 0),
        ("pyramidkv", "100%", 8192, None, None),
        # Up to the first eviction, at 4,096 and 6,144 tokens.
        ("keydiff-chunked", 2048, 8192, 2048, 4096),
        ("snapkv-chunked", 2048, 100000, 2048, 6144),
        ("pyramidkv-chunked", 2048, 100000, 0, 6144),
    ],
)
def test_what_a_request_may_begin_with(policy, budget, tokens, shareable, reusable) -> None:
    """Of 32 layers: in blocks that others have too, and in copies."""
    loaded = load_policy(policy, budget)
    plan = loaded.plan(tokens, 32, 16)
    assert shareable_tokens(loaded, plan) == shareable
    assert reusable_tokens(loaded, plan) == reusable
    assert (reusable == 0) == (loaded.why_not(Feature.PREFIX_CACHING) is not None)


def test_v_in_host_memory_is_not_copied() -> None:
    loaded = load_policy("snapkv", 512, {"values": "host"})
    plan = loaded.plan(8192, 32, 32)
    assert reusable_tokens(loaded, plan) == shareable_tokens(loaded, plan) == 7680


class Pair:
    """A scheduler and its worker, which looks at everything that it is given."""

    def __init__(self, num_blocks: int = 400, **changes: Any) -> None:
        values = {"policy": "snapkv", "budget": 16, "prefix_caching": True, "max_model_len": 96}
        self.setup = Setup(**{**values, **changes})
        self.scheduler = make_scheduler(self.setup, num_blocks)
        self.worker = PlainWorker(self.scheduler.pyramid.policy, self.setup, num_blocks)
        self.pool = self.scheduler.coordinator.block_pool
        self.chunks: list[dict[str, int]] = []

    @property
    def host(self) -> HostCache:
        assert isinstance(self.pool.tier, HostCache)
        return self.pool.tier

    def add(
        self, name: str, prompt: list[int], max_tokens: int = 1, *, priority: int = 0, **extra: Any
    ) -> None:
        size = self.setup.block_size if self.setup.prefix_caching else 0
        request = make_request(
            name, prompt, max_tokens, extra or None, hash_block_size=size, priority=priority
        )
        self.scheduler.add_request(request)

    def step(self) -> dict[str, int]:
        """Tokens that each request was scheduled."""
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self.worker.execute(output))
        check_pool(self.scheduler.coordinator)
        self.chunks.append(dict(output.num_scheduled_tokens))
        return self.chunks[-1]

    def run(self, limit: int = 500) -> None:
        while self.scheduler.requests:
            self.step()
            limit -= 1
            assert limit, "no progress"


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(1000 + start, 1000 + start + length))


def test_who_is_preempted_in_the_step_that_was_to_compute_it_leaves_nothing() -> None:
    """vLLM's own scheduler leaves the hash of blocks that nobody writes then (issue 57580)."""
    pair = Pair(num_blocks=21, policy="full", budget="100%", policy_args=(), priorities=True)
    pair.add("low", prompt(15), 5, priority=1)
    pair.add("high", prompt(12, 500), 5, priority=0)
    low = pair.scheduler.requests["low"]
    assert pair.step() == {"high": 12, "low": 15}
    pair.scheduler.running.reverse()  # the low one first, as where it came before
    hashes = low.block_hashes
    assert len(hashes) == 4 and pair.pool.longest_prefix(hashes) == 3
    assert pair.step() == {"high": 1}, "the other one has given way"
    assert low.num_preemptions == 1
    # It had got its 16th token in this step, which would have completed its fourth block.
    assert hashes[3] not in pair.pool.bundles and pair.pool.longest_prefix(hashes) == 3
    pair.run()


@pytest.mark.parametrize("stages", [(), (1, 1, 1)])
def test_the_deepest_goes_first_and_the_oldest_prompt_before_it(stages: tuple[int, ...]) -> None:
    pair = Pair(num_blocks=(1 if stages else 3) * 36, max_num_batched_tokens=96, stages=stages)
    for index in range(3):
        pair.add(f"r{index}", prompt(40, 100 * index))
        pair.run()
    assert len(pair.pool.bundles) == 3 * 10
    pair.add("first again", prompt(40))
    assert pair.step() == {"first again": 40 - (40 - 6) // 4 * 4}
    pair.run()
    pair.add("large", prompt(60, 900), 1)  # needs 15 rows' blocks: 6 are free
    pair.step()
    left = {}
    for index in range(3):
        hashes = make_request("q", prompt(40, 100 * index), hash_block_size=4).block_hashes
        left[index] = pair.pool.longest_prefix(hashes)
        assert all(
            (name in pair.pool.bundles) == (i < left[index]) for i, name in enumerate(hashes)
        )
    assert left[0] == 10, "the latest used"
    assert left[1] == 0 and 0 < left[2] < 10, "the oldest goes, then the next from its end"
    pair.run()


def test_evictions_of_one_step_copy_to_different_blocks() -> None:
    """Also where one of them has all of its prompt there, whose rows then are the latest used."""
    pair = Pair(num_blocks=3 * 38, max_num_batched_tokens=96)
    pair.add("before", prompt(40))
    pair.run()
    pair.add("new", prompt(40, 100))
    pair.add("again", prompt(40))
    pair.add("newer", prompt(40, 200))
    output = pair.scheduler.schedule()
    assert output.num_scheduled_tokens == {"new": 40, "again": 8, "newer": 40}
    copies = read_messages(output)[PREFIXES]
    assert {name: len(blocks) for name, blocks in copies.items()} == {"new": 12, "newer": 12}
    assert not set(copies["new"]) & set(copies["newer"])
    pair.scheduler.update_from_output(output, pair.worker.execute(output))
    pair.run()


def test_prompt_logprobs_are_computed_again() -> None:
    pair = Pair(max_num_batched_tokens=96)
    pair.add("a", prompt(40))
    pair.run()
    request = make_request("b", prompt(40), 1, hash_block_size=4)
    request.skip_reading_prefix_cache = True  # as vLLM sets it for prompt_logprobs
    pair.scheduler.add_request(request)
    assert pair.step() == {"b": 40}
    pair.run()
    assert not pair.pool.duplicates


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_that_needs_the_whole_pool_starts_with_what_is_there(asynchronous: bool) -> None:
    """Its peak is the pool, and what it begins with counts as free: not beside the peak."""
    args = (("chunk.tokens", 24), ("chunk.keep", 24), ("window", 4), ("sinks", 1))
    changes: dict[str, Any] = {"policy": "keydiff", "policy_args": args, "max_model_len": 192}
    blocks = Setup(**{"budget": 16, **changes}).blocks_of_longest
    pair = Pair(num_blocks=blocks, asynchronous=asynchronous, **changes)
    beginning = prompt(40)
    pair.add("short", beginning)
    for _ in range(6):
        pair.step()
    assert pair.pool.bundles, "nothing was left behind"
    pair.add("long", [*beginning, *prompt(140, start=500)], 4)
    for _ in range(20):
        pair.step()
    assert not pair.scheduler.requests, "it waits for ever"
    check_pool(pair.scheduler.coordinator)


# In pipeline stages -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "found"), [(33, 24), (34, 32)])
@pytest.mark.parametrize("stages", [(1, 2), (2, 1)])
def test_no_stage_gives_away_what_is_copied_there(stages, num_blocks, found) -> None:
    """Where one of them has no room beside what is copied, only what is shared is found.

    In the stage of two layers somebody has 10 blocks. The second prompt needs 8 of its own, beside
    the 16 that it shares or copies.
    """
    pair = Pair(num_blocks, stages=stages, max_num_batched_tokens=96)
    pair.add("first", prompt(40))
    pair.run()
    pair.add("somebody", prompt(17, 500), 4, kv_policy="full")
    pair.step()
    pair.add("second", prompt(40))
    assert pair.step() == {"somebody": 1, "second": 40 - found}
    assert pair.worker.num_copied == 3 * (found - 24) // 4
    pair.run()


# Beside layers that do not evict ------------------------------------------------------------------


def _windows_found(pair: Pair, name: str) -> list[bool]:
    """Of each row of a request, whether its part in a window is there for others."""
    stock_groups = pair.scheduler.coordinator.stock_groups
    hashes = pair.scheduler.requests[name].block_hashes
    return [key in pair.pool.bundles for key in stock_groups.sources(hashes, lambda end: b"")[0]]


def test_who_is_preempted_leaves_no_window_that_was_not_computed() -> None:
    """As `test_who_is_preempted_in_the_step_that_was_to_compute_it_leaves_nothing`."""
    beside = (Beside("sliding", 64),)
    pair = Pair(
        num_blocks=28, policy="full", budget="100%", policy_args=(), priorities=True, beside=beside
    )
    pair.add("low", prompt(15), 5, priority=1)
    pair.add("high", prompt(12, 500), 5, priority=0)
    low = pair.scheduler.requests["low"]
    assert pair.step() == {"high": 12, "low": 15}
    pair.scheduler.running.reverse()
    assert _windows_found(pair, "low") == [True, True, True, False]
    assert pair.step() == {"high": 1}
    assert low.num_preemptions == 1
    assert _windows_found(pair, "low") == [True, True, True, False]
    pair.run()


@pytest.mark.parametrize(("num_blocks", "adopted"), [(156, 0), (219, 0), (220, 29)])
def test_what_is_copied_from_a_window_is_not_given_away_for_the_copy(num_blocks, adopted) -> None:
    """Where the pool has no room beside what is copied, nothing is found.

    The second prompt shares 16 rows of 3 blocks, and needs 12 blocks more in the layers that evict.
    In sight behind the shared 64 tokens are 29, in 8 blocks of each of 8 layers, which are copied;
    with the tail a layer has 12. A pool of 156 blocks has enough only if what is copied counts as
    free.
    """
    pair = Pair(num_blocks, beside=(Beside("sliding", 30),) * 8, max_num_batched_tokens=8)
    pair.add("first", prompt(64))
    pair.run()
    assert 3 * 16 + 8 * 8 + (12 + 8 * 12) == 220
    pair.add("second", [*prompt(64), *prompt(16, 900)])
    pair.run()
    assert pair.worker.num_adopted_beside == adopted * 8


def test_what_cannot_be_found_is_off_or_refused() -> None:
    for beside in (Beside("state", block_size=96), Beside("sliding", 21, 8)):
        pair = Pair(beside=(beside,), prefix_caching=None)
        assert not pair.scheduler.kv_cache_manager.enable_caching
        with pytest.raises(ValueError, match=r"--enable-prefix-caching.*larger blocks"):
            Pair(beside=(beside,))


def test_what_an_order_takes_goes_to_the_tier_once_no_other_bundle_has_it() -> None:
    """Else a router would be told of the bundle on the device alone, whose copy the host has."""
    pair = Pair(policy="full", budget="100%", policy_args=())
    for name in ("a", "b"):
        pair.add(name, prompt(24), 5)
    assert pair.step() == {"a": 24, "b": 4}  # both compute the last bundle
    prefixes, stored = pair.scheduler.coordinator.prefixes, []
    pair.pool.tier.store = lambda bundle: stored.append((bundle.hash, bundle.hash in own))
    own = pair.pool.bundles
    names = list(own)
    prefixes.claim("a", 5)
    assert stored == [] and list(own) == names
    prefixes.claim("b", 5)
    assert stored == [(name, False) for name in names[5:]] and list(own) == names[:5]
