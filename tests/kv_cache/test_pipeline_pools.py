# SPDX-License-Identifier: Apache-2.0
"""Pools of pipeline stages: what they hold by vLLM's own planner, and when a request fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_configs,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.scheduler.harness import Setup, vllm_config
from vllm_pyramid.kv_cache.layer_roles import roles_of
from vllm_pyramid.kv_cache.pipeline_pools import PipelineLayout, PipelinePools
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec
from vllm_pyramid.plan import peak_blocks
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.failures import METHOD, SCORES, Failure, Failures
from vllm_pyramid.worker import pipeline_sync as worker_stages
from vllm_pyramid.worker.pipeline_sync import PipelineSync

AVERAGING_WINDOW = 64 << 20  # bytes that each worker has for its cache


def _stock(layers: range) -> dict[str, FullAttentionSpec]:
    return {
        f"model.layers.{layer}.self_attn.attn": FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        for layer in layers
    }


def _ours(stages: list[dict[str, FullAttentionSpec]]) -> list[dict[str, LayerKVCacheSpec]]:
    """What the worker of each stage tells vLLM."""
    everything = {name: spec for stage in stages for name, spec in stage.items()}
    policy = load_policy("pyramidkv", "30%", {"window": 6})
    roles = roles_of(everything, policy, 4096, stages=[stage.keys() for stage in stages])
    return [roles.of_stage(stage).evicting for stage in stages]


def _capacity(specs: list[Any], setup: Setup) -> tuple[int, int]:
    """Blocks of a pool, and the tokens that vLLM says fit."""
    config = vllm_config(setup)
    config.cache_config.kv_cache_layout = "LBHNC"
    configs = get_kv_cache_configs(config, specs, [AVERAGING_WINDOW] * len(specs))
    found = generate_scheduler_kv_cache_config(configs)
    return found.num_blocks, get_kv_cache_capacity(config, found)[0]


@pytest.mark.parametrize("sizes", [(16, 16), (15, 15), (8, 8, 7, 7), (4,)])
def test_stages_hold_what_stock_vllm_holds(sizes: tuple[int, ...]) -> None:
    """With one pool for all layers two stages would hold half."""
    ends = np.cumsum(sizes).tolist()
    layers = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    stages = [_stock(of_stage) for of_stage in layers]
    setup = Setup(max_model_len=4096, stages=sizes if len(sizes) > 1 else ())
    _, stock = _capacity(stages, setup)
    blocks, ours = _capacity(_ours(stages), setup)
    assert ours >= 0.95 * stock
    assert blocks * 16 * 2 * 2 * 32 * 4 <= AVERAGING_WINDOW, "more than a worker has"
    assert ours <= blocks * 16 / max(sizes) + 1


def test_layers_are_numbered_through_the_model() -> None:
    first, second = _ours([_stock(range(3)), _stock(range(3, 5))])
    assert [spec.layer_idx for spec in first.values()] == [0, 1, 2]
    assert [spec.layer_idx for spec in second.values()] == [3, 4]
    assert {(spec.num_layers, spec.stages) for spec in second.values()} == {(5, (3, 2))}
    stages = second["model.layers.3.self_attn.attn"].pipeline()
    assert [stages.of_table(layer) for layer in range(5)] == [0, 0, 0, 1, 1]
    assert stages.sums(np.array([1, 2, 3, 4, 5])).tolist() == [6, 9]


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="--pipeline-parallel-size"):
        _ours([_stock(range(3)), {}])


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    taken=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    needed=st.lists(st.integers(0, 25), min_size=4, max_size=4),
    spare=st.integers(0, 5),
)
def test_a_request_fits_where_no_stage_lacks_blocks(sizes, taken, needed, spare) -> None:
    stages = PipelineLayout(tuple(np.cumsum(sizes).tolist()))
    pools = PipelinePools(21, False, 16, stages=stages)
    for pool, count in zip(pools.pools, taken, strict=False):
        pool.get_new_blocks(count)
    free = pools.free_by_stage()
    assert free.tolist() == [20 - count for count in taken[: len(sizes)]]
    wanted = np.array(needed[: len(sizes)])
    fits = pools.bottleneck(wanted) + spare <= pools.get_num_free_blocks()
    assert fits == bool((wanted + spare <= free).all())


@pytest.mark.parametrize("chunk", [{}, {"chunk.tokens": 80, "chunk.keep": 70}])
@pytest.mark.parametrize("prompt_len", [5, 20, 64, 93])
def test_a_stage_never_holds_more_than_its_peak(prompt_len: int, chunk: dict[str, int]) -> None:
    """Though lower layers take what upper ones kept, as more tokens have been computed."""
    policy = load_policy("h2o", 60, {"interval": 5, "allocator": "arithmetic", **chunk})
    sizes, stages = np.full(5, 4), (3, 2)
    sums = PipelineLayout((3, 5)).sums
    plan = policy.plan(prompt_len, 5, 4)
    end = prompt_len + 200
    peak = sums(peak_blocks(plan, end, sizes, stages=stages))
    for computed in range(1, end + 1):
        skip = plan.skip_after(plan.evictions_by(computed - 1))
        held = sums(-(-computed // sizes) - skip // sizes)
        assert (held <= peak).all(), (computed, held, peak)
    later = plan.after(plan.evictions_by(end)).keep
    assert later[0] > later[-1], "all layers keep alike"


def test_evicted_tokens_are_summed_along_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By request, whatever the order of a stage's batch; the last stage has the sum of all."""
    wire: dict[tuple[int, int], torch.Tensor] = {}
    here = 0

    def isend(tensor: torch.Tensor, dst: int, **kwargs: Any) -> Any:
        wire[here, dst] = tensor.clone()
        return SimpleNamespace(wait=lambda: None)

    def recv(tensor: torch.Tensor, src: int, **kwargs: Any) -> None:
        tensor.copy_(wire.pop((src, here)))

    monkeypatch.setattr(worker_stages.torch.distributed, "isend", isend)
    monkeypatch.setattr(worker_stages.torch.distributed, "recv", recv)
    ranks = [4, 6, 8]
    batches = (["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"])
    for stage, names in enumerate(batches):
        here = ranks[stage]
        group = SimpleNamespace(rank_in_group=stage, world_size=3, ranks=ranks, cpu_group=None)
        own = {"a": 1, "b": 20, "c": 300}
        failures = Failures()
        failures.add(["abc"[stage]], Failure(SCORES if stage else METHOD, "of this stage"))
        evictions: Any = SimpleNamespace(
            request_ids=names,
            tokens_done=np.array([own[name] for name in names]),
            failures=failures,
        )
        worker = PipelineSync(group, in_flight=3)
        worker.sum_over_stages(evictions)
        sums = dict(zip(names, evictions.tokens_done.tolist(), strict=True))
        assert sums == {name: (stage + 1) * tokens for name, tokens in own.items()}
    assert worker.is_last and not wire
    kinds = {name: failure.kind for name, failure in failures.take().wait().items()}
    assert kinds == {"a": METHOD, "b": SCORES, "c": SCORES}


# Rows of all stages -------------------------------------------------------------------------------


def _pools_with_rows(count: int) -> PipelinePools:
    """Of 10 blocks each for 1 and 2 layers, with so many idle rows, named by their numbers."""
    pools = PipelinePools(11, False, 16, stages=PipelineLayout((1, 3)))
    for number in range(count):
        blocks = pools.get_blocks_of_layers([1, 2, 3])
        assert pools.add_idle(_name(number), blocks)
    return pools


def _name(number: int) -> BlockHash:
    return BlockHash(bytes([number]))


def test_a_row_lives_and_dies_in_all_stages() -> None:
    """The stage that lacks blocks dissolves it; the others get theirs back, and lose none."""
    pools = _pools_with_rows(4)
    first, second = pools.pools
    assert pools.free_by_stage().tolist() == [10, 10] and pools.get_num_free_blocks() == 10
    assert [pool.free_block_queue.num_free_blocks for pool in pools.pools] == [6, 2]
    second.get_new_blocks(3)
    assert [_name(number) in pools.bundles for number in range(4)] == [False, True, True, True]
    assert pools.free_by_stage().tolist() == [10, 7]
    assert [pool.free_block_queue.num_free_blocks for pool in pools.pools] == [7, 1]
    # In use, it counts as free in no stage.
    rows, revived = pools.adopt([_name(1)])
    assert revived == 1 and pools.free_by_stage().tolist() == [9, 5]
    assert [len(pools.idle_bundles([_name(n)])) for n in (1, 2, 3)] == [0, 1, 1]
    with pytest.raises(ValueError, match="free blocks"):
        second.get_new_blocks(6)
    assert pools.release(rows) == 1
    first.get_new_blocks(9)
    assert list(pools.bundles) == [_name(1)], "the one that was used last goes last"
    assert pools.free_by_stage().tolist() == [1, 7]


def test_blocks_are_set_aside_where_no_stage_lacks_them() -> None:
    pools = _pools_with_rows(0)
    nothing = np.zeros(2, np.int64)
    pools.pools[1].get_new_blocks(6)
    assert pools.reserve(np.array([2, 5]), nothing) is None
    assert pools.free_by_stage().tolist() == [10, 4]
    row = pools.reserve(np.array([6, 3]), nothing)
    assert row is not None and row.counts == (6, 3) and pools.free_by_stage().tolist() == [10, 4]
    # What was set aside in the same step stays, in each stage.
    assert pools.reserve(np.array([1, 2]), np.array([6, 3])) is None
    assert pools.reserve(np.array([5, 1]), np.array([6, 3])) is None
    other = pools.reserve(np.array([4, 1]), np.array([6, 3]))
    assert other is not None and list(pools.idle) == [row, other]
    blocks = pools.take_reserved(row)
    assert blocks is not None and pools.free_by_stage().tolist() == [4, 1]
    for pool, block in zip([pools.pools[0]] * 6 + [pools.pools[1]] * 3, blocks, strict=True):
        assert pool.blocks[block.block_id] is block
    pools.pools[1].get_new_blocks(1)
    assert pools.take_reserved(other) is None and pools.free_by_stage().tolist() == [4, 0]


def test_what_is_set_aside_in_another_stage_stays() -> None:
    """Dissolving it would give nothing to the stage that lacks blocks."""
    pools = _pools_with_rows(1)
    aside = pools.reserve(np.array([3, 0]), np.zeros(2, np.int64))
    assert aside is not None
    pools.touch_bundle(_name(0))
    pools.pools[1].get_new_blocks(9)
    assert not pools.bundles and list(pools.idle) == [aside]


def test_blocks_go_back_to_their_own_stage() -> None:
    pools = PipelinePools(9, False, 16, stages=PipelineLayout((1, 3)))
    blocks = pools.get_blocks_of_layers([2, 5, 6])
    of_pools = [pools.pools[0]] * 2 + [pools.pools[1]] * 4
    for pool, block in zip(of_pools, blocks, strict=True):
        assert pool.blocks[block.block_id] is block
    assert pools.free_by_stage().tolist() == [6, 4]
    assert pools.get_num_free_blocks() == 4
    pools.free_blocks(blocks[:3])
    assert pools.free_by_stage().tolist() == [8, 5]
    pools.free_blocks(blocks[3:])
    assert pools.free_by_stage().tolist() == [8, 8]


def test_all_stages_forget_together() -> None:
    pools = _pools_with_rows(2)
    blocks = pools.pools[0].get_new_blocks(1)
    assert not pools.reset_prefix_cache() and len(pools.bundles) == 2
    pools.free_blocks(blocks)
    assert pools.reset_prefix_cache() and not pools.bundles and not pools.idle
    assert [pool.free_block_queue.num_free_blocks for pool in pools.pools] == [10, 10]
