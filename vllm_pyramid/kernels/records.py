# SPDX-License-Identifier: Apache-2.0
"""Records that the kernels take: the queries and caches of a step, and how to score them.

Shape legend: R requests, T query tokens of all requests, H query heads, G KV heads, Q = H / G, D
head size, N tokens of a block, P physical blocks, M table entries a request.

Cache layout: `key_cache` and `value_cache` are views `[P, G, N, D]` with unit stride in D and any
other strides (K and V usually share one allocation). Token p of request r lives in block
`block_table[r, p // N]`, offset `p % N`. Entries of the table below `skips[r] // N` are stale and
are never read.

Survivors of an eviction are aligned to the right: a request with `skip` > 0 holds them in the
positions `skip .. prompt_len - 1`, and its later tokens follow, so attention covers the positions
`skip .. seq_len - 1`. `skip` need not be a multiple of N; blocks that lie wholly below it may
belong to other requests.

A cache of 8-bit floats (`FP8_DTYPES`) has one scale for all keys and one for all values of a layer:
numbers are divided by the scale when they are written, and a kernel computes with the stored number
times the scale. For all other caches these scales are 1. A cache of 8-bit integers or floats may
instead have a scale for each token and KV head: `key_scales` and `value_scales`, `[P, G, N]`
float32 with any strides. vLLM writes such caches and attends to them; the kernels here score and
compact them, and `compact` moves the scales as part of the rows.

Every `max_*` of a record or a function is optional. A caller that knows the number on the host
passes it, and a kernel need not read it back from the device. A larger number than the true maximum
is allowed; a smaller one loses data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GQA_REDUCTIONS = ("mean", "max", "sum")
POOLINGS = ("avg", "max", "none")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class AttentionBatch:
    """The queries of a step, and the cached tokens that they see.

    The queries of request r are the rows `query_start_loc[r] .. query_start_loc[r + 1] - 1` of
    `query` and belong to its last tokens: query i of m stands at position `p = seq_lens[r] - m + i`
    and sees the positions `max(skips[r], p - sliding_window + 1) .. p`. (Sliding windows count
    cache positions, so eviction in such layers is refused elsewhere.)

    Attributes:
        query: `[T, H, D]` after the rotary embedding.
        key_cache, value_cache: `[P, G, N, D]`, possibly in different memories.
        block_table: `[>= R, M]` int32; or `[>= R, G, M]`, a list of pages for each KV head, of
            which `seq_lens`, `skips` and positions then count the tokens (`methods/pages/`). Only
            `paged_attention` takes the latter, and no sliding window with it.
        query_start_loc: `[R + 1]` int32, the first query row of each request, and T.
        seq_lens: `[R]` int32, tokens of each request, the new ones and the skipped ones included.
        skips: `[R]` int32, the first visible position; 0 if nothing was evicted.
        max_query_len: the largest number of queries of a request.
        max_seq_len: the largest of `seq_lens`.
        key_scale, value_scale: factors of all numbers in the caches.
        value_table: `[>= R, M]` int32, the blocks of V if they differ from those of K; the two
            caches may then have different numbers of blocks. Only `paged_attention` takes it, and
            not in C++.
        key_scales, value_scales: `[P, G, N]` float32, a further factor for each token and KV head;
            None: 1. Only `add_key_mass` takes them, and not in C++.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor
    max_query_len: int | None = None
    max_seq_len: int | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    value_table: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Softmax:
    """How a layer turns products of queries and keys into attention weights.

    Attributes:
        scale: factor of the products.
        soft_cap: logits become `soft_cap * tanh(logit / soft_cap)`; 0 for no cap.
        sliding_window: number of tokens visible to a query, itself included; 0 for all.
        sinks: `[H]` learned logits, one for each query head, or None. A sink acts as an extra key
            without a value: weights are exp(logit) / (sum of exp(visible logits) + exp(sink)). It
            is neither scaled nor capped, and a query that sees no key has no weights at all. All
            functions count the sinks, except `topn_attention` with `renormalize`.
    """

    scale: float
    soft_cap: float = 0.0
    sliding_window: int = 0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class WindowBatch:
    """Prompts that are whole in the cache, with nothing skipped, and their last queries.

    Attributes:
        query: `[T, H, D]` queries of this step.
        key_cache, block_table, key_scale: as in `AttentionBatch`; `key_scales` too, but not in C++.
        query_ends: `[R]` int32; the window's queries of r are the rows `query_ends[r] - window ..
            query_ends[r] - 1` of `query`, and belong to the last tokens of its prompt.
        prompt_lens: `[R]` int32, each > window.
        window: number of queries of each prompt that score.
        max_prompt_len: max(prompt_lens), which sets the width of the result.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    query_ends: torch.Tensor
    prompt_lens: torch.Tensor
    window: int
    max_prompt_len: int | None = None
    key_scale: float = 1.0
    key_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Reduction:
    """How the attention of a window becomes one score for each token and KV head.

    Attributes:
        gqa_reduce: reduction over the query heads of a KV head, one of `GQA_REDUCTIONS`.
        pooling: pooling along the positions with stride 1, one of `POOLINGS`; zero padding counts
            in `avg`, as in the papers' code.
        kernel_size: width of the pooling, odd.

    Raises:
        ValueError: a name is unknown, or the width is not a positive odd number.
    """

    gqa_reduce: str = "mean"
    pooling: str = "avg"
    kernel_size: int = 5

    def __post_init__(self) -> None:
        if self.gqa_reduce not in GQA_REDUCTIONS or self.pooling not in POOLINGS:
            raise ValueError(
                f"gqa_reduce {self.gqa_reduce!r} must be one of {GQA_REDUCTIONS} and pooling "
                f"{self.pooling!r} one of {POOLINGS}"
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {self.kernel_size} must be positive and odd")
