# SPDX-License-Identifier: Apache-2.0
"""The kernels for V in host memory, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import AttentionBatch, Softmax


@dataclass(frozen=True)
class Choosers:
    """The queries of a batch that choose their keys (choosers), as the host knows them.

    Attributes:
        queries: `[S, 2]` int32, the request of each chooser and the query's index within that
            request: all queries of the requests whose `top_ns` is above 0 and below the number of
            keys that their last query sees.
        max_top_n: at least the largest `top_ns` of these requests.
        alone: whether every request of the batch chooses.
        workspace: float32 scratch, whose size bounds how many queries choose at once; None:
            allocate what all of them need.
    """

    queries: torch.Tensor
    max_top_n: int
    alone: bool = False
    workspace: torch.Tensor | None = None


class ValueOps(Protocol):
    """The kernels of one device type that V in host memory needs; the rules are those of `Ops`."""

    def copy_pages(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        block_table: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Copy whole pages from one memory to another, bit for bit; on CUDA alone, to fetch V.

        Args:
            target: `[S, G, N, D]`, written; dense, with pages of whole 4-byte words.
            source: `[P, G, N, D]` of the same dtype and density.
            block_table: `[>= R, M]` int32, the blocks of the source.
            places: `[C, 3]` int32, one row a page: the page of the target, then the row and the
                entry of the block table that name the page of the source.
        """

    def topn_attention(
        self,
        out: torch.Tensor,
        batch: AttentionBatch,
        softmax: Softmax,
        top_ns: torch.Tensor,
        *,
        renormalize: bool = False,
        value_rows: torch.Tensor | None = None,
        choosers: Choosers | None = None,
    ) -> None:
        """Attend as `paged_attention`, but let requests use only their best keys.

        Each query and query HEAD of request r uses the `top_ns[r]` visible keys with the largest
        attention logits, and the lower position where logits are equal; a query that sees no more
        keys than that uses all (KCache, arXiv:2404.18057, section 3).

        Args:
            out: `[T, H, D]`, written, as in `paged_attention`.
            top_ns: `[R]` int32. A request uses all its keys, by `paged_attention`, if its entry is
                0, or at least the number of keys that its last query sees.
            renormalize: make the weights of the chosen keys sum to 1. Otherwise they keep the
                values that they have in the softmax over all keys and the sink, as in the paper.
            value_rows: `[R]` int64 or None. The number of V rows (of D elements) that request r
                needed is ADDED: if it chooses, one for every chosen key, query and query head;
                otherwise one for every key that its queries see and KV head.
            choosers: only Triton uses it, and without it reads back from the device.

        Raises:
            ValueError: `top_ns` or `value_rows` has another shape or dtype, or an entry of `top_ns`
                is negative (which Triton, on the device, does not check).
        """


def value_ops(ops: Ops) -> ValueOps:
    return ops.of_method(__name__)
