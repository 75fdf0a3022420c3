# SPDX-License-Identifier: Apache-2.0
"""KV heads that keep the least that recovers enough of their scores, against an oracle."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.methods.lanes import G, L, N, Prompts, are_best
from vllm_pyramid.methods.adaptive_heads.lengths import least_count
from vllm_pyramid.methods.recovering_heads import lowered
from vllm_pyramid.plan import Budget, DeferredPlan, RetentionPlan
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.step.scorer_inputs import ScorerInputs

pytestmark = pytest.mark.cpu

SINKS, WINDOW = 2, 3
SHARES = [0.0, 0.25, 0.5, 1.0]


class Peaked(Scorer):
    """The fourth power of the sum of a key's numbers, which heads hold in few tokens or in many."""

    in_parts: ClassVar[bool] = True
    not_negative: ClassVar[bool] = True
    kind: str = f"{__name__}:Peaked"

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        return inputs.keys.sum(dim=-1) ** 4


def recovering(budget: str | int | None = None, **args: Any) -> Policy:
    own = {"scorer": Peaked.model_fields["kind"].default, "sinks": SINKS, "window": WINDOW}
    return load_policy("fastgen", budget, {**own, "shares": SHARES, **args})


def wanted(scores: torch.Tensor, counts: list[int], goal: float, sinks: int) -> list[int]:
    """The least counts, by sums in float64 one head and count at a time."""
    found = []
    for head in scores.double():
        order = sinks + head[sinks:].argsort(descending=True, stable=True)
        total = float(head.sum())
        for count in counts:
            held = float(head[:sinks].sum()) + float(head[order[:count]].sum())
            if not total or held >= goal * total - 1e-9 * total or count == counts[-1]:
                found.append(count)
                break
    return found


@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.floats(0.01, 1.0))
def test_the_least_counts(seed: int, sinks: int, goal: float) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(4, 40, generator=random) ** torch.tensor([[1], [2], [8], [1]])
    scores[3] = 0.0
    counts = [0, 3, 11, 40 - sinks]
    found = least_count(scores, counts, goal, sinks=sinks).tolist()
    assert found == wanted(scores, counts, goal, sinks)
    assert found[3] == 0, "nothing holds all of nothing"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.data())
def test_the_longest_are_lowered_to_one_level(lengths: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(lengths)))
    expected = list(lengths)
    while sum(expected) > total:  # a token at a time; what a level leaves stays with the first
        last = len(expected) - 1 - expected[::-1].index(max(expected))
        expected[last] -= 1
    assert lowered(np.array(lengths), total).tolist() == expected


@pytest.mark.parametrize("budget", ["100%", "40%", 45])
@pytest.mark.parametrize("recovery", [0.3, 0.9, 1.0])
def test_lengths_and_caches(budget: str | int, recovery: float) -> None:
    policy = recovering(budget, recovery=recovery, fill_blocks=False)
    prompts = Prompts(policy, [90, 41, 63])
    assert prompts.evictions.deferred.tolist() == [0, 1, 2]
    prompts.run()
    assert not prompts.evictions.failures.of
    kinds = set()
    for row, n in enumerate(prompts.lens):
        mean = policy.budget.tokens_for(n, policy.min_budget)
        capacity = n - SINKS - WINDOW
        counts = [math.ceil(share * capacity) for share in SHARES]
        for layer in range(L):
            tokens = prompts.rows[layer][row]
            scores = (tokens[0].sum(dim=-1) ** 4)[:, : n - WINDOW]
            asked = wanted(scores, counts, recovery, SINKS)
            kinds |= set(asked)
            limit = (mean - SINKS - WINDOW) * G
            lengths = lowered(np.array(asked), min(sum(asked), limit))
            assert (prompts.keep(row)[layer] - SINKS - WINDOW).tolist() == lengths.tolist()
            for head, count in enumerate(lengths.tolist()):
                stays = torch.ones(n, dtype=torch.bool)
                stays[SINKS : n - WINDOW] = are_best(scores[head : head + 1, SINKS:], count, 0)[0]
                assert torch.equal(prompts.held(row, layer, head), tokens[:, head][:, stays])
    assert len(kinds) > 1
    report, _ = prompts.tracker.end_step()
    assert [report[name].keep for name in prompts.names] == [
        tuple(prompts.keep(row).ravel().tolist()) for row in range(3)
    ]


def test_a_floor_raises_what_a_layer_keeps() -> None:
    policy = recovering(recovery=0.01, fill_blocks=False).model_copy(update={"min_tokens": 30})
    prompts = Prompts(policy, [90])
    prompts.run()
    assert prompts.keep(0).tolist() == [[30, 30]] * L
    plan = policy.plan(30, L * G, N)
    assert isinstance(plan, RetentionPlan) and not plan.evicts


def test_the_budget_is_a_limit_of_the_plan() -> None:
    plan = recovering().plan(1000, 4, N)
    assert isinstance(plan, DeferredPlan) and not plan.exact
    assert (plan.least, plan.most, plan.budget_tokens) == (SINKS + WINDOW, 1000, 1000)
    plan = recovering().plan(1000, 4, N, Budget.parse("20%"))
    assert isinstance(plan, DeferredPlan)
    assert plan.resolve([5, 5, 5, 785]).budget_tokens == 200
    with pytest.raises(ValueError, match="at most 800"):
        plan.resolve([5, 5, 5, 786])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"scorer": "expected_attention"}, "does not say what sinks are worth"),
        ({"scorer": "keydiff"}, "'keydiff' may be negative"),
        ({"shares": [0.0, 0.5]}, "must increase from 0 or more to 1"),
        ({"selector.recent": 0.5}, "has recovering heads, whose lengths are solved once"),
    ],
)
def test_policies_that_cannot_have_recovering_heads(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recovering(**args)


def test_a_head_whose_scores_are_those_of_sinks_keeps_nothing_else() -> None:
    prompts = Prompts(recovering(recovery=0.95, fill_blocks=False), [90])
    prompts.caches[1][0, prompts.tables[0].long()] = 0.0
    prompts.caches[1][0, prompts.tables[0, 0].long(), 0, :SINKS] = 5.0
    prompts.run()
    assert prompts.keep(0)[1, 0] == SINKS + WINDOW < prompts.keep(0)[1, 1]
