# SPDX-License-Identifier: Apache-2.0
"""Block accounting of `LockstepCoordinator` over vLLM's own pool, without a scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.scheduler.checks import check_pool
from tests.scheduler.harness import kv_cache_config
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.new_blocks import NoBlocks
from vllm_pyramid.kv_cache.request_record import RequestTerms
from vllm_pyramid.plan import Eviction, EvictionPoint, RetentionPlan
from vllm_pyramid.policy import load_policy

pytestmark = pytest.mark.cpu

NUM_LAYERS = 5
BLOCK_SIZE = 8
NUM_BLOCKS = 400


def make_coordinator() -> LockstepCoordinator:
    return coordinator_of(kv_cache_config(NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS + 1), BLOCK_SIZE)


def coordinator_of(config: KVCacheConfig, scheduler_block_size: int) -> LockstepCoordinator:
    return LockstepCoordinator(
        kv_cache_config=config,
        max_model_len=512,
        max_in_flight_tokens=512,
        use_eagle=False,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=scheduler_block_size,
    )


def make_plan(prompt_len: int, skip: list[int]) -> RetentionPlan:
    skips = np.array(skip, np.int32)
    keep = prompt_len - skips
    return RetentionPlan((EvictionPoint.of(prompt_len, BLOCK_SIZE, int(keep.mean()), keep, False),))


def allocate(coordinator: LockstepCoordinator, request_id: str, num_tokens: int) -> int:
    """As `KVCacheManager.allocate_slots` does; returns the blocks that were asked for."""
    needed = coordinator.get_num_blocks_to_allocate(request_id, num_tokens)
    new_blocks = coordinator.allocate_new_blocks(request_id, num_tokens, num_tokens)
    assert len(new_blocks) == NUM_LAYERS or not needed
    assert sum(map(len, new_blocks)) == needed
    check_pool(coordinator)
    return needed


def evict(coordinator: LockstepCoordinator, request_id: str, plan: RetentionPlan) -> None:
    coordinator.plans.confirm(request_id, Eviction(int(plan.end.skip.sum())))
    coordinator.remove_skipped_blocks(request_id, plan.prompt_len, plan.prompt_len)
    check_pool(coordinator)


@given(
    prompt_len=st.integers(1, 300),
    budget=st.one_of(st.integers(9, 310), st.sampled_from(["1%", "12%", "50%", "100%"])),
    fill_blocks=st.booleans(),
    policy_name=st.sampled_from(["pyramidkv", "snapkv", "streaming-llm", "full"]),
)
def test_a_layer_holds_what_its_plan_says(
    prompt_len: int, budget: int | str, fill_blocks: bool, policy_name: str
) -> None:
    args = {"fill_blocks": fill_blocks}
    policy = load_policy(policy_name, None if policy_name == "full" else budget, args)
    plan = policy.plan(prompt_len, NUM_LAYERS, BLOCK_SIZE)
    coordinator = make_coordinator()
    coordinator.plans.add("r", RequestTerms(plan))
    allocate(coordinator, "r", prompt_len)
    full = cdiv(prompt_len, BLOCK_SIZE)
    assert coordinator.blocks_held("r") == [full] * NUM_LAYERS
    if plan.evicts:
        evict(coordinator, "r", plan)
    else:
        coordinator.remove_skipped_blocks("r", prompt_len, prompt_len)
    held = coordinator.blocks_held("r")
    assert held == plan.end.blocks.tolist() == coordinator.counters.held_blocks.tolist()
    # The head is given back by whole blocks, at the same boundaries as everybody's.
    assert held == [full - skip // BLOCK_SIZE for skip in plan.end.skip.tolist()]
    if fill_blocks:
        assert held == [cdiv(prompt_len - skip, BLOCK_SIZE) for skip in plan.end.skip.tolist()]
    freed = NUM_LAYERS * full - sum(held)
    assert coordinator.counters.blocks_freed.sum() == freed
    assert coordinator.block_pool.get_num_free_blocks() == NUM_BLOCKS - sum(held)
    coordinator.free("r")
    check_pool(coordinator)
    assert coordinator.block_pool.get_num_free_blocks() == NUM_BLOCKS
    assert (
        not coordinator.counters.held_blocks.any() and not coordinator.counters.skipped_tokens.any()
    )


@pytest.mark.parametrize("reported", [0, 24, 39, 48])
def test_a_worker_that_evicted_other_tokens_is_refused(reported: int) -> None:
    coordinator = make_coordinator()
    coordinator.plans.add("r", RequestTerms(make_plan(32, [16, 16, 8, 0, 0])))
    allocate(coordinator, "r", 32)
    with pytest.raises(RuntimeError, match=f"evicted {reported} tokens, the plan says 40"):
        coordinator.plans.confirm("r", Eviction(reported))
    assert coordinator.plans.confirmed("r") is None


def test_blocks_popped_for_a_deferred_free() -> None:
    coordinator = make_coordinator()
    plan = make_plan(32, [16, 16, 8, 8, 0])
    coordinator.plans.add("r", RequestTerms(plan))
    allocate(coordinator, "r", 32)
    evict(coordinator, "r", plan)
    blocks = coordinator.pop_blocks_for_free("r")
    assert (
        not coordinator.counters.held_blocks.any()
        and coordinator.plans.records["r"].num_blocks == 0
    )
    assert sum(not block.is_null for block in blocks) == plan.end.blocks.sum()
    coordinator.block_pool.free_blocks(reversed(blocks))
    check_pool(coordinator)
    assert coordinator.block_pool.get_num_free_blocks() == NUM_BLOCKS


def test_no_blocks_answers_as_vllm_does() -> None:
    stock = KVCacheBlocks(((),) * NUM_LAYERS)
    ours = NoBlocks(stock.blocks)
    assert ours.get_block_ids() == stock.get_block_ids() == ([],) * NUM_LAYERS
    assert ours.get_block_ids(group_ids=[1]) == stock.get_block_ids(group_ids=[1])
    assert ours.get_block_ids(allow_none=True) is None
    assert stock.get_block_ids(allow_none=True) is None


def test_freeing_a_stranger_changes_nothing() -> None:
    coordinator = make_coordinator()
    allocate(coordinator, "r", 32)
    coordinator.free("never seen")
    coordinator.plans.confirm("never seen", Eviction(3))
    coordinator.remove_skipped_blocks("never seen", 100, 100)
    check_pool(coordinator)
    assert coordinator.blocks_held("r") == [4] * NUM_LAYERS


@pytest.mark.parametrize("damage", ["double owner", "leak", "counter"])
def test_check_pool_sees_damage(damage: str) -> None:
    coordinator = make_coordinator()
    allocate(coordinator, "a", 32)
    allocate(coordinator, "b", 32)
    first, second = coordinator.single_type_managers[:2]
    if damage == "double owner":
        first.req_to_blocks["a"][0] = second.req_to_blocks["b"][0]
    elif damage == "leak":
        first.req_to_blocks["a"][0] = coordinator.block_pool.null_block
    else:
        coordinator.counters.held_blocks[3] += 1
    with pytest.raises(AssertionError):
        check_pool(coordinator)


def test_block_sizes_must_be_multiples() -> None:
    config = kv_cache_config(2, 2 * BLOCK_SIZE, 20)
    config.kv_cache_groups[1] = kv_cache_config(2, 3 * BLOCK_SIZE, 20).kv_cache_groups[1]
    with pytest.raises(ValueError, match="cannot run in lockstep"):
        coordinator_of(config, 6 * BLOCK_SIZE)


@given(
    device_layers=st.integers(0, NUM_LAYERS - 1),
    prompt_len=st.integers(1, 300),
    units=st.lists(st.integers(0, 18), min_size=NUM_LAYERS, max_size=NUM_LAYERS),
    steps=st.lists(st.integers(1, 40), max_size=6),
)
def test_layers_without_v_take_half_the_blocks(
    device_layers: int, prompt_len: int, units: list[int], steps: list[int]
) -> None:
    """One counter for two block sizes: chunk by chunk, evicted, decoding, and given back."""
    sizes = [BLOCK_SIZE * (1 + (layer >= device_layers)) for layer in range(NUM_LAYERS)]
    config = kv_cache_config(NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS + 1, device_layers)
    coordinator = coordinator_of(config, 2 * BLOCK_SIZE)
    assert coordinator.layer_blocks.block_sizes.tolist() == sizes
    skip = [min(unit, (prompt_len - 1) // 16) * 2 * BLOCK_SIZE for unit in units]
    plan = make_plan(prompt_len, skip)
    coordinator.plans.add("r", RequestTerms(plan))
    tokens = 0
    for chunk in steps:
        tokens = min(tokens + chunk, prompt_len)
        allocate(coordinator, "r", tokens)
        assert coordinator.blocks_held("r") == [cdiv(tokens, size) for size in sizes]
    allocate(coordinator, "r", prompt_len)
    held = [cdiv(prompt_len, size) for size in sizes]
    assert coordinator.layer_blocks.full(prompt_len) == cdiv(prompt_len, BLOCK_SIZE) * NUM_LAYERS
    if plan.evicts:
        evict(coordinator, "r", plan)
        held = [n - gone // size for n, gone, size in zip(held, skip, sizes, strict=True)]
    assert coordinator.blocks_held("r") == held == coordinator.layer_blocks.kept(plan.end).tolist()
    allocate(coordinator, "r", prompt_len + 37)
    grown = [cdiv(prompt_len + 37, size) - cdiv(prompt_len, size) for size in sizes]
    assert coordinator.blocks_held("r") == [sum(pair) for pair in zip(held, grown, strict=True)]
    coordinator.free("r")
    check_pool(coordinator)
    assert coordinator.block_pool.get_num_free_blocks() == NUM_BLOCKS
    assert not coordinator.counters.held_blocks.any()


# Evictions during generation ---------------------------------------------------------------------


def later_plan(prompt_len: int, budget: Any, **args: Any) -> RetentionPlan:
    plan = load_policy("h2o", budget, args).plan(prompt_len, NUM_LAYERS, BLOCK_SIZE)
    assert isinstance(plan, RetentionPlan)
    return plan


def report(plan: RetentionPlan, number: int, before: int) -> Eviction:
    given = plan.skip_after(number) - plan.skip_after(before)
    return Eviction(int(given.sum()), None, number)


@given(
    prompt_len=st.integers(1, 80),
    budget=st.one_of(st.integers(1, 90), st.sampled_from(["12%", "50%"])),
    interval=st.integers(1, 40),
    fill_blocks=st.booleans(),
    allocator=st.sampled_from(["uniform", "arithmetic"]),
    generated=st.integers(0, 120),
    seen_every=st.integers(1, 9),
)
def test_repeated_evictions_balance(
    prompt_len: int,
    budget: Any,
    interval: int,
    fill_blocks: bool,
    allocator: str,
    generated: int,
    seen_every: int,
) -> None:
    """At every length each layer holds what its latest eviction left and what came after it.

    The scheduler may look at a request seldom, so several evictions may have been confirmed.
    """
    plan = later_plan(
        prompt_len, budget, interval=interval, fill_blocks=fill_blocks, allocator=allocator
    )
    coordinator = make_coordinator()
    coordinator.plans.add("r", RequestTerms(plan))
    told = 0
    for computed in range(prompt_len, prompt_len + generated + 1):
        allocate(coordinator, "r", computed)
        number = plan.evictions_by(computed)
        if (plan.skip_after(number) != plan.skip_after(told)).any():
            coordinator.plans.confirm("r", report(plan, number, told))
            told = number
        if (computed - prompt_len) % seen_every:
            continue
        coordinator.remove_skipped_blocks("r", computed, prompt_len)
        check_pool(coordinator)
        skip = plan.skip_after(number)
        expected = cdiv(computed, BLOCK_SIZE) - skip // BLOCK_SIZE
        assert coordinator.blocks_held("r") == expected.tolist()
        assert coordinator.counters.skipped_tokens.tolist() == skip.tolist()
        assert coordinator.counters.tokens_evicted.tolist() == skip.tolist()
        assert coordinator.counters.blocks_freed.tolist() == (skip // BLOCK_SIZE).tolist()
    coordinator.free("r")
    check_pool(coordinator)
    assert coordinator.block_pool.get_num_free_blocks() == NUM_BLOCKS
    assert (
        not coordinator.counters.held_blocks.any() and not coordinator.counters.skipped_tokens.any()
    )
    coordinator.plans.forget("r")
    assert not coordinator.plans.records


def test_a_later_eviction_that_was_not_confirmed_stops_the_engine() -> None:
    plan = later_plan(40, 16, interval=8)
    coordinator = make_coordinator()
    coordinator.plans.add("r", RequestTerms(plan))
    allocate(coordinator, "r", 40)
    evict(coordinator, "r", plan)
    held = coordinator.blocks_held("r")
    allocate(coordinator, "r", 48)
    coordinator.remove_skipped_blocks("r", 47, 40)
    with pytest.raises(RuntimeError, match=r"48 of its tokens .* latest eviction was number 1"):
        coordinator.remove_skipped_blocks("r", 48, 40)
    assert coordinator.blocks_held("r") == [blocks + 1 for blocks in held]


@pytest.mark.parametrize(
    "wrong",
    [
        Eviction(8 * NUM_LAYERS + 1, None, 2),  # another number of tokens
        Eviction(8 * NUM_LAYERS, None, 3),  # one eviction left out
        Eviction(8 * NUM_LAYERS, None, 1),  # the prompt's for a second time
    ],
)
def test_a_wrong_report_of_a_later_eviction_stops_the_engine(wrong: Eviction) -> None:
    plan = later_plan(40, 16, interval=8)
    coordinator = make_coordinator()
    coordinator.plans.add("r", RequestTerms(plan))
    allocate(coordinator, "r", 48)
    evict(coordinator, "r", plan)
    with pytest.raises(RuntimeError, match="scheduler and worker disagree"):
        coordinator.plans.confirm("r", wrong)


@given(
    prompt_len=st.integers(1, 80),
    budget=st.integers(1, 90),
    interval=st.integers(1, 40),
    allocator=st.sampled_from(["uniform", "arithmetic"]),
    generated=st.integers(0, 200),
)
def test_a_bounded_cache_is_let_in_by_its_bound(
    prompt_len: int, budget: int, interval: int, allocator: str, generated: int
) -> None:
    """What is asked for to let a request (back) in is enough for its way, and no more than that."""
    plan = later_plan(prompt_len, budget, interval=interval, allocator=allocator)
    coordinator = make_coordinator()
    coordinator.plans.add("r", RequestTerms(plan))
    total = prompt_len + generated
    asked = coordinator.get_num_blocks_to_allocate("r", total, apply_admission_cap=True)
    largest = budget if allocator == "uniform" else 2 * budget  # of a layer
    bound = max(prompt_len, largest + interval + 2 * BLOCK_SIZE)
    assert asked <= NUM_LAYERS * cdiv(min(total, bound), BLOCK_SIZE)
    told, computed = 0, 0
    while computed < total:
        computed = min(total, plan.next_eviction(computed) or total)
        allocate(coordinator, "r", computed)
        assert sum(coordinator.blocks_held("r")) <= asked
        number = plan.evictions_by(computed)
        if (plan.skip_after(number) != plan.skip_after(told)).any():
            coordinator.plans.confirm("r", report(plan, number, told))
            told = number
        coordinator.remove_skipped_blocks("r", computed, prompt_len)
