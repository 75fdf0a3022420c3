# SPDX-License-Identifier: Apache-2.0
"""The probes find heads that were planted in a toy model."""

from __future__ import annotations

import math

import pytest
import torch

from lab.heads.probe import Repeated, mean_attention, of_kv_heads, retrieval_heads
from vllm_pyramid.step.rotary import Rotary

pytestmark = pytest.mark.cpu

SIZE = 64
PROBE = Repeated(period=32, copies=3)
# Planted: what a layer's four KV heads look for, each with two query heads.
ECHO, INDUCTION, RECENT, NOTHING = range(4)


def layer(source: torch.Generator, sharp: float = 60.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries `[T, 8, D]` and keys `[4, T, D]`: the second query head of a pair is dull."""
    ids = torch.tensor(PROBE.tokens(range(1000)))
    table = torch.nn.functional.normalize(torch.randn(1000, SIZE, generator=source), dim=-1)
    mine = table[ids]
    before = torch.cat([table[:1], mine[:-1]])
    angle = torch.arange(len(ids)) / 20
    clock = torch.zeros(len(ids), SIZE)
    clock[:, 0], clock[:, 1] = angle.cos(), angle.sin()
    noise = torch.randn(len(ids), SIZE, generator=source) * 0.01
    keys = torch.stack([mine, before, clock, noise])
    sharpness = torch.tensor([sharp, 0.0]).view(1, 2, 1)
    asked = torch.stack([mine, mine, clock, noise], dim=1)  # [T, 4, D]
    queries = (asked[:, :, None] * sharpness).flatten(1, 2)
    return queries, keys


def test_a_copy_holds_each_token_once_and_the_copies_are_equal() -> None:
    tokens = PROBE.tokens(range(100, 200), seed=3)
    assert len(tokens) == 96 and tokens[:32] == tokens[32:64] == tokens[64:]
    assert len(set(tokens[:32])) == 32 and min(tokens) >= 100 and max(tokens) < 200
    assert tokens != PROBE.tokens(range(100, 200), seed=4)


def test_planted_heads_are_found() -> None:
    queries, keys = layer(torch.Generator().manual_seed(0))
    echo, induction = PROBE.echo_and_induction(queries, keys, scale=1.0)
    assert echo.shape == induction.shape == (8,)
    found_echo, found_induction = of_kv_heads(echo, 4), of_kv_heads(induction, 4)
    # An echo head finds its own token too: at most two of three equal keys are earlier ones.
    assert found_echo[ECHO] > 0.5 and found_echo[[INDUCTION, RECENT, NOTHING]].max() < 0.1
    assert found_induction[INDUCTION] > 0.9
    assert found_induction[[ECHO, RECENT, NOTHING]].max() < 0.1
    mask = retrieval_heads(torch.maximum(found_echo, found_induction)[None], 2)
    assert mask.tolist() == [[True, True, False, False]]


def test_an_even_head_has_the_share_of_the_places() -> None:
    queries, keys = layer(torch.Generator().manual_seed(0), sharp=0.0)
    echo, induction = PROBE.echo_and_induction(queries[-1:], keys, scale=1.0)
    torch.testing.assert_close(echo, torch.full((8,), 2 / 96))  # two earlier copies of 96 keys
    torch.testing.assert_close(induction, torch.full((8,), 2 / 96))


def test_the_last_queries_alone_give_the_mean_over_them() -> None:
    queries, keys = layer(torch.Generator().manual_seed(1), sharp=3.0)
    whole = PROBE.echo_and_induction(queries, keys, scale=1.0)
    each = [PROBE.echo_and_induction(queries[n:], keys, 1.0) for n in (32, 64)]
    for kind in range(2):
        # The first copy has nothing to look back at, and does not count.
        torch.testing.assert_close(whole[kind], each[0][kind])
        assert not torch.allclose(whole[kind], each[1][kind], atol=1e-4)


def test_what_is_no_probe_is_refused() -> None:
    with pytest.raises(ValueError, match="1 copies of 8 tokens"):
        Repeated(8, 1)
    queries, keys = layer(torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="the probe has 96 tokens, and there are 95 keys"):
        PROBE.echo_and_induction(queries, keys[:, 1:], 1.0)
    with pytest.raises(ValueError, match="5 of 4 KV heads"):
        retrieval_heads(torch.zeros(1, 4), 5)


def rotary(positions: int) -> Rotary:
    rates = 100.0 ** -(torch.arange(SIZE // 2) / (SIZE // 2))
    angles = torch.arange(positions)[:, None] * rates
    return Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1))


def test_mean_attention_tells_near_from_far() -> None:
    turns, tokens = rotary(64), 40
    cos, sin = turns.at(torch.arange(tokens))
    plain = torch.ones(1, tokens, SIZE)
    keys = turns.turn(plain, cos, sin)
    near = plain[0]
    far = -near  # the product is greatest where the rotation has turned furthest
    both = torch.stack([near, far, torch.zeros_like(near)], dim=1)
    every = cos[:, None].expand(-1, 3, -1), sin[:, None].expand(-1, 3, -1)
    queries = turns.turn(both, *every)
    close, distant, even = mean_attention(queries, keys, turns, 1 / math.sqrt(SIZE), 50).tolist()
    assert close < 0.2 < even < distant
    # Weights of 1 / 50 at each place: their cumulative sums are 1/50 ... 1.
    assert even == pytest.approx(51 / 100)


def test_mean_attention_is_a_plain_sum() -> None:
    turns, tokens, length = rotary(64), 7, 5
    source = torch.Generator().manual_seed(2)
    plain_queries = torch.randn(tokens, 2, SIZE, generator=source)
    plain_keys = torch.randn(tokens, SIZE, generator=source)
    cos, sin = turns.at(torch.arange(tokens))
    queries = turns.turn(
        plain_queries, cos[:, None].expand(-1, 2, -1), sin[:, None].expand(-1, 2, -1)
    )
    keys = turns.turn(plain_keys, cos, sin)[None]
    found = mean_attention(queries, keys, turns, 0.3, length)
    cos, sin = turns.at(torch.arange(length))
    key = turns.turn(plain_keys.mean(0).expand(length, -1), cos, sin)
    for head in range(2):
        query = turns.turn(plain_queries[:, head].mean(0), cos[-1], sin[-1])
        weights = [math.exp(0.3 * float(query @ key[place])) for place in range(length)]
        shares = [weight / sum(weights) for weight in weights]
        area = sum(sum(shares[: place + 1]) for place in range(length)) / length
        assert float(found[head]) == pytest.approx(area, rel=1e-4)
