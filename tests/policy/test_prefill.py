# SPDX-License-Identifier: Apache-2.0
"""The section `prefill`: which tokens are computed sparsely, what is shared, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pyramid.plan.chunk_units import ChunkUnits
from vllm_pyramid.plan.tiles import TILE
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.policy.planning import reusable_tokens, shareable_tokens
from vllm_pyramid.policy.request import for_request

pytestmark = pytest.mark.cpu

SPARSE = {"prefill": "antidiagonal"}


def test_the_preset_travels_as_data_and_others_are_dense() -> None:
    policy = load_policy("sparse-prefill")
    assert policy.prefill.skips_tiles and policy.attends and not policy.evicts
    assert not policy.works_in_every_step and policy.why_not(Feature.PREFIX_CACHING) is None
    assert Policy.model_validate(policy.as_data()) == policy
    for name in ("full", "auto", "select", "snapkv-chunked"):
        other = load_policy(name)
        assert other.prefill.sparse_tokens(5000) == 0 and other.prefill.cache_key == b""
    assert load_policy("auto", args=SPARSE).prefill == policy.prefill
    assert not for_request(policy, {"kv_policy": "full"}).policy.prefill.skips_tiles


def test_the_last_tokens_are_dense() -> None:
    part = load_policy("sparse-prefill").prefill
    lengths = (0, 1, 64, 191, 192, 193, 319, 320, 1000)
    assert [part.sparse_tokens(n) for n in lengths] == [0, 0, 0, 0, 128, 128, 128, 256, 896]
    wide = load_policy("sparse-prefill", args={"dense_last": 500}).prefill
    assert [wide.sparse_tokens(n) for n in (500, 627, 628, 1000)] == [0, 0, 128, 384]


@given(
    prompt=st.integers(1, 2000),
    steps=st.lists(st.integers(TILE, 700), min_size=1, max_size=30),
)
def test_chunks_hold_whole_tiles(prompt: int, steps: list[int]) -> None:
    """Any sizes of steps compute all of a prompt, and end where tiles do."""
    units = load_policy("sparse-prefill").prefill.units(prompt)
    computed = taken = 0
    while computed < prompt:
        step = steps[taken % len(steps)]
        chunk = units.chunk(computed, min(step, prompt - computed))
        assert 0 < chunk <= step
        computed, taken = computed + chunk, taken + 1
        assert computed >= units.tokens or computed % TILE == 0
    assert ChunkUnits(TILE, TILE).chunk(0, TILE - 1) == 0, "a step without room for a tile"


def test_what_is_shared_is_the_sparse_part_under_a_name_of_its_own() -> None:
    policy = load_policy("sparse-prefill")
    plan = policy.plan(1000, 8, 16)
    assert reusable_tokens(policy, plan) == shareable_tokens(policy, plan) == 896
    evicted = load_policy("snapkv", budget=512, args=SPARSE)
    plan = evicted.plan(1000, 8, 16)
    assert plan.untouched is not None and plan.untouched < 896
    assert reusable_tokens(evicted, plan) == shareable_tokens(evicted, plan) == plan.untouched
    other = load_policy("sparse-prefill", args={"top_p": 0.9})
    keys = {one.prefill.cache_key for one in (policy, evicted, other, load_policy("full"))}
    assert len(keys) == 3 and evicted.prefill.cache_key == policy.prefill.cache_key


@pytest.mark.parametrize(
    ("preset", "args", "message"),
    [
        ("h2o", {}, "a tile that is skipped gives its keys no score"),
        ("streaming-llm", {"schedule": "interval"}, "a tile that is skipped gives its keys"),
        ("pyramidinfer", {}, "shortens prompts between layers"),
        ("zigzagkv", {}, "has the allocator .* choose uniform"),
        ("snapkv-chunked", {}, "evicts inside the prompt"),
        ("select", {}, "selects pages"),
        ("duoattention", {}, "go with prefill .all. alone|heads"),
        ("kcache", {}, "keeps V in host memory"),
        ("snapkv", {"window": 65}, "set prefill.dense_last to at least 65"),
        ("full", {}, "the name 'full' is reserved .* sparse-prefill"),
        ("snapkv", {"prefill": "some"}, "unknown prefill kind 'some'"),
        ("snapkv", {"prefill": {"kind": "antidiagonal", "top_p": 0.0}}, "greater than 0"),
        ("snapkv", {"prefill": {"kind": "antidiagonal", "top_p": 1.1}}, "less than or equal to 1"),
    ],
)
def test_what_cannot_be_sparse(preset: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(preset, args={**SPARSE, **args})


def test_models_without_layers_that_are_sparse_are_refused() -> None:
    policy = load_policy("sparse-prefill")
    policy.check_layers(3)
    with pytest.raises(ValueError, match="the model has 2: nothing would be sparse"):
        policy.check_layers(2)


def _config(**changes: Any) -> Any:
    given = {
        "tokens": 2048,
        "requests": 64,
        "longest": 0,
        "block_size": 16,
        **changes,
    }
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=given["tokens"],
            max_num_seqs=given["requests"],
            long_prefill_token_threshold=given["longest"],
        ),
        cache_config=SimpleNamespace(block_size=given["block_size"]),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 48}, "set --block-size to 8, 16"),
        ({"tokens": 191}, "--max-num-batched-tokens to at least 192"),
        ({"longest": 127}, "--long-prefill-token-threshold 127"),
    ],
)
def test_sizes_that_do_not_go_with_tiles(changes: dict[str, Any], message: str) -> None:
    policy = load_policy("sparse-prefill")
    policy.prefill.check_config(policy, _config())
    policy.prefill.check_config(policy, _config(tokens=192, longest=128, block_size=128))
    with pytest.raises(ValueError, match=message):
        policy.prefill.check_config(policy, _config(**changes))
