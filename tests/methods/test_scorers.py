# SPDX-License-Identifier: Apache-2.0
"""The scorers against their papers' formulas, written with loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.methods.views import MadeUp, ready
from tests.steps import OneRank
from vllm_pyramid.methods import random_scores
from vllm_pyramid.methods.accumulated import AccumulatingScorer
from vllm_pyramid.methods.random_scores import uniform
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.kinds import built_in_kinds, parse_component
from vllm_pyramid.policy.scorer import Scorer

WINDOW, SINKS = 8, 2
Oracle = Callable[[MadeUp, int, int], float]


def weights(data: MadeUp, head: int, query: int) -> torch.Tensor:
    """The softmax of one query of a query head over the keys that it sees: `[query + 1]`."""
    keys = data.keys[head * data.kv_heads // data.heads, : query + 1].double()
    return softmax(data, head, keys @ data.queries[query, head].double() / math.sqrt(data.size))


def softmax(data: MadeUp, head: int, logits: torch.Tensor, tau: float = 1.0) -> torch.Tensor:
    """Of a query head's logits; a learned sink takes its part."""
    sums = (logits / tau).exp().sum()
    if data.logit_sinks is not None:
        sums = sums + (data.logit_sinks[head].double() / tau).exp()
    return (logits / tau).exp() / sums


def group(data: MadeUp, head: int) -> range:
    """The query heads of a KV head."""
    count = data.heads // data.kv_heads
    return range(head * count, (head + 1) * count)


def keydiff(data: MadeUp, head: int, token: int) -> float:
    unit = [k / k.norm() for k in data.keys[head].double()]
    mean = sum(unit, torch.zeros(data.size, dtype=torch.float64)) / data.tokens
    return -float(unit[token] @ mean / mean.norm())


def value_aware(data: MadeUp, head: int, token: int) -> float:
    total = 0.0
    for query in range(max(token, data.tokens - WINDOW), data.tokens):
        total += sum(float(weights(data, h, query)[token]) for h in group(data, head))
    mean = total / WINDOW / len(group(data, head))
    return mean * float(data.values[head, token].double().abs().sum())


def _turned(data: MadeUp, x: torch.Tensor, count: int) -> torch.Tensor:
    """`x`, `[D]` without rotary embedding, at the next `count` positions on average."""
    half, total = data.size // 2, torch.zeros(data.size, dtype=torch.float64)
    for position in range(data.tokens, data.tokens + count):
        for i in range(half):
            angle = position * 1e4 ** (-2 * i / data.size)
            a, b = float(x[i]), float(x[i + half])
            total[i] += a * math.cos(angle) - b * math.sin(angle)
            total[i + half] += b * math.cos(angle) + a * math.sin(angle)
    return total / count


def _mean_query(data: MadeUp, head: int, count: int) -> torch.Tensor:
    return _turned(data, data.plain[-WINDOW:, head].double().mean(dim=0), count)


def expected_attention(data: MadeUp, head: int, token: int, epsilon: float = 0.01) -> float:
    total = 0.0
    for h in group(data, head):
        queries = data.plain[-WINDOW:, h].double()
        spread = [_turned(data, q - queries.mean(dim=0), 16) for q in queries]
        covariance = sum((torch.outer(s, s) for s in spread), torch.zeros(1)) / WINDOW
        mean = _mean_query(data, h, 16)
        logits = [
            float(k @ mean / math.sqrt(data.size) + k @ covariance @ k / (2 * data.size))
            for k in data.keys[head, SINKS:].double()
        ]
        total += float(softmax(data, h, torch.tensor(logits, dtype=torch.float64))[token - SINKS])
    norm = float(data.values[head, token].double().norm())
    return (total / len(group(data, head)) + epsilon) * norm


@cache
def _shares(
    data_seed: int, tokens: int, learned_sinks: bool, head: int
) -> tuple[list[float], list[float]]:
    """Of `observed_expected`: both parts of the tokens between sinks and window."""
    data = MadeUp(seed=data_seed, tokens=tokens, learned_sinks=learned_sinks)
    inside = range(SINKS, tokens - WINDOW)
    weighed = [value_aware(data, head, token) for token in range(tokens - WINDOW)]
    pooled = [sum(weighed[max(t - 2, 0) : t + 3]) / 5 for t in inside]
    expected = [expected_attention(data, head, t, epsilon=0.0) for t in inside]
    return [x / sum(pooled) for x in pooled], [x / sum(expected) for x in expected]


def observed_expected(data: MadeUp, head: int, token: int) -> float:
    observed, expected = _shares(data.seed, data.tokens, data.learned_sinks, head)
    return observed[token - SINKS] + 2.0 * expected[token - SINKS]


def future_attention(data: MadeUp, head: int, token: int) -> float:
    total = 0.0
    for h in group(data, head):
        for number in range(4):
            plain, turned = data.plain[data.tokens - 4 + number, h].double(), []
            for i in range(data.size):
                pair, half = i % (data.size // 2), data.size // 2
                angle = (data.tokens + number) * 1e4 ** (-2 * pair / data.size)
                other = -plain[i + half] if i < half else plain[i - half]
                turned.append(float(plain[i]) * math.cos(angle) + float(other) * math.sin(angle))
            query = torch.tensor(turned, dtype=torch.float64)
            logits = data.keys[head].double() @ query / math.sqrt(data.size)
            total += float(softmax(data, h, logits)[token])
    return total / 4 / len(group(data, head))


ORACLES: dict[str, tuple[dict[str, object], Oracle]] = {
    "keydiff": ({}, keydiff),
    "expected_attention": ({"future_positions": 16, "epsilon": 0.01}, expected_attention),
    "observed_expected": (
        {"queries": WINDOW, "kernel_size": 5, "expected": 2.0, "future_positions": 16},
        observed_expected,
    ),
    "future_attention": ({"queries": 4}, future_attention),
}


@pytest.mark.long
@pytest.mark.parametrize("learned_sinks", [False, True])
@pytest.mark.parametrize("kind", list(ORACLES))
def test_scores_are_the_papers(kind: str, learned_sinks: bool) -> None:
    settings, oracle = ORACLES[kind]
    data = MadeUp(tokens=41, learned_sinks=learned_sinks)
    scorer = parse_component(Scorer, {"kind": kind, **settings})
    scores = scorer.score(data.view(WINDOW, SINKS))
    assert scores.shape == (data.kv_heads, data.tokens) and scores.dtype == torch.float32
    for head in range(data.kv_heads):
        for token in range(SINKS, data.tokens - WINDOW):
            wanted = oracle(data, head, token)
            assert float(scores[head, token]) == pytest.approx(wanted, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("kind", ["expected_attention", "observed_expected"])
def test_only_the_last_queries_count(kind: str) -> None:
    """A longer window keeps more tokens; the scores of the others are of as many queries."""
    alone = {"expected": 0.0} if kind == "observed_expected" else {}  # one part, so one ratio
    scorer = parse_component(Scorer, {"kind": kind, "queries": WINDOW, **alone})
    data = MadeUp(tokens=60)
    before = slice(SINKS, data.tokens - 3 * WINDOW - 10)
    short, long = (
        scorer.score(data.view(window, SINKS))[:, before] for window in (WINDOW, 3 * WINDOW)
    )
    ratio = long / short  # what the first is a share of is less
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="looks at 9 queries, which the window of 8"):
        load_policy("snapkv", None, {"window": 8, "scorer": {"kind": kind, "queries": 9}})


@pytest.mark.parametrize("learned_sinks", [False, True])
def test_keyformer_adds_up_noisy_attention_however_a_prompt_is_cut(learned_sinks: bool) -> None:
    data = MadeUp(tokens=30, learned_sinks=learned_sinks)
    scorer = parse_component(
        Scorer, {"kind": "keyformer", "tau_start": 1.0, "tau_end": 3.0, "generated": 4}
    )
    assert isinstance(scorer, AccumulatingScorer)
    view = data.view(0, 0, queries=data.tokens)
    view.prompt_len = 28  # the last two queries are of generated tokens
    given = scorer.observe(view)
    for head in range(data.kv_heads):
        total = torch.zeros(data.tokens, dtype=torch.float64)
        for h in group(data, head):
            for query in range(data.tokens):
                tau = 1.0 + 2.0 * max(0, query - 28 + 1) / 4
                place = torch.arange(query + 1)
                even = uniform(0, torch.tensor(h + 3 * 2**16), torch.tensor(query), place)
                gumbel = -(-even.double().log()).log()
                keys = data.keys[head, : query + 1].double()
                logits = keys @ data.queries[query, h].double() / math.sqrt(data.size)
                total[: query + 1] += softmax(data, h, logits + gumbel, tau)
        torch.testing.assert_close(given[head].double(), total, rtol=2e-5, atol=1e-7)


def test_noise_is_even_and_the_same_whatever_else_is_asked_for() -> None:
    rows, columns = torch.arange(64)[:, None], torch.arange(4096)
    found = uniform(7, rows, columns)
    assert found.min() > 0 and found.max() < 1
    torch.testing.assert_close(found.mean(), torch.tensor(0.5), atol=2e-3, rtol=0)
    torch.testing.assert_close(found.var(), torch.tensor(1 / 12), atol=1e-3, rtol=0)
    correlation = torch.corrcoef(found)[~torch.eye(64, dtype=torch.bool)]
    assert correlation.abs().max() < 0.08
    assert torch.equal(found[5, :100], uniform(7, torch.tensor(5), torch.arange(100)))
    assert not torch.equal(found[5], uniform(8, torch.tensor(5), columns))


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_noise_reaches_neither_0_nor_1(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_scores, "_mixed", lambda x: torch.full_like(x, word))
    found = uniform(0, torch.arange(2))
    assert (found > 0).all() and (found < 1).all()


def test_random_differs_between_heads_and_layers_and_not_between_runs() -> None:
    scorer = parse_component(Scorer, "random")
    view, longer = MadeUp(tokens=40).view(), MadeUp(tokens=60, seed=4).view()
    assert torch.equal(scorer.score(view), scorer.score(longer)[:, :40])
    assert not torch.equal(scorer.score(view)[0], scorer.score(view)[1])
    longer.layer = 4
    assert not torch.equal(scorer.score(view), scorer.score(longer)[:, :40])


class TwoRanks(OneRank):
    """Rank 0 of two that have the same heads."""

    size = 2

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values


def test_a_mean_over_all_heads_goes_over_all_ranks() -> None:
    view = MadeUp().view(1)
    attention = view.attention(1)[:, 0]
    alone = view.mean_of_heads(attention)
    torch.testing.assert_close(alone, attention.mean(dim=0))
    view.ranks = TwoRanks()
    torch.testing.assert_close(view.mean_of_heads(attention), alone)


SCORING = [
    kind
    for kind, cls in built_in_kinds(Scorer).items()
    # Recency scores places; presses have tests of their own.
    if cls.score is not Scorer.score and kind not in ("recency", "kvpress")
]


@pytest.mark.parametrize("kind", SCORING)
def test_dead_tokens_and_the_order_of_pages_change_nothing(kind: str) -> None:
    data = MadeUp()
    scorer = ready(parse_component(Scorer, kind), data.heads, data.size)
    plain, moved = data.view(4 * WINDOW, SINKS), data.view(4 * WINDOW, SINKS, start=5)
    torch.testing.assert_close(scorer.score(plain), scorer.score(moved))


@pytest.mark.parametrize("halves", [True, False])
def test_rotations_are_undone(halves: bool) -> None:
    from tests.methods.views import cos_sin
    from vllm_pyramid.step.rotary import Rotary

    rotary = Rotary(1.3 * cos_sin(8, 64), halves)  # scaled as YaRN does, 8 of 12 channels
    x = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 3, 9, 30, 63])
    cos, sin = rotary.at(positions)
    turned = rotary.turn(x, cos[:, None], sin[:, None])
    assert not torch.allclose(turned, x)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(rotary.turn_back(turned, positions), x)
    one = rotary.mean_turn(x[0], torch.tensor([9]))
    torch.testing.assert_close(one, rotary.turn(x[0], *rotary.at(torch.tensor(9))))
