# SPDX-License-Identifier: Apache-2.0
"""A Transformers model some of whose KV heads stream: they see the first and the recent tokens.

At each position of the prompt, as in DuoAttention.

Shape legend: L layers, T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lab.heads.probes import LENGTH, mean_attention
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.tools.heads.model import HeadModel, whole_attention
from vllm_pyramid.tools.heads.scores import HeadScores

_CHUNK = 1024  # queries of streaming heads at a time
_NO_ROTARY = (
    "mean attention is measured without rotary embedding, and this model's layers do not all have "
    "one that can be undone: take --probe echo"
)


def streaming_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: int, recent: int
) -> torch.Tensor:
    """Return `[1, H, T, D]`: a query sees the first `sinks` keys, and `recent` up to its own.

    Shapes are those of `whole_attention`.
    """
    found, total = [], q.shape[2]
    for start in range(0, total, _CHUNK):
        places = torch.arange(start, min(start + _CHUNK, total), device=q.device)
        end = start + len(places)
        first = torch.arange(min(sinks, end), device=q.device)
        near = torch.arange(max(len(first), start - recent + 1), end, device=q.device)
        keys = torch.cat([first, near])
        gap = places[:, None] - keys
        seen = (gap >= 0) & ((keys < sinks) | (gap < recent))
        part = q[:, :, start:end], k[:, :, keys], v[:, :, keys]
        found.append(F.scaled_dot_product_attention(*part, seen, scale=scale, enable_gqa=True))
    return torch.cat(found, dim=2)


class StreamingModel(HeadModel):
    """A model whose heads can be made to stream."""

    def mean_attention(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return how far back the mean query looks in each KV head, `[L, G]` float64.

        The mean over texts, and over the query heads of a KV head as in kvpress.

        Raises:
            ValueError: the model's rotary embedding cannot be undone.
        """
        found = torch.zeros(self.layers, self.kv_heads, dtype=torch.float64)
        rotary = self._rotary(max(LENGTH, *map(len, texts)))

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            areas = mean_attention(q[0].transpose(0, 1).cpu(), k[0].cpu(), rotary, scale)
            found[layer] += areas.unflatten(0, (self.kv_heads, -1)).mean(dim=1)
            return whole_attention(q, k, v, scale)

        for ids in texts:
            self.run(ids, attend, 1)
        return found / len(texts)

    @torch.inference_mode()
    def _rotary(self, positions: int) -> Rotary:
        """Return the rotary embedding of all layers, tried against the model's own function."""
        embedding = getattr(self.model.model, "rotary_emb", None)
        if not all(getattr(module, "use_rope", True) for module in self.attentions):
            raise ValueError(_NO_ROTARY)
        attention = type(self.attentions[0])
        apply = getattr(sys.modules[attention.__module__], "apply_rotary_pos_emb", None)
        if embedding is None or apply is None:
            raise ValueError(_NO_ROTARY)
        here = torch.arange(positions, device=self.model.device)
        cos, sin = embedding(torch.zeros(1, device=here.device), here[None])
        size = cos.shape[-1]
        x = torch.randn(1, 1, positions, size, generator=torch.Generator().manual_seed(0))
        turned = apply(x.to(here.device), x.to(here.device), cos, sin)[0].cpu()
        # Angles of halves or of pairs, for channels that are paired in either way.
        for kept in (slice(0, size // 2), slice(0, size, 2)):
            table = torch.cat([cos[0, :, kept], sin[0, :, kept]], dim=-1).cpu()
            for rotary in (Rotary(table, halves=True), Rotary(table, halves=False)):
                if torch.allclose(rotary.turn(x, *rotary.at(here.cpu())), turned, atol=1e-4):
                    return rotary
        raise ValueError(_NO_ROTARY)

    def logits(
        self, ids: Sequence[int], last: int, mask: torch.Tensor | None, scores: HeadScores
    ) -> torch.Tensor:
        """Return the logits of the last tokens, `[last, vocabulary]` float32.

        Args:
            mask: `[L, G]` bool, which heads see everything; the others stream. None: all do.
            scores: how many tokens a streaming head sees.
        """

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            if mask is None:
                return whole_attention(q, k, v, scale)
            whole = mask[layer].to(q.device)
            grouped = q.unflatten(1, (self.kv_heads, -1))
            out = torch.empty_like(grouped)
            for heads, is_whole in ((whole, True), (~whole, False)):
                if not heads.any():
                    continue
                part = grouped[:, heads].flatten(1, 2), k[:, heads], v[:, heads], scale
                if is_whole:
                    got = whole_attention(*part)
                else:
                    got = streaming_attention(*part, scores.sinks, scores.recent)
                out[:, heads] = got.unflatten(1, (int(heads.sum()), -1))
            return out.flatten(1, 2)

        return self.run(ids, attend, last)
