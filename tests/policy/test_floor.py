# SPDX-License-Identifier: Apache-2.0
"""The floor of shares: short prompts are kept whole, and no share falls below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.methods.solved import SolvingAllocator
from vllm_pyramid.policy import DEFAULT_MIN_TOKENS, Policy, load_policy, policy_names
from vllm_pyramid.policy.request import check_request, resolve
from vllm_pyramid.policy.request_keys import RequestKeys

LAYERS, BLOCK = 6, 16
FLOOR = 200


def kept(policy: Policy, prompt_len: int, extra: dict[str, Any] | None = None) -> float:
    """Tokens kept a layer, on average; where they are solved, the least that it may be."""
    served = resolve(policy, RequestKeys.parse(extra))
    plan = served.policy.plan(prompt_len, LAYERS, BLOCK, served.budget)
    if plan.is_deferred:
        return plan.budget_tokens if plan.exact else plan.min_tokens
    return float(plan.end.keep.mean())


def served(name: str, budget: str | None = None, **settings: Any) -> Policy:
    """The policy as a server has it."""
    policy = KVSettings(name, budget, **settings).policy()
    assert policy is not None
    return policy


# Budgets of the others are numbers of generated tokens.
OF_PROMPTS = [name for name in policy_names() if not load_policy(name).schedule.keeps_prompts]


@pytest.mark.parametrize("name", OF_PROMPTS)
def test_no_share_of_any_policy_falls_below_it(name: str) -> None:
    evicts = load_policy(name).has_budget
    policy = served(name, "5%" if evicts else None, kv_min_tokens=FLOOR if evicts else None)
    for prompt_len in (1, 37, FLOOR - 1, FLOOR):
        plan = policy.plan(prompt_len, LAYERS, BLOCK)
        assert not plan.is_deferred and not plan.end.skip.any(), prompt_len
    if not policy.heads.has_budget:
        return  # lengths of heads, which no floor raises
    for prompt_len in (FLOOR + 1, 500, 3000, 20 * FLOOR, 9000):
        # Pieces between layers have lengths of their own; others are exact.
        thinned = policy.allocator.thins_prompts or not evicts
        share = -(-prompt_len // 20)
        wanted, found = max(FLOOR, share), kept(policy, prompt_len)
        assert found >= min(wanted, prompt_len) if thinned else found == wanted, prompt_len


def test_a_total_that_is_solved_keeps_it() -> None:
    policy = served("xkv", kv_policy_args={"retention": 0.5}, kv_min_tokens=FLOOR)
    plan = policy.plan(1000, LAYERS, BLOCK)
    assert (
        plan.is_deferred
        and plan.min_tokens == FLOOR
        and plan.min_mean == FLOOR - policy.min_budget + 1
    )
    assert not policy.plan(FLOOR, LAYERS, BLOCK).is_deferred
    scores = torch.rand(LAYERS, 1000, generator=torch.Generator().manual_seed(0)) ** 8
    fixed = policy.window + policy.sinks
    for retention, least in ((0.01, plan.min_mean), (0.01, 0), (0.9, plan.min_mean)):
        solver = policy.allocator.model_copy(update={"retention": retention})
        assert isinstance(solver, SolvingAllocator)
        lengths = solver.measures(scores, plan.mean, plan.capacity, 0, least)
        total = int(lengths.sum())
        assert total == least * LAYERS if retention == 0.01 and least else total > 0
        if total >= plan.min_mean * LAYERS:
            assert plan.resolve(fixed + lengths.numpy()).end.keep.sum() >= FLOOR * LAYERS
        else:
            with pytest.raises(ValueError, match=f"6 layers keep at least {FLOOR} each"):
                plan.resolve(fixed + lengths.numpy())


def test_it_is_on_by_default_where_a_policy_is_served() -> None:
    assert served("snapkv").min_tokens == DEFAULT_MIN_TOKENS > 0
    assert kept(served("snapkv"), 37) == 37
    assert kept(served("snapkv"), 1000) == DEFAULT_MIN_TOKENS
    assert kept(load_policy("snapkv"), 1000) == 120, "a policy alone has none"
    assert served("full").min_tokens is None


def test_a_preset_has_its_own(tmp_path: Any) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("budget: 10%\nwindow: 4\nscorer: observation_window\nmin_tokens: 50\n")
    assert served(str(file)).min_tokens == 50
    assert served(str(file), kv_min_tokens=60).min_tokens == 60
    assert served("snapkv", kv_policy_args={"min_tokens": 70}).min_tokens == 70


def test_a_budget_in_tokens_is_what_it_says() -> None:
    policy = served("snapkv", "64", kv_min_tokens=FLOOR)
    assert kept(policy, 100) == 64
    assert kept(policy, 1000, {"kv_budget": "5%"}) == FLOOR
    h2o = served("h2o", "64", kv_min_tokens=FLOOR)
    assert h2o.plan(100, LAYERS, BLOCK).after(2).keep.mean() == 64


def test_a_share_keeps_it_during_generation_too() -> None:
    plan = served("h2o", "10%", kv_min_tokens=FLOOR).plan(50, LAYERS, BLOCK)
    assert not plan.end.skip.any()
    later = [plan.after(number) for number in range(2, 20)]
    assert [int(p.keep.mean()) for p in later] == [min(p.computed, FLOOR) for p in later]
    assert later[-1].computed > FLOOR


def test_of_a_request() -> None:
    policy = served("snapkv", "10%", kv_min_tokens=FLOOR)
    assert kept(policy, 1000, {"kv_min_tokens": 0}) == 100
    assert kept(policy, 1000, {"kv_min_tokens": 300}) == 300
    assert kept(policy, 1000, {"kv_min_tokens": 0, "kv_budget": "5%"}) == 50
    assert resolve(policy, RequestKeys()).share_floor == FLOOR
    for extra, least in (({"kv_min_tokens": 7}, 7), ({"kv_budget": 64}, None)):
        assert resolve(policy, RequestKeys.parse(extra)).share_floor == least
    for wrong in (-1, 2**31, True, 1.5, "many", [3]):
        with pytest.raises(ValueError, match="kv_min_tokens of a request must be a number of tok"):
            RequestKeys.parse({"kv_min_tokens": wrong})
    with pytest.raises(ValueError, match="percentage budgets, and the budget is 64 tokens"):
        resolve(policy, RequestKeys.parse({"kv_budget": 64, "kv_min_tokens": 5}))
    params = SamplingParams(extra_args={"kv_policy": "full", "kv_min_tokens": 5})
    with pytest.raises(ValueError, match="kv_min_tokens has no effect on policy 'full'"):
        check_request(policy, params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_policy": "snapkv", "kv_min_tokens": -1}, "must be a number of tokens"),
        ({"kv_policy": "snapkv", "kv_min_tokens": True}, "not True"),
        ({"kv_policy": "snapkv", "kv_min_tokens": "12%"}, "not '12%'"),
        ({"kv_policy": "kcache", "kv_min_tokens": 5}, "'kcache' keeps every token"),
        ({"kv_min_tokens": 5}, "kv_min_tokens without a kv_policy"),
        ({"kv_policy": "snapkv", "kv_mintokens": 5}, "did you mean 'kv_min_tokens'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVSettings.from_additional_config(settings)
