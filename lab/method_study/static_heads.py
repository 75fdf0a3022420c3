# SPDX-License-Identifier: Apache-2.0
"""Static masks: some KV heads keep a whole prompt, the others its first and last tokens.

The first 128 and last 256 stay in every head, as with DuoAttention (arXiv:2410.10819). Which heads
keep everything is decided once for a model by a probe of `lab.heads`, or at
random for each prompt.
"""

from __future__ import annotations

import random
import zlib
from functools import cached_property

import torch
from model import Kept, Model

from lab.heads.probe import Repeated, mean_attention, of_kv_heads, retrieval_heads
from vllm_pyramid.tools.eval.haystack import Tokens

SINKS, RECENT = 128, 256
PROBES = ("echo", "mean attention", "random")
_TEXTS, _TEXT = 8, 1000  # texts of the probe of mean attention, and their tokens
_ORDINARY = range(1000, 30_000)  # ids that no special token of the three models has


class HeadProbes:
    """The scores of a model's KV heads, measured when they are first asked for."""

    def __init__(self, model: Model, tokens: Tokens) -> None:
        self.model, self.tokens = model, tokens

    def kept(self, probe: str, ids: list[int], keep: int) -> Kept:
        """Return the places of each layer and head, `keep` tokens a head on average.

        Raises:
            ValueError: the streaming heads alone take more.
        """
        tokens, heads = len(ids), self.model.layers * self.model.kv_heads
        rest = SINKS + RECENT
        count = round(heads * (keep - rest) / (tokens - rest))
        if count < 0:
            raise ValueError(f"{keep} tokens a head are less than the {rest} of streaming heads")
        whole = retrieval_heads(self._scores(probe, ids), count)
        every = torch.arange(tokens)
        few = torch.cat([every[:SINKS], every[-RECENT:]])
        return [[every if one else few for one in row] for row in whole.tolist()]

    def _scores(self, probe: str, ids: list[int]) -> torch.Tensor:
        if probe == "echo":
            return self._repeated
        if probe == "mean attention":
            return self._mean
        seed = torch.Generator("cpu").manual_seed(zlib.crc32(repr(ids).encode()))
        shape = self.model.layers, self.model.kv_heads
        return torch.rand(shape, generator=seed, device=seed.device)

    @cached_property
    def _repeated(self) -> torch.Tensor:
        """The larger share of echo and induction, `[L, G]`."""
        probe = Repeated()
        recorded, _ = self.model.prefill(probe.tokens(_ORDINARY))
        found = [
            torch.maximum(*probe.echo_and_induction(layer.queries, layer.keys, self.model.scale))
            for layer in recorded.layers
        ]
        return of_kv_heads(torch.stack(found), self.model.kv_heads)

    @cached_property
    def _mean(self) -> torch.Tensor:
        """The areas over some texts, the mean of a KV head's query heads as kvpress has it."""
        source, total = random.Random(0), torch.zeros(self.model.layers, self.model.kv_heads)
        for _ in range(_TEXTS):
            recorded, _ = self.model.prefill(
                self.tokens.encode(" ".join(self.tokens.passage(source, _TEXT)))
            )
            for index, layer in enumerate(recorded.layers):
                areas = mean_attention(
                    layer.queries, layer.keys, self.model.rotary, self.model.scale
                )
                total[index] += areas.unflatten(0, (self.model.kv_heads, -1)).mean(dim=1)
        return total / _TEXTS
