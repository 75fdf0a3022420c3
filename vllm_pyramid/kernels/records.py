# SPDX-License-Identifier: Apache-2.0
"""The records that kernels take: what a step holds, what is to be scored, and how.

Shape legend: R requests, T query tokens of all requests, H query heads, G KV heads, Q = H / G,
D head size, N tokens of a block, P physical blocks, M table entries a request.

Cache layout: `key_cache` and `value_cache` are views `[P, G, N, D]` with unit stride in D and any
other strides (K and V usually share one allocation). Token p of request r lives in block
`block_table[r, p // N]`, row `p % N`. Entries of the table below `skips[r] // N` are stale and are
never read.

Retention is right-aligned: a request with `skip` > 0 holds its survivors in positions
`skip .. prompt_len - 1` and later tokens behind them, so attention is that of the positions
`skip .. seq_len - 1`. `skip` may be any number; whole blocks below it may be another's.

Caches may be of 8-bit floats (`FP8_DTYPES`). What is computed with is then the cache's number times
a scale, one for all keys and one for all values of a layer, by which they were divided when they
were written. Where keys are written without one it is 1.

Or they are of 8-bit integers or floats, and every token has a scale of its own for each KV head:
`key_scales` and `value_scales`, `[P, G, N]` float32 with any strides. Such caches are written and
attended to by vLLM; here they are scored and compacted, the latter as rows that hold the scales.

Every `max_*` of a record or a function is a number that a caller may know on the host, so that a
device need not be asked; with None it is found. It may be larger than the true one; too small a one
loses data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GQA_REDUCTIONS = ("mean", "max", "sum")
POOLINGS = ("avg", "max", "none")
MASS_KINDS = ("sum", "below_average")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class AttentionBatch:
    """Queries of a step, and the cached tokens that they see.

    The queries of request r are rows `query_start_loc[r] .. query_start_loc[r + 1] - 1` and are its
    last tokens: query row i of m stands at position `seq_lens[r] - m + i` and sees the positions
    `max(skips[r], that - sliding_window + 1) .. that`. (Sliding windows count cache positions, so
    they are exact only where nothing was evicted; eviction on such layers is refused elsewhere.)

    Attributes:
        query: `[T, H, D]`, rotary embedding applied.
        key_cache, value_cache: `[P, G, N, D]`. They may be in different memories.
        block_table: `[>= R, M]` int32. query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32, tokens including the new ones and the skipped ones.
        skips: `[R]` int32, positions below which nothing is visible; 0 where nothing was evicted.
        max_query_len, max_seq_len: the most queries and tokens of a request.
        key_scale, value_scale: what the caches' numbers are multiplied with.
        key_scales, value_scales: `[P, G, N]` float32, further scales of each token and KV head;
            None: 1. Only `add_key_mass` takes them, and not on the CPU.
        value_table: `[>= R, M]` int32, the blocks of V where they are others than those of K; then
            the two caches may have different numbers of blocks. `paged_attention` alone takes it,
            and not on the CPU.
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
    """How a layer turns products of queries and keys into weights.

    Attributes:
        scale: of the products.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; 0 for none.
        sliding_window: tokens visible to a query, itself included; 0 for all.
        sinks: `[H]` learned logits, one a query head, or None. Each is an extra key without a
            value: weights are exp(logit) / (sum of exp(visible logits) + exp(sink)). It is neither
            scaled nor capped, and a query that sees no key gives nothing. Every function that takes
            a softmax counts it, but for `topn_attention` where that renormalizes.
    """

    scale: float
    soft_cap: float = 0.0
    sliding_window: int = 0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Choosers:
    """The queries of a batch that choose their keys, as the host knows them.

    With it `topn_attention` reads nothing back from the device.

    Attributes:
        queries: `[S, 2]` int32, request and which of its queries: all queries of the requests whose
            `top_ns` is above 0 and below what their last query sees.
        max_top_n: at least the largest of their `top_ns`.
        alone: whether all requests of the batch are such requests.
        workspace: float32 scratch, which bounds how many choose at once; None: as large as needed.
    """

    queries: torch.Tensor
    max_top_n: int
    alone: bool = False
    workspace: torch.Tensor | None = None


@dataclass(frozen=True)
class WindowBatch:
    """Prompts that are whole in the cache, nothing skipped, and their last queries.

    Attributes:
        query: `[T, H, D]` queries of this step. key_cache: `[P, G, N, D]`.
        block_table: `[>= R, M]` int32.
        query_ends: `[R]` int32; the window's queries of r are rows `query_ends[r] - window ..
            query_ends[r] - 1` of `query`, and stand at the end of its prompt.
        prompt_lens: `[R]` int32, each > window.
        window: queries of each. max_prompt_len: max(prompt_lens); the result is that wide.
        key_scale, key_scales: as in `AttentionBatch`.
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
    """How the attention of a window becomes one score a token and KV head.

    Attributes:
        gqa_reduce: over the query heads of a KV head, one of `GQA_REDUCTIONS`.
        pooling: along the positions with stride 1, one of `POOLINGS`; zero padding counts for
            `avg`, as the papers' code does. kernel_size: its width, odd.

    Raises:
        ValueError: an unknown name, or a width that is not odd.
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


@dataclass(frozen=True)
class RecentBatch:
    """The recent queries of requests, and the keys right before them.

    Attributes:
        query: `[T, H, D]` queries of this step. key_cache: `[P, G, N, D]`.
        block_table: `[>= R, M]` int32.
        query_ends: `[R]` int32; the recent queries of r are rows `query_ends[r] - recents[r] ..
            query_ends[r] - 1` of `query`, and stand at the end of its tokens.
        seq_lens, skips: `[R]` int32, as in `AttentionBatch`.
        recents: `[R]` int32, at least 1. contexts: `[R]` int32, keys reported, in positions
            `seq_lens[r] - recents[r] - contexts[r] .. seq_lens[r] - recents[r] - 1`.
        max_context: max(contexts); the result is that wide. max_recent: max(recents), or None
            if it is not known.
        key_scale, key_scales: as in `AttentionBatch`.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    skips: torch.Tensor
    recents: torch.Tensor
    contexts: torch.Tensor
    max_context: int | None = None
    key_scale: float = 1.0
    max_recent: int | None = None
    key_scales: torch.Tensor | None = None
