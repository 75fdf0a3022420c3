# SPDX-License-Identifier: Apache-2.0
"""Mean attention (kvpress's `duo_attention_on_the_fly`), a probe over texts.

How far back the mean query of a layer looks if every key is the mean key, so that position alone
decides.

Shape legend: T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import torch

from vllm_pyramid.step.rotary import Rotary

LENGTH = 500  # of kvpress's probe


def mean_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    rotary: Rotary,
    scale: float,
    length: int = LENGTH,
) -> torch.Tensor:
    """Return the area under each head's cumulative attention, `[H]` float32.

    Without rotary embedding the prompt's queries and keys are averaged; the mean query at the last
    of `length` positions attends to the mean key at each of them. 1 is attention to the first
    token, 0.5 to all alike, near 0 to the last ones.

    Args:
        queries: `[T, H, D]`. keys: `[G, T, D]`. rotary: what turned both, from position 0 on.
    """
    here = torch.arange(keys.shape[1])
    query = rotary.turn_back(queries.float(), here).mean(dim=0)
    key = rotary.turn_back(keys.float().transpose(0, 1), here).mean(dim=0)
    places = torch.arange(length)
    cos, sin = rotary.at(places)
    turned = rotary.turn(key[:, None].expand(-1, length, -1), cos, sin)
    last = rotary.turn(query, cos[-1:], sin[-1:]).unflatten(0, (len(keys), -1))
    weights = (torch.einsum("gqd,gtd->gqt", last, turned) * scale).softmax(dim=-1)
    return weights.cumsum(dim=-1).mean(dim=-1).flatten()
