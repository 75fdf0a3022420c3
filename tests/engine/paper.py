# SPDX-License-Identifier: Apache-2.0
"""The papers once more, written from their formulas and sharing no code with the package.

Queries, keys and logits come from Hugging Face Transformers in float32. `HuggingFaceModel` replaces
its attention function by one that records the rotated queries and keys, and that can hide keys per
layer and KV head: the whole generation is then one forward pass over prompt and generated tokens in
which the prompt's rows see everything and later rows see the kept prompt tokens only.

Shape legend: n prompt tokens, T all tokens, H query heads, G KV heads, D head size, W window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

Kept = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
_NAME = "recording_and_masking"
_current: HuggingFaceModel | None = None


def _attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    assert _current is not None
    _current.mask, _current.options = mask, kwargs
    return _current.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, eager_mask)


class HuggingFaceModel:
    """A model in float32 whose attention can be looked into and restricted."""

    mask: torch.Tensor | None
    options: dict[str, Any]

    def __init__(self, path: str, **changes: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=_NAME, **changes
        ).eval()
        self.queries: list[torch.Tensor] = []  # a layer: [H, T, D]
        self.keys: list[torch.Tensor] = []  # a layer: [G, T, D]
        self._prompt_len = 0
        self._kept: Kept | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of one layer: `[1, H, T, D]`, `[1, G, T, D]` to `[1, T, H, D]`."""
        self.queries.append(query[0])
        self.keys.append(key[0])
        heads, kv_heads = query.shape[1], key.shape[1]
        visible = self.visible(layer, kv_heads, query.shape[2])
        group = heads // kv_heads
        k = key[0].repeat_interleave(group, dim=0)
        v = value[0].repeat_interleave(group, dim=0)
        logits = query[0] @ k.transpose(1, 2) * scale
        logits = logits.masked_fill(~visible.repeat_interleave(group, dim=0), -math.inf)
        return (logits.softmax(dim=-1) @ v).transpose(0, 1)[None]

    def visible(self, layer: int, kv_heads: int, total: int) -> torch.Tensor:
        """`[G, T, T]` bool: which keys each query of a layer sees."""
        visible = torch.ones(total, total, dtype=torch.bool).tril().repeat(kv_heads, 1, 1)
        if self._kept is not None and (isinstance(self._kept, Sequence) or layer in self._kept):
            n = self._prompt_len
            hidden = torch.ones(kv_heads, n, dtype=torch.bool)
            hidden.scatter_(1, self._kept[layer].long(), False)
            visible[:, n:, :n] &= ~hidden[:, None, :]
        return visible

    @torch.no_grad()
    def forward(
        self, tokens: Sequence[int], prompt_len: int | None = None, kept: Kept | None = None
    ) -> torch.Tensor:
        """Log probabilities `[T, vocabulary]` of the token after each one.

        Args:
            prompt_len: n; rows from n on see of the prompt only what `kept` holds.
            kept: a layer, `[G, any]` positions below n; layers that a mapping lacks keep all.
        """
        global _current
        self.queries, self.keys = [], []
        self._prompt_len, self._kept = prompt_len or 0, kept
        _current = self
        logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits.log_softmax(dim=-1)


def arithmetic_budgets(mean: int, num_layers: int, capacity: int, beta: float) -> list[float]:
    """PyramidKV's k[l], as real numbers: mean B, capacity n - W."""
    top = mean / beta
    bottom = 2 * mean - top
    if bottom > capacity:
        bottom = capacity
        top = 2 * mean - bottom
    step = (bottom - top) / (num_layers - 1)
    return [bottom - step * layer for layer in range(num_layers)]


def window_importance(
    queries: torch.Tensor, keys: torch.Tensor, window: int, kernel_size: int, gqa: str
) -> torch.Tensor:
    """SnapKV's score of the keys before the window, `[G, n - W]` float64.

    Args:
        queries: `[H, n, D]` of the prompt. keys: `[G, n, D]`. gqa: "mean" or "max".
    """
    heads, n, head_size = queries.shape
    group = heads // keys.shape[0]
    importance = torch.empty(keys.shape[0], n - window, dtype=torch.float64)
    for kv_head in range(keys.shape[0]):
        k = keys[kv_head].double()
        per_query_head = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            total = torch.zeros(n, dtype=torch.float64)
            for position in range(n - window, n):
                logits = k[: position + 1] @ queries[head, position].double()
                total[: position + 1] += (logits / math.sqrt(head_size)).softmax(dim=0)
            per_query_head.append(total[: n - window])
        stacked = torch.stack(per_query_head)
        reduced = stacked.mean(dim=0) if gqa == "mean" else stacked.max(dim=0).values
        half = kernel_size // 2
        padded = torch.nn.functional.pad(reduced, (half, half))
        importance[kv_head] = padded.unfold(0, kernel_size, 1).sum(dim=-1) / kernel_size
    return importance


def keep_best(importance: torch.Tensor, keep: int, window: int) -> list[set[int]]:
    """The positions each KV head keeps: the window and the best of the rest, `keep` in all."""
    n = importance.shape[1] + window
    result = []
    for head in importance:
        best = head.topk(keep - window).indices.tolist()
        result.append(set(best) | set(range(n - window, n)))
    return result


# Lengths that follow from the scores --------------------------------------------------------------


def mean_retention(layers: Sequence[torch.Tensor], lengths: Sequence[int]) -> float:
    """XKV's R, mean over the layers (Eq. 4). `layers` are `[n - W]` each."""
    retained = [
        float(scores.sort(descending=True).values[:length].sum() / scores.sum())
        for scores, length in zip(layers, lengths, strict=True)
    ]
    return sum(retained) / len(retained)


def xkv_lengths(
    layers: Sequence[torch.Tensor], total: int | None = None, goal: float | None = None
) -> list[int]:
    """XKV's Algorithm 1, step by step: the layer whose next token adds most to the mean R.

    Args:
        layers: `[n - W]` a layer, over all heads. total: tokens to give out (Eq. 17), or
        goal: the mean R to reach (Eq. 18).
    """
    ordered = [(scores / scores.sum()).sort(descending=True).values.tolist() for scores in layers]
    allocation = [0] * len(layers)
    wait = [row[0] for row in ordered]
    retained = 0.0
    while sum(allocation) < total if total is not None else retained / len(layers) < (goal or 0.0):
        best = max(wait)
        layer = wait.index(best)
        retained += best
        allocation[layer] += 1
        taken = allocation[layer]
        wait[layer] = ordered[layer][taken] if taken < len(ordered[layer]) else -1.0
        if max(wait) < 0:
            break
    return allocation
