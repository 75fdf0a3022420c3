# SPDX-License-Identifier: Apache-2.0
"""Mean attention tells heads that look near from heads that look far."""

from __future__ import annotations

import math

import pytest
import torch

from lab.heads.probe import mean_attention
from vllm_pyramid.step.rotary import Rotary

pytestmark = pytest.mark.cpu

SIZE = 64


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
