# SPDX-License-Identifier: Apache-2.0
"""What every back end of the kernels offers: their functions.

Three modules are an `Ops`: `reference.py` (plain PyTorch, the oracle), `cpu.py` (C++) and
`functions.py` (CUDA). `ops.get_ops` returns the one of a device.

The records that they take, the legend of shapes and the layout of the cache: `records.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_pyramid.kernels.recall import WindowStatistics
from vllm_pyramid.kernels.records import (
    AttentionBatch,
    Choosers,
    RecentBatch,
    Reduction,
    Softmax,
    WindowBatch,
)


class Ops(Protocol):
    """The kernels of a device; a module is one.

    All raise ValueError where shapes, dtypes or strides do not fit. A back end may take more
    arguments by keyword: `reference.py` a `compute_dtype`, `functions.py` scratch memory.
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
