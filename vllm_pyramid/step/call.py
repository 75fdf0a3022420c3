# SPDX-License-Identifier: Apache-2.0
"""One layer's attention call in a step."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_pyramid.methods.hooks import Ranks
    from vllm_pyramid.step.rotary import Rotary


@dataclass(frozen=True)
class LayerCall:
    """What one layer's attention works on. Shape legend as in `ops/reference.py`.

    Attributes:
        ops: a module with the functions of `ops/reference.py`.
        layer: index of the layer, from the bottom.
        query: `[T, H, D]` of the step, rotary embedding applied.
        key_cache, value_cache: `[P, G, N, D]`.
        block_table: `[>= R, M]` int32. query_start_loc: `[R + 1]` int32. seq_lens: `[R]` int32.
        skips: `[R]` int32, tokens of the table that are not valid.
        scale: softmax scale. soft_cap: of the logits, 0 for none. sliding_window: 0 for none.
        sinks: `[H]` logits of keys without a value, or None.
        ranks: that share the KV heads; None for one.
        rotary: of this layer, or None where it has none or nobody knows it.
        offsets: `[R]` int32, tokens that each row of the table begins behind; None where every row
            begins with the request's first token.
        log_sum_exp: `[T, H]` float32 of this attention, or None.
        max_query_len, max_seq_len: of the step, if the host knows them.
    """

    ops: ModuleType
    layer: int
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor
    scale: float
    soft_cap: float = 0.0
    sliding_window: int = 0
    sinks: torch.Tensor | None = None
    ranks: Ranks | None = None
    rotary: Rotary | None = None
    offsets: torch.Tensor | None = None
    log_sum_exp: torch.Tensor | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None

    @property
    def shifted(self) -> bool:
        """Whether rows of the table begin with the first block that the layer holds."""
        return self.offsets is not None

    @property
    def batch(self) -> tuple[torch.Tensor, ...]:
        """The arguments that attention and `add_key_mass` begin with, without V."""
        return (
            self.query,
            self.key_cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            self.skips,
        )
