# SPDX-License-Identifier: Apache-2.0
"""Block accounting of `LockstepCoordinator` over vLLM's own pool, without a scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.scheduler.checks import check_pool
from tests.scheduler.harness import kv_cache_config
from vllm_pyramid.kv_cache.cache_store import RequestTerms
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.plan import Eviction, RetentionPlan
from vllm_pyramid.policy import load_policy

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


# Evictions during generation ---------------------------------------------------------------------


def later_plan(prompt_len: int, budget: Any, **args: Any) -> RetentionPlan:
    plan = load_policy("h2o", budget, args).plan(prompt_len, NUM_LAYERS, BLOCK_SIZE)
    assert isinstance(plan, RetentionPlan)
    return plan


def report(plan: RetentionPlan, number: int, before: int) -> Eviction:
    given = plan.skip_after(number) - plan.skip_after(before)
    return Eviction(int(given.sum()), None, number)


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
