# SPDX-License-Identifier: Apache-2.0
"""Plans: what every policy keeps of a prompt, and the arithmetic of blocks around it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.methods.host_values import HostValues
from vllm_pyramid.methods.thinning import DecayAllocator
from vllm_pyramid.plan import Budget, DeferredPlan, RetentionPlan
from vllm_pyramid.policy import Policy, load_policy, policy_names

PRESETS = {name: load_policy(name) for name in policy_names()}
PYRAMIDS = [
    load_policy("pyramidkv", None, {"fill_blocks": fill, "sinks": sinks})
    for fill, sinks in ((True, 0), (False, 4))
]


@st.composite
def budgets(draw: st.DrawFn, policy: Policy) -> Budget | None:
    if not policy.evicts:
        return None
    return Budget.parse(
        draw(
            st.one_of(
                st.integers(policy.min_budget, 5000),
                st.integers(1, 100).map(lambda percent: f"{percent}%"),
            )
        )
    )


THINNED = {n for n, policy in PRESETS.items() if isinstance(policy.allocator, DecayAllocator)}
SPLIT = {n for n, policy in PRESETS.items() if not policy.heads.has_budget}
KNOWN = [
    policy
    for name, policy in PRESETS.items()
    if not policy.defers
    and name not in THINNED  # those: tests/methods/test_thinning_lengths.py
    and name not in SPLIT  # those: tests/methods/test_streaming_heads.py
]
SOLVED = [
    *(policy for policy in PRESETS.values() if policy.defers),
    load_policy("xkv", None, {"fill_blocks": False, "sinks": 4}),
    load_policy("xkv", None, {"retention": 0.9}),
]


@settings(max_examples=300)
@given(st.data(), st.sampled_from([*KNOWN, *PYRAMIDS]))
def test_a_plan_is_consistent(data: st.DataObject, policy: Policy) -> None:
    prompt_len = data.draw(st.one_of(st.integers(0, 300), st.integers(0, 40_000)))
    dense = 2 * policy.attend.selects  # the presets' dense_layers
    least = 1 + isinstance(policy.values, HostValues) + dense
    num_layers = data.draw(st.integers(least, 80))
    block_size = data.draw(st.sampled_from([1, 8, 16, 128]))
    plan = policy.plan(prompt_len, num_layers, block_size, data.draw(budgets(policy)))
    for array in (plan.end.keep, plan.end.skip, plan.end.held, plan.end.blocks):
        assert array.shape == (num_layers,)
        assert array.dtype == np.int32
        assert not array.flags.writeable
    # Every allocator keeps the same mean.
    assert int(plan.end.keep.sum()) == plan.budget_tokens * num_layers
    assert (plan.end.keep <= prompt_len).all()
    assert (plan.end.keep >= min(policy.window + policy.sinks, prompt_len)).all()
    assert (np.diff(plan.end.keep) <= 0).all()
    assert (plan.end.held == prompt_len - plan.end.skip).all()
    if policy.fill_blocks:
        assert (plan.end.skip % block_size == 0).all()
        assert (plan.end.held >= plan.end.keep).all()
        assert (plan.end.held - plan.end.keep < block_size).all()
    else:
        assert (plan.end.held == plan.end.keep).all()
    for skip, blocks in zip(plan.end.skip.tolist(), plan.end.blocks.tolist(), strict=True):
        live = {position // block_size for position in range(skip, prompt_len)}
        assert blocks == len(live)
    assert plan.evicts == (policy.schedule.every > 0 or bool((plan.end.skip > 0).any()))


@settings(max_examples=300)
@given(st.data(), st.sampled_from(SOLVED))
def test_an_open_plan_is_settled_by_what_it_promised(data: st.DataObject, policy: Policy) -> None:
    prompt_len = data.draw(st.one_of(st.integers(0, 60), st.integers(0, 40_000)))
    num_layers = data.draw(st.integers(1, 12))
    block_size = data.draw(st.sampled_from([1, 8, 16]))
    plan = policy.plan(prompt_len, num_layers, block_size, data.draw(budgets(policy)))
    if isinstance(plan, RetentionPlan):  # nothing to solve: the whole prompt stays
        assert not plan.evicts and (plan.end.keep == prompt_len).all()
        return
    assert plan.evicts and plan.floor == policy.window + policy.sinks < prompt_len
    parts = policy.allocator, policy.heads
    assert plan.exact != any(getattr(part, "sets_total", False) for part in parts)
    assert 0 < plan.mean <= plan.capacity and (plan.mean < plan.capacity or not plan.exact)
    keep = [plan.budget_tokens] * num_layers
    for _ in range(10):  # shift tokens from layer to layer
        giver, taker = (data.draw(st.integers(0, num_layers - 1)) for _ in range(2))
        most = min(keep[giver] - plan.least, prompt_len - keep[taker])
        count = data.draw(st.integers(0, most)) if giver != taker else 0
        keep[giver] -= count
        keep[taker] += count
    assert max(keep) <= plan.most
    resolved = plan.resolve(keep)
    assert resolved.end.keep.tolist() == keep and resolved.budget_tokens == plan.budget_tokens
    assert (resolved.end.held == prompt_len - resolved.end.skip).all()
    if policy.fill_blocks:
        assert (resolved.end.skip % block_size == 0).all()
        assert (resolved.end.held - resolved.end.keep < block_size).all()
    else:
        assert (resolved.end.held == keep).all()
    if not plan.exact and min(keep) > plan.floor:
        less = plan.resolve([tokens - 1 for tokens in keep])
        assert less.budget_tokens == plan.budget_tokens - 1


@pytest.mark.parametrize(
    ("args", "keep", "message"),
    [
        ({}, [100, 100], "2 lengths for 3 layers"),
        ({}, [100, 193, 7], "lengths between 7 and 193; each layer keeps at least 8"),
        ({}, [101, 100, 100], "add up to 301"),
        ({}, [100, 100, 99], "add up to 299 tokens; the budget of 100 for 3 layers is 300"),
        ({"fill_blocks": False}, [8, 8, 1001], "at most the prompt's 1000"),
        ({"retention": 0.5}, [101, 100, 100], "is at most 300"),
    ],
)
def test_lengths_that_break_the_promise(args, keep, message) -> None:
    plan = load_policy("xkv", 100, args).plan(1000, 3, 16)
    assert isinstance(plan, DeferredPlan)
    with pytest.raises(ValueError, match=message):
        plan.resolve(keep)
    assert (
        load_policy("xkv", 100, {"retention": 0.5}).plan(1000, 3, 16).resolve([50, 40, 31]).evicts
    )


def test_a_retention_has_no_budget_of_its_own() -> None:
    """It replaces the preset's budget; one that the user gives with it is an upper limit."""
    assert str(load_policy("xkv", None, {"retention": 0.9}).budget) == "100%"
    assert str(load_policy("xkv", "25%", {"retention": 0.9}).budget) == "25%"
    assert str(load_policy("xkv").budget) == "12%"
    assert str(load_policy("xkv", None, {"kernel_size": 5}).budget) == "12%"
    limited = load_policy("xkv", 100, {"retention": 0.9}).plan(1000, 3, 16)
    assert isinstance(limited, DeferredPlan) and limited.budget_tokens == 100 and not limited.exact


def test_pyramidkv_by_hand() -> None:
    """8 layers, B = 512 - 8: top 504 / 20 = 25.2, bottom 1008 - 25.2 = 982.8, step 136.8."""
    plan = load_policy("pyramidkv", 512).plan(8192, 8, 16)
    assert plan.end.keep.tolist() == [991, 854, 717, 580, 444, 307, 170, 33]
    assert plan.end.skip.tolist() == [7200, 7328, 7472, 7600, 7744, 7872, 8016, 8144]
    assert plan.end.held.tolist() == [992, 864, 720, 592, 448, 320, 176, 48]
    assert plan.end.blocks.tolist() == [62, 54, 45, 37, 28, 20, 11, 3]


CHANGED = [
    load_policy("pyramidkv", "12.5%", {"beta": 14, "values": "host", "top_n": 7}),
    load_policy("pyramidkv", 600, {"allocator": {"kind": "shares", "shares": [1, 0.1, 1 / 3]}}),
    load_policy("xkv", None, {"sample_share": 0.1, "sinks": 4}),
    load_policy("pyramidinfer", "50%", {"schedule": "thin_generated", "decay_ratio": 1 / 3}),
]


@pytest.mark.parametrize("policy", [*PRESETS.values(), *CHANGED], ids=lambda p: p.name)
def test_a_policy_travels_as_data(policy: Policy) -> None:
    """To the engine core and the workers, in `additional_config`, where only JSON survives."""
    data = policy.as_data()
    assert data == json.loads(json.dumps(data))
    for again in (Policy.model_validate(data), Policy.model_validate(json.loads(json.dumps(data)))):
        assert again == policy and hash(again) == hash(policy)
        assert [type(part) for part in again.parts] == [type(part) for part in policy.parts]
        assert again.as_data() == data


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "from vllm_pyramid.policy import load_policy; print(hash(load_policy('pyramidkv', 512)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) == hash(load_policy("pyramidkv", 512))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, vllm_pyramid.policy, vllm_pyramid.frontend.settings, vllm_pyramid.tools.cli;"
        "vllm_pyramid.policy.load_presets();"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
