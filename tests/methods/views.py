# SPDX-License-Identifier: Apache-2.0
"""Made-up requests as scorers see them, over pages in random order."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import cache as kept
from pathlib import Path

import torch

from vllm_pyramid.methods.triattention import Centres, TriAttentionScorer
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.scorer_inputs import ScorerInputs

BLOCK = 8


def cos_sin(size: int, positions: int) -> torch.Tensor:
    """`[positions, size]` as vLLM's layers hold it: cosines, then sines."""
    angles = torch.arange(positions)[:, None] * 1e4 ** (-torch.arange(0, size, 2) / size)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@dataclass
class MadeUp:
    """Keys and values `[G, T, D]`, and queries `[T, H, D]` with and without rotary embedding.

    With `learned_sinks`, logits `[H]` of sinks as well, large enough to matter.
    """

    kv_heads: int = 2
    heads: int = 6
    size: int = 16
    tokens: int = 90
    seed: int = 0
    learned_sinks: bool = False
    logit_sinks: torch.Tensor | None = field(init=False, default=None)
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    plain: torch.Tensor = field(init=False)
    queries: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        source = torch.Generator().manual_seed(self.seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source)

        self.keys = noise(self.kv_heads, self.tokens, self.size)
        self.values = noise(self.kv_heads, self.tokens, self.size)
        self.plain = noise(self.tokens, self.heads, self.size) + noise(self.heads, self.size)
        if self.learned_sinks:
            self.logit_sinks = 3.0 + noise(self.heads)
        self.rotary = Rotary(cos_sin(self.size, 4096))
        cos, sin = self.rotary.at(torch.arange(self.tokens))
        self.queries = self.rotary.turn(self.plain, cos[:, None], sin[:, None])

    def view(
        self, window: int = 8, sinks: int = 2, *, queries: int | None = None, start: int = 0
    ) -> ScorerInputs:
        """The last eviction of a request: `queries` of its queries, `start` dead tokens."""
        return view_of(
            self.keys,
            self.values,
            self.queries[-(queries or window) :],
            self.rotary,
            window=window,
            sinks=sinks,
            start=start,
            seed=self.seed,
            logit_sinks=self.logit_sinks,
        )


def view_of(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    rotary: Rotary,
    *,
    window: int,
    sinks: int,
    layer: int = 3,
    start: int = 0,
    seed: int = 0,
    logit_sinks: torch.Tensor | None = None,
) -> ScorerInputs:
    """A request at its prompt's end, its rows in pages in random order.

    Args:
        keys, values: `[G, T, D]`. queries: `[W, H, D]`, the last ones. start: dead tokens in front.
    """
    heads, tokens, size = keys.shape
    entries = -(-(tokens + start) // BLOCK)
    order = torch.randperm(entries + 3, generator=torch.Generator().manual_seed(seed))
    row = order[:entries].int()
    caches = torch.full((2, entries + 3, heads, BLOCK, size), torch.nan)
    places = torch.arange(start, start + tokens)
    for cache, rows in zip(caches, (keys, values), strict=True):
        cache[row[places // BLOCK].long(), :, places % BLOCK] = rows.transpose(0, 1)
    return ScorerInputs(
        num_tokens=tokens,
        window=window,
        sinks=sinks,
        num_query_heads=queries.shape[1],
        num_kv_heads=heads,
        head_size=size,
        first_kv_head=0,
        layer=layer,
        num_layers=layer + 2,
        scale=size**-0.5,
        soft_cap=0.0,
        queries=queries,
        key_cache=caches[0],
        value_cache=caches[1],
        block_row=row,
        start=start,
        last_position=tokens - 1,
        prompt_len=tokens,
        rotary=rotary,
        knows_rotary=True,
        asks_ranks=True,
        logit_sinks=logit_sinks,
    )


@kept
def made_up_centres(heads: int, size: int, layers: int = 4) -> Path:
    """The file of a model's centres of queries, which lie further from 0 than from each other."""
    source = torch.Generator().manual_seed(heads * size)
    mean = torch.randn(layers, heads, size, generator=source)
    length = mean.unflatten(-1, (2, -1)).norm(dim=2) * 1.3 + 0.2
    file = Path(tempfile.mkdtemp(prefix="centres")) / "centres.npz"
    Centres(mean, length).write(file)
    return file


def ready(scorer: Scorer, heads: int, size: int) -> Scorer:
    """A scorer with what it must have measured of a model."""
    if not isinstance(scorer, TriAttentionScorer):
        return scorer
    return scorer.model_copy(update={"centres": str(made_up_centres(heads, size))})
