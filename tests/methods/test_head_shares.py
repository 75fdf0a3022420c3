# SPDX-License-Identifier: Apache-2.0
"""Shares of KV heads: HeadKV's lengths, equal ones, files of scores, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.methods.head_shares import HeadShares
from vllm_pyramid.plan import EvictionPoint, RetentionPlan
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.request import check_request
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.selectors import Selector
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.tools.heads.scores import HeadScores

pytestmark = pytest.mark.cpu

SCORES = [[0.5, 0.125], [0.0, 1.0], [0.25, 0.25]]
WINDOW = 8


def sharing(budget: str | int | None = None, **args: Any) -> Policy:
    return load_policy("headkv", budget, args)


def end_of(policy: Policy, prompt_len: int, lanes: int, block_size: int = 32) -> EvictionPoint:
    plan = policy.plan(prompt_len, lanes, block_size)
    assert isinstance(plan, RetentionPlan)
    return plan.end


def head_kv(scores: npt.NDArray[np.float64], budget: int, beta: float) -> npt.NDArray[np.float64]:
    """`ReasonSnapKVCluster` of HeadKV's code, without its rounding: tokens of each head."""
    base = budget - WINDOW
    share = scores / scores.sum()
    return share * (base / beta) * scores.size + (base - base / beta) + WINDOW


class AcrossHeads(Scorer):
    """Gives all KV heads of a layer the same scores, and does not say `in_parts`."""

    kind: str = f"{__name__}:AcrossHeads"

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        mean = inputs.keys.norm(dim=-1).mean(dim=0)
        return mean.expand(inputs.num_kv_heads, -1)


class Worst(Selector):
    """Keeps what has the lowest scores."""

    kind: str = f"{__name__}:Worst"

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        return scores.argsort(dim=-1)[:, :keep]


# Lengths ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(20, 400), st.sampled_from([1.0, 1.005, 1.2, 2, 10.0]))
def test_lengths_are_those_of_head_kv(seed: int, budget: int, beta: float) -> None:
    """Where no head's share is longer than the prompt, which their code does not divide again."""
    scores = np.random.default_rng(seed).random((4, 3))
    end = end_of(sharing(budget, scores=scores.tolist(), beta=beta), 6000, 12)
    expected = head_kv(scores, budget, beta).ravel()
    assert (np.abs(end.keep - expected) < 1).all()
    assert end.keep.sum() == 12 * budget and end.budget_tokens == budget
    assert (end.recent == WINDOW).all() and (end.front == 0).all()


def test_a_head_keeps_no_more_than_the_prompt_and_the_others_get_the_rest() -> None:
    end = end_of(sharing(300, scores=SCORES, beta=1), 600, 6)
    assert end.keep.max() == 600 and end.keep.sum() == 6 * 300
    assert end.keep[2] == WINDOW, "a head of importance 0 gives all it has to the pool"
    # 292 * 6 tokens in proportion to the scores; the fourth head has room for 592 of them.
    others = np.array([4, 1, 0, 2, 2]) / 9 * (292 * 6 - 592)
    assert (np.abs(end.keep[[0, 1, 2, 4, 5]] - WINDOW - others) < 1).all()


@pytest.mark.parametrize("fill_blocks", [True, False])
def test_equal_scores_are_equal_lengths(fill_blocks: bool) -> None:
    policy = sharing("20%", scores=[[0.3] * 4] * 2, fill_blocks=fill_blocks)
    alike = sharing("20%", heads="alike", fill_blocks=fill_blocks)
    for prompt_len in (1, 40, 41, 999, 1000):
        ours, theirs = end_of(policy, prompt_len, 8), end_of(alike, prompt_len, 2)
        for name in ("keep", "skip", "front", "recent"):
            values = getattr(theirs, name)
            assert getattr(ours, name).tolist() == np.repeat(values, 4).tolist()
    assert end_of(sharing("20%"), 1000, 8).keep.tolist() == [200] * 8  # no scores: for planning


def test_budgets_of_requests_and_floors() -> None:
    policy = sharing("10%", scores=SCORES)
    assert policy.has_budget and policy.evicts
    served = check_request(policy, SamplingParams(extra_args={"kv_budget": "30%"}))
    plan = served.plan(1000, 6, 32)
    assert isinstance(plan, RetentionPlan) and plan.end.keep.sum() == 6 * 300
    floored = KVSettings("headkv", kv_min_tokens=250, kv_policy_args={"scores": SCORES}).policy()
    assert floored is not None and end_of(floored, 1000, 6).keep.sum() == 6 * 250
    assert (end_of(floored, 250, 6).skip == 0).all()


@pytest.mark.parametrize("fill_blocks", [True, False])
def test_a_lane_of_several_ranks_is_as_long_as_its_longest_head(
    fill_blocks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = sharing("20%", scores=SCORES, fill_blocks=fill_blocks)
    with caplog.at_level("INFO", "vllm.vllm_pyramid"):
        heads = policy.heads.on_ranks(policy, 2, 2)
    # The greater of two scores are 0.5, 1 and 0.25, in place of means of 0.354.
    assert f"{1 + (1.75 / 3 / (2.125 / 6) - 1) / 1.2:.2f} times the budget" in caplog.text
    on_two = policy.model_copy(update={"heads": heads.model_dump()})
    for prompt_len in (1, 9, 40, 1000, 4001):
        own = end_of(policy, prompt_len, 6).keep.reshape(3, 2)
        end = end_of(on_two, prompt_len, 3, block_size=16)
        assert end.keep.tolist() == own.max(axis=1).tolist()
        assert (end.recent == WINDOW).all()
        skip = prompt_len - end.keep
        assert end.skip.tolist() == (skip // 16 * 16 if fill_blocks else skip).tolist()
        assert end.budget_tokens == -(-int(end.keep.sum()) // 3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("prompt_len", [100, 250, 1000])
def test_points_inside_the_prompt_divide_their_own_budget(ranks: int, prompt_len: int) -> None:
    """As the prompt's end does; a head that keeps more at a later point keeps it before, too."""
    args = {"chunk.tokens": 200, "chunk.keep": 150, "scores": SCORES, "beta": 2}
    policy = sharing("10%", **args)
    heads = policy.heads.on_ranks(policy, ranks, 2)
    on_ranks = policy.model_copy(update={"heads": heads.model_dump()})
    plan = on_ranks.plan(prompt_len, 6 // ranks, 16)
    dense = sharing("10%", scores=SCORES, beta=2)
    assert isinstance(plan, RetentionPlan)
    longest = end_of(dense, prompt_len, 6, 16).keep.reshape(3, ranks, -1).max(axis=1).ravel()
    assert plan.end.keep.tolist() == longest.tolist()
    assert [point.computed for point in plan.inner] == list(range(200, prompt_len - WINDOW, 200))
    later = plan.end.skip
    for point in reversed(plan.inner):
        own = sharing(150, scores=SCORES, beta=2, fill_blocks=True)
        keep = end_of(own, point.computed, 6, 16).keep.reshape(3, ranks, -1).max(axis=1).ravel()
        assert (point.skip == np.minimum((point.computed - keep) // 16 * 16, later)).all()
        later = point.skip
    assert policy.inner_policy is not None
    assert policy.inner_policy.heads == policy.heads
    assert policy.inner_policy.scorer.kind == "keydiff"


def test_points_at_which_no_rank_gives_anything_back_are_left_out() -> None:
    """One head of each layer has the whole budget; on two ranks it shares a lane with the other."""
    args = {"chunk.tokens": 200, "chunk.keep": 150, "scores": [[1.0, 0.0]] * 3, "beta": 1}
    policy = sharing("10%", **args)
    alone = policy.plan(1000, 6, 16)
    heads = policy.heads.on_ranks(policy, 2, 2)
    on_ranks = policy.model_copy(update={"heads": heads.model_dump()}).plan(1000, 3, 16)
    assert isinstance(alone, RetentionPlan) and isinstance(on_ranks, RetentionPlan)
    assert [point.computed for point in alone.inner] == [200, 400, 600, 800]
    assert [point.computed for point in on_ranks.inner] == [400, 600, 800]
    assert all(point.skip.any() for point in on_ranks.points)


# Scores -------------------------------------------------------------------------------------------


def test_files_travel_as_numbers_and_query_heads_have_a_mean(tmp_path: Path) -> None:
    HeadScores(torch.tensor(SCORES, dtype=torch.float64), 4, 12).write(tmp_path / "folder", {})
    twice = np.repeat(SCORES, 2, axis=1) + np.array([0.0, 1.0] * 2)
    names = {f"{x}-{y}": [z] for (x, y), z in np.ndenumerate(twice)}
    (tmp_path / "heads.json").write_text(json.dumps(names))
    found = []
    for name, moved in (("folder", 0.0), ("heads.json", 0.5)):
        policy = sharing(100, scores=str(tmp_path / name), beta=2)
        same = sharing(100, scores=(np.array(SCORES) + moved).tolist(), beta=2)
        assert end_of(policy, 999, 6).keep.tolist() == end_of(same, 999, 6).keep.tolist()
        assert Policy.model_validate(json.loads(json.dumps(policy.as_data()))) == policy
        found.append(policy)
    for policy in found:
        policy.heads.check_shape(3, 2, 4)
        with pytest.raises(ValueError, match=r"is for 3 layers of [24] heads"):
            policy.heads.check_shape(4, 2, 4)
    with pytest.raises(ValueError, match="and there are 8 KV heads: take that of this model"):
        found[0].plan(100, 8, 16)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"scorer": "tova"}, "'tova' looks at all KV heads of a layer together"),
        ({"scorer": "accumulated_attention"}, "gathers numbers in every step"),
        ({"scorer": "none"}, "ranks nothing"),
        ({"scorer": f"{__name__}:AcrossHeads"}, "does not say that it looks at each KV head"),
        ({"selector": f"{__name__}:Worst"}, "go with selector 'top_k' alone"),
        ({"allocator": "arithmetic"}, "go with allocator 'uniform' alone"),
        ({"scorer": "recency", "schedule": "interval"}, "go with schedule 'prompt_end' alone"),
        ({"values": "host"}, "go with values 'device' alone"),
        ({"attend": "pages"}, "go with attend 'all' alone"),
        ({"chunk.tokens": 64, "chunk.scorer": "tova"}, "'tova' looks at all KV heads of a layer"),
        ({"beta": 0.9}, "greater than or equal to 1"),
        ({"scores": [[1.0], [0.5, 0.5]]}, "equally many numbers for each layer"),
        ({"scores": [[1.0], [-0.5]]}, "at least 0, and not all 0"),
        ({"scores": [[0.0], [0.0]]}, "at least 0, and not all 0"),
        ({"scores": "/nowhere.json"}, "cannot read the scores of heads in /nowhere"),
    ],
)
def test_policies_that_cannot_have_shares_of_heads(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy("headkv", None, args)


@pytest.mark.parametrize(
    "scorer", ["observation_window", "expected_attention", "keydiff", "knorm", "output_change"]
)
def test_scorers_that_look_at_each_head_by_itself(scorer: str) -> None:
    policy = sharing(scorer=scorer, scores=SCORES)
    assert isinstance(policy.heads, HeadShares)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_keep": [0, 4]}, "kv_keep does not go with policy 'headkv'"),
        ({"kv_turns": [10]}, "each KV head has a length of its own are not saved"),
    ],
)
def test_requests_that_want_what_heads_cannot_give(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(sharing(scores=SCORES), SamplingParams(extra_args=extra))


def test_a_server_needs_scores() -> None:
    unknown, args = sharing(), cast(EngineArgs, SimpleNamespace())
    with pytest.raises(ValueError, match="does not know how important the heads are"):
        unknown.heads.prepare_args(unknown, args)
    known = sharing(scores=SCORES)
    known.heads.prepare_args(known, args)
    with pytest.raises(ValueError, match="every layer has full attention"):
        unknown.check_hybrid()
