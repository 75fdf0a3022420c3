# SPDX-License-Identifier: Apache-2.0
"""The inputs of one layer's attention in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import AttentionBatch, Softmax

if TYPE_CHECKING:
    from vllm_pyramid.step.ranks import Ranks
    from vllm_pyramid.step.rotary import Rotary


class HeadNames(NamedTuple):
    """Names of KV heads' parts of blocks: head g of block b is `b * per_block + g * per_head`."""

    per_block: int
    per_head: int


class HeadRequests(NamedTuple):
    """The KV heads of S rows of one query each, as requests.

    `starts`, `[S * G + 1]` int32, says where their queries begin; `seq_lens` is `[S * G]` int32.
    """

    starts: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one layer's attention. Shape legend as in `kernels/records.py`.

    Attributes:
        ops: the kernels of the device. layer: index of the layer, from the bottom.
        batch: the step's queries, and the layer's cache, table and lengths.
        ranks: the ranks that share the KV heads; None for one.
        rotary: the layer's rotary embedding; None where it has none or no scorer needs it.
        offsets: `[R]` int32, the tokens in front of the first one of each row of the table; None
            where every row begins with the request's first token.
        log_sum_exp: `[T, H]` float32 of this attention, or None.
        rows: K and V as compaction moves them, `[P, G, N, row]` each, where a token's row holds
            more than its numbers; None: the caches.
        head_names: how lists of pages may name their entries where each row has one query; None:
            lists have blocks.
        head_requests: what a method's lists with these names belong to; None: it has made none.
    """

    ops: Ops
    layer: int
    batch: AttentionBatch
    softmax: Softmax
    ranks: Ranks | None = None
    rotary: Rotary | None = None
    offsets: torch.Tensor | None = None
    log_sum_exp: torch.Tensor | None = None
    rows: tuple[torch.Tensor, torch.Tensor] | None = None
    head_names: HeadNames | None = None
    head_requests: HeadRequests | None = None

    @property
    def moved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as compaction moves and copies them: whole rows."""
        return (self.key_cache, self.value_cache) if self.rows is None else self.rows

    @property
    def query(self) -> torch.Tensor:
        """`[T, H, D]`."""
        return self.batch.query

    @property
    def key_cache(self) -> torch.Tensor:
        """`[P, G, N, D]`."""
        return self.batch.key_cache

    @property
    def value_cache(self) -> torch.Tensor:
        """`[P, G, N, D]`."""
        return self.batch.value_cache

    @property
    def key_scale(self) -> float:
        """The factor of the numbers in `key_cache`; 1 except for 8-bit floats."""
        return self.batch.key_scale

    @property
    def key_scales(self) -> torch.Tensor | None:
        """`[P, G, N]` float32, the factor of each token and KV head; None: 1."""
        return self.batch.key_scales

    @property
    def block_table(self) -> torch.Tensor:
        """`[>= R, M]` int32."""
        return self.batch.block_table

    @property
    def seq_lens(self) -> torch.Tensor:
        """`[R]` int32."""
        return self.batch.seq_lens

    @property
    def shifted(self) -> bool:
        """Whether rows of the table begin with the first block that the layer holds."""
        return self.offsets is not None


class CacheWrite(NamedTuple):
    """One layer's new tokens in a step. Shape legend as in `kernels/records.py`.

    Attributes:
        ops: the kernels of the device. layer: index of the layer, from the bottom.
        keys, values: `[>= T, G, D]`; the memory may be reused as soon as the layer has attended.
        key_cache, value_cache: `[P, G, N, D]`, where they go.
        slots: `[T]` int64, `block * N + row`; negative ones are padding, which is not written.
        key_scale, value_scale: what the numbers in caches of 8-bit floats are multiplied with; else
            1.
    """

    ops: Ops
    layer: int
    keys: torch.Tensor
    values: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0
