# SPDX-License-Identifier: Apache-2.0
"""`paper.py` for layers of several kinds; Transformers' own masks say what slides or is chunked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.engine.paper import HuggingFaceModel, Kept


@dataclass
class AttentionCall:
    """One layer's attention: `[H, T, D]` queries, `[G, T, D]` keys, `[H]` learned sinks."""

    query: torch.Tensor
    key: torch.Tensor
    scale: float
    soft_cap: float
    sinks: torch.Tensor | None

    def weights(self, first: int, visible: torch.Tensor) -> torch.Tensor:
        """Of the queries from row `first` on, `[H, T - first, T]` float64."""
        group = self.query.shape[0] // self.key.shape[0]
        keys = self.key.double().repeat_interleave(group, dim=0)
        logits = self.query[:, first:].double() @ keys.transpose(1, 2) * self.scale
        if self.soft_cap:
            logits = self.soft_cap * (logits / self.soft_cap).tanh()
        logits = logits.masked_fill(~visible, -math.inf)
        if self.sinks is None:
            return logits.softmax(dim=-1)
        sinks = self.sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]


class HybridModel(HuggingFaceModel):
    """A model in which some layers can be restricted; the others see what they see."""

    calls: dict[int, AttentionCall]

    def forward(
        self, tokens: Sequence[int], prompt_len: int | None = None, kept: Kept | None = None
    ) -> torch.Tensor:
        """See the base."""
        self.calls = {}
        return super().forward(tokens, prompt_len, kept)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See the base."""
        options: dict[str, Any] = self.options
        soft_cap = float(options.get("softcap") or 0.0)
        call = AttentionCall(query[0], key[0], scale, soft_cap, options.get("s_aux"))
        self.calls[layer] = call
        visible = self.visible(layer, key.shape[1], query.shape[2])
        if self.mask is not None:
            visible &= self.mask[0, 0] > -1.0
        group = query.shape[1] // key.shape[1]
        weights = call.weights(0, visible.repeat_interleave(group, dim=0))
        values = value[0].double().repeat_interleave(group, dim=0)
        return (weights @ values).float().transpose(0, 1)[None]

    def importance(self, layer: int, window: int, kernel_size: int) -> torch.Tensor:
        """SnapKV's score of the keys before the window in the latest call, `[G, n - W]`."""
        call = self.calls[layer]
        n = call.query.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).tril()[n - window :]
        mass = call.weights(n - window, causal).sum(dim=1)[:, : n - window]
        mass = mass.unflatten(0, (call.key.shape[0], -1)).mean(dim=1)
        half = kernel_size // 2
        padded = torch.nn.functional.pad(mass, (half, half))
        return padded.unfold(1, kernel_size, 1).sum(dim=-1) / kernel_size
