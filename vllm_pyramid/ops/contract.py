# SPDX-License-Identifier: Apache-2.0
"""What every back end of the kernels offers: their functions, and the records they take.

Three modules are an `Ops`: `reference.py` (plain PyTorch, the oracle), `cpu.py` (C++) and
`triton_ops.py` (CUDA). `ops.get_ops` returns the one of a device.

Shape legend: R requests, T query tokens of all requests, H query heads, G KV heads, Q = H / G,
D head size, N tokens of a block, P physical blocks, M table entries a request.

Cache layout: `key_cache` and `value_cache` are views `[P, G, N, D]` with unit stride in D and any
other strides (K and V usually share one allocation). Token p of request r lives in block
`block_table[r, p // N]`, row `p % N`. Entries of the table below `skips[r] // N` are stale and are
never read.

Retention is right-aligned: a request with `skip` > 0 holds its survivors in positions
`skip .. prompt_len - 1` and later tokens behind them, so attention is that of the positions
`skip .. seq_len - 1`. `skip` may be any number; whole blocks below it belong to somebody else.

Caches may be of 8-bit floats (`FP8_DTYPES`). What is computed with is then the cache's number times
a scale, one for all keys and one for all values of a layer, by which they were divided when they
were written. Where keys are written without one it is 1.

Or they are of 8-bit integers or floats, and every token has a scale of its own for each KV head:
`key_scales` and `value_scales`, `[P, G, N]` float32 with any strides. Such caches are written and
attended to by vLLM; here they are scored and compacted, the latter as rows that hold the scales.

Every `max_*` below is a number that a caller may know on the host, so that a device need not be
asked; with None it is found. It may be larger than the true one; too small a one loses data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_pyramid.ops.recall import WindowStatistics

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
        key_scales, value_scales: `[P, G, N]` float32, the same of each token and KV head, beside
            the others; None: 1. `add_key_mass` alone takes them, and not on the CPU.
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
            where nobody knows it.
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


class Ops(Protocol):
    """The kernels of a device; a module is one.

    All raise ValueError where shapes, dtypes or strides do not fit. A back end may take more
    arguments by keyword: `reference.py` a `compute_dtype`, `triton_ops.py` scratch memory.
    """

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Write new tokens into the cache.

        Into 8-bit floats they are divided by the scales and rounded to nearest, ties to even, and
        what is too large becomes the largest number; other caches have scales of 1.

        Args:
            key: `[T, G, D]`. value: same.
            key_cache: `[P, G, N, D]`. value_cache: same.
            slot_mapping: `[T]` int64, `block * N + row`; negative entries are skipped (padding).
        """

    def write_rows(
        self,
        rows: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        scale: float = 1.0,
    ) -> None:
        """`reshape_and_cache` of K alone or of V alone.

        Args:
            rows: `[>= T, G, D]`. cache: `[P, G, N, D]`. slot_mapping: `[T]` int64.
        """

    def copy_pages(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        block_table: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Copy whole pages from one memory to another, bit for bit.

        Args:
            target: `[S, G, N, D]`, written. source: `[P, G, N, D]`, of the same dtype; both dense,
                with pages of whole words of 4 bytes.
            block_table: `[>= R, M]` int32.
            places: `[C, 3]` int32: a page of the target, and row and entry of the block table
                where that of the source stands.
        """

    def paged_attention(
        self,
        out: torch.Tensor,
        batch: AttentionBatch,
        softmax: Softmax,
        *,
        log_sum_exp: torch.Tensor | None = None,
    ) -> None:
        """Causal attention of prefill chunks and decode steps over the paged cache.

        Args:
            out: `[T, H, D]`, written. May have any dtype; unit stride in D.
            log_sum_exp: `[T, H]` float32, written where it is given: natural logarithm of the sum
                of exp(logit) over what each query sees, scaled and capped, WITHOUT the sink; -inf
                where it sees nothing. `add_key_mass`, `window_scores` and `recent_mass` take it as
                it is, add the sink themselves, and need one pass over K less.
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
        """`paged_attention` of a batch in which requests may use their best keys alone.

        Of every query and query HEAD of request r the `top_ns[r]` visible keys with the largest
        attention logits count, the lower position where logits are equal; a query that sees no more
        keys than that uses all. Query heads that share a KV head choose separately, as in the paper
        (KCache, arXiv:2404.18057, section 3).

        Args:
            top_ns: `[R]` int32. 0, or at least the visible keys of the request's last query: the
                request is attended to by `paged_attention`.
            renormalize: the weights of the chosen keys are made to sum to 1; otherwise they are
                what they are in the softmax over all keys and the sink (as the paper writes it).
            value_rows: `[R]` int64 or None. The rows of V (of D elements) that were needed are
                ADDED: with `top_ns` one a chosen key, query and query head, else the keys that the
                request's queries see, once a KV head.
            choosers: what the host knows of the batch; only back ends that would have to ask the
                device look at it.

        Raises:
            ValueError: `top_ns` or `value_rows` has another shape or dtype, or a negative entry.
        """

    def add_key_mass(
        self,
        mass: torch.Tensor,
        batch: AttentionBatch,
        softmax: Softmax,
        *,
        kind: str = "sum",
        first_queries: torch.Tensor | None = None,
        log_sum_exp: torch.Tensor | None = None,
    ) -> None:
        """Add what each visible key is given by the queries of a step.

        The softmax of `paged_attention` once more, without V. With `kind="sum"` its probabilities
        are added up (the accumulated attention of H2O, arXiv:2306.14048); with
        `kind="below_average"` a key counts 1 for every query that gives it less than 1 / (the keys
        which that query sees) (Scissorhands, arXiv:2305.17118, the counter of its algorithm for
        compressing the cache). Both over all query heads of the KV head.

        Args:
            mass: `[P, G, N]` float32, unit stride in N, one block each of the cache. Only the slots
                of visible keys are touched.
            kind: one of `MASS_KINDS`.
            first_queries: `[R]` int32; queries at positions below it add nothing. None: all add.
            log_sum_exp: `[T, H]` float32, what `paged_attention` wrote for the same batch: without
                the sinks, which are added here. Saves one of two passes over K. None: found here.
                The weights of a query are then off by a common factor, that of the last bit of its
                log-sum-exp.

        Raises:
            ValueError: `mass` or `log_sum_exp` has another shape or dtype, or an unknown kind.
        """

    def window_scores(
        self,
        batch: WindowBatch,
        softmax: Softmax,
        reduction: Reduction,
        *,
        log_sum_exp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Importance of every prompt token before the window (SnapKV, PyramidKV sec. 4.2).

        Of each request, the softmax over ALL its keys (and the head's sink) of the last `window`
        prompt queries (causal inside the window, float32) is summed over those queries, reduced
        over the query heads of a KV head, and pooled along the positions.

        Args:
            softmax: its scale, cap and sinks, which lower the weights of their heads: those of a
                query sum to less than 1. There is no sliding window.
            log_sum_exp: `[T, H]` float32, what `paged_attention` wrote for the window's queries,
                with no sliding window: without the sinks, which are added here. Other rows are not
                read. Saves one of two passes. None: found here; the result is the same but for
                rounding.

        Returns:
            `[R, G, max(prompt_lens) - window]` float32; -inf behind `prompt_lens[r] - window`.
        """

    def window_scores_and_statistics(
        self,
        batch: WindowBatch,
        softmax: Softmax,
        reduction: Reduction,
        *,
        log_sum_exp: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, WindowStatistics]:
        """`window_scores`, and what the mass looks like before it is pooled.

        Returns:
            The scores, and for the allocators that follow it the mass, entropy and Gini coefficient
            of each KV head, `[R, G]` float32 each, as `recall.WindowStatistics` defines them
            (PyramidKV's ablation, Table 4). They cost a sort.
        """

    def recent_mass(
        self,
        batch: RecentBatch,
        softmax: Softmax,
        *,
        distance_weight: float,
        log_sum_exp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention that a request's recent queries pay to its context (PyramidInfer, sec. 4.1).

        Of each request, the causal softmax over all visible keys (and the head's sink) is averaged
        over the last `recents[r]` queries, whose weights rise linearly from 1 to `distance_weight`
        (their sum is divided out), and summed over the query heads of a KV head. The context are
        the keys right before those queries; keys before the context take part in the softmax, but
        are not reported.

        Args:
            softmax: as in `window_scores`.
            log_sum_exp: `[T, H]` float32, what `paged_attention` wrote for the recent queries,
                without a sliding window and without the sinks, which are added here. Saves one of
                two passes over K. None: found here; the result is the same but for rounding.

        Returns:
            `[R, G, max(contexts)]` float32; 0 behind `contexts[r]`.
        """

    def select(
        self,
        scores: torch.Tensor,
        prompt_lens: torch.Tensor,
        keeps: torch.Tensor,
        *,
        window: int,
        sinks: int = 0,
        max_keep: int | None = None,
    ) -> torch.Tensor:
        """Which prompt positions each KV head keeps: sinks, the window, and the best of the rest.

        Ties go to the lower position, so the result is a function of the scores alone.

        Args:
            scores: `[R, G, >= max(prompt_lens) - window]` float32, no NaN.
            prompt_lens: `[R]` int32.
            keeps: `[R]` int32 tokens kept a head, `sinks + window <= keeps[r] <= prompt_lens[r]`.
            max_keep: max(keeps); the result is that wide.

        Returns:
            `[R, G, max(keeps)]` int32 positions, ascending; -1 behind `keeps[r]`.
        """

    def compact(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        kept: torch.Tensor,
        prompt_lens: torch.Tensor,
        keeps: torch.Tensor,
        *,
        max_keep: int | None = None,
    ) -> None:
        """Move the kept rows of K and V to the tail of the prompt's range, in place.

        Survivor i of r (in ascending order) goes to position `prompt_lens[r] - keeps[r] + i`, which
        is never below its own: walking from the last survivor down overwrites nothing still needed.
        Bits are moved, not values.

        Args:
            key_cache, value_cache: `[P, G, N, D]` of any element type. block_table: `[>= R, M]`.
            kept: `[R, G, >= max(keeps)]` int32 from `select`; entries behind `keeps[r]` are not
                read.
            prompt_lens, keeps: `[R]` int32. max_keep: max(keeps).
        """

    def kept_mass(
        self,
        mass: torch.Tensor,
        kept: torch.Tensor,
        prompt_lens: torch.Tensor,
        keeps: torch.Tensor,
        *,
        window: int,
    ) -> torch.Tensor:
        """The share of the context's mass that the kept tokens hold; see `recall.kept_mass`."""
