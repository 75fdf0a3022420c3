# SPDX-License-Identifier: Apache-2.0
"""The contract of the kernels: the functions that every back end of them offers.

Three modules implement `Ops`: `reference.py` (plain PyTorch, the oracle of the tests),
`cpu/functions.py` (C++) and `triton/functions.py` (CUDA). `kernels.get_ops` returns the one for a
device. `records.py` describes the records that the functions take, the legend of shapes and the
layout of the cache.

On the CPU the attention back end calls `reshape_and_cache` and `paged_attention` in every layer of
every step. On CUDA vLLM's kernels write the cache and attend, and the plugin calls these functions
only for layers whose V is in host memory: `write_rows`, `copy_pages`, `paged_attention` and
`topn_attention`. Everything that scores, selects and evicts tokens is called alike on both.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from vllm_pyramid.kernels.records import (
    AttentionBatch,
    Choosers,
    RecentBatch,
    Reduction,
    Softmax,
    WindowBatch,
)
from vllm_pyramid.kernels.shared_contract import SharedOps


class Ops(SharedOps, Protocol):
    """The kernels of one device type; a module implements it. `SharedOps` adds shared prefixes, and
    `of_method` finds the kernels that one method alone has.

    Every function raises ValueError if shapes, dtypes or strides do not fit; a docstring lists what
    it checks in addition. The reference trusts its callers and checks less. No function keeps a
    tensor after it returns, and none changes a tensor that its docstring does not call written.

    A back end may accept more keyword arguments, all optional: the reference takes a
    `compute_dtype`, Triton takes scratch memory and numbers of splits.
    """

    def of_method(self, package: str, /) -> Any:
        """Return a method's own kernels for this back end.

        Args:
            package: whose module `reference`, `cpu` or `triton` has them, such as
                `vllm_pyramid.methods.pages.kernels`.
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
        """Write the K and V of new tokens into the cache.

        A cache of 8-bit floats receives the numbers divided by the scales and rounded to nearest,
        ties to even; numbers that are too large become the largest one. Any other cache receives
        the numbers converted to its dtype, and both scales must be 1.

        With zero tokens nothing is written. The CPU back end calls this in every layer.

        Args:
            key: `[>= T, G, D]`; rows behind T are ignored.
            value: as `key`.
            key_cache: `[P, G, N, D]`, written.
            value_cache: as `key_cache`, written.
            slot_mapping: `[T]` int64, `block * N + row`; negative entries (padding) are skipped.
            key_scale: scale of all keys of the layer, positive.
            value_scale: scale of all values of the layer, positive.
        """

    def write_rows(
        self,
        rows: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        scale: float = 1.0,
    ) -> None:
        """Write K alone or V alone, by the rules of `reshape_and_cache`.

        The method with V in host memory calls this on CUDA, where K and V go to different memories.

        Args:
            rows: `[>= T, G, D]`; rows behind T are ignored.
            cache: `[P, G, N, D]`, written.
            slot_mapping: `[T]` int64, as in `reshape_and_cache`.
            scale: scale of all numbers of the cache, positive.
        """

    def copy_pages(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        block_table: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Copy whole pages from one memory to another, bit for bit.

        With zero places nothing is copied. The method with V in host memory calls this on CUDA to
        fetch V to a buffer on the device.

        Args:
            target: `[S, G, N, D]`, written; dense, with pages of whole 4-byte words.
            source: `[P, G, N, D]` of the same dtype and density.
            block_table: `[>= R, M]` int32, the blocks of the source.
            places: `[C, 3]` int32, one row a page: the page of the target, then the row and the
                entry of the block table that name the page of the source.
        """

    def paged_attention(
        self,
        out: torch.Tensor,
        batch: AttentionBatch,
        softmax: Softmax,
        *,
        log_sum_exp: torch.Tensor | None = None,
    ) -> None:
        """Attend causally over the paged cache: prefill chunks and decode steps in one batch.

        With zero requests, and for requests without queries, nothing is written. A query that sees
        no key, as one at a position below `skips[r]`, gets zeros.

        The CPU back end calls this in every layer, the method with V in host memory on CUDA.

        Args:
            out: `[T, H, D]`, written; any floating-point dtype, unit stride in D.
            log_sum_exp: `[T, H]` float32, written if given: the natural logarithm of the sum of
                exp(logit) over the keys that a query sees, scaled and capped, WITHOUT the sink;
                -inf if it sees none. `add_key_mass`, `window_scores` and `recent_mass` accept it as
                it is, add the sink themselves, and save one pass over K.
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
        keys than that uses all. Query heads that share a KV head choose separately, as in the paper
        (KCache, arXiv:2404.18057, section 3).

        With zero requests nothing is written. The method with V in host memory calls this on both
        devices.

        Args:
            out: `[T, H, D]`, written, as in `paged_attention`.
            top_ns: `[R]` int32. A request uses all its keys if its entry is 0, or at least the
                number of keys that its last query sees; it is then attended to as by
                `paged_attention`.
            renormalize: make the weights of the chosen keys sum to 1. Otherwise they keep the
                values that they have in the softmax over all keys and the sink, as in the paper.
            value_rows: `[R]` int64 or None. The number of V rows (of D elements) that request r
                needed is ADDED: if it chooses, one for every chosen key, query and query head;
                otherwise one for every key that its queries see and KV head.
            choosers: what the host knows of the queries that choose. Only Triton uses it, and
                without it reads back from the device.

        Raises:
            ValueError: `top_ns` or `value_rows` has another shape or dtype, or an entry of `top_ns`
                is negative (which Triton, on the device, does not check).
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
        """Add to each visible key what the queries of a step give it, over all its query heads.

        The softmax of `paged_attention` is computed again, without V. With `kind="sum"` its
        probabilities are added up (the accumulated attention of H2O, arXiv:2306.14048). With
        `kind="below_average"` a key counts 1 for every query that gives it less than 1 / (the
        number of keys which that query sees) (Scissorhands, arXiv:2305.17118, the counter of its
        algorithm that compresses the cache).

        With zero requests nothing is added; a query that sees no key adds nothing. The methods that
        accumulate attention call this after a layer's attention, on both devices.

        Args:
            mass: `[P, G, N]` float32, written; unit stride in N, one block for each of the cache.
                Only the slots of visible keys are touched.
            kind: one of `MASS_KINDS`.
            first_queries: `[R]` int32; queries at positions below it add nothing. None: all add.
            log_sum_exp: `[T, H]` float32 as `paged_attention` wrote it for the same batch; the
                sinks are added here. It saves the first of two passes over K. The weights of a
                query then share a factor that differs from 1 by the rounding of its log-sum-exp.

        Raises:
            ValueError: `mass` or `log_sum_exp` has another shape or dtype, or `kind` is unknown.
        """

    def window_scores(
        self,
        batch: WindowBatch,
        softmax: Softmax,
        reduction: Reduction,
        *,
        log_sum_exp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Score every prompt token before the window (SnapKV; PyramidKV, section 4.2).

        For each request, the softmax over ALL its keys (and the head's sink) of the last `window`
        prompt queries (causal inside the window, float32) is summed over those queries, reduced
        over the query heads of a KV head, and pooled along the positions.

        The scorers with an observation window call this
        at the end of a prompt, on both devices.

        Args:
            softmax: its sinks lower the weights of their heads, so that the weights of a query sum
                to less than 1. The sliding window is ignored.
            log_sum_exp: `[T, H]` float32 as `paged_attention` wrote it for the window's queries,
                without a sliding window; other rows are not read, and the sinks are added here. It
                saves the first of two passes over K; the result is the same but for rounding.

        Returns:
            `[R, G, max(prompt_lens) - window]` float32; -inf behind `prompt_lens[r] - window`.

        Raises:
            ValueError: the batch holds no request, or no prompt is longer than the window.
        """

    def recent_mass(
        self,
        batch: RecentBatch,
        softmax: Softmax,
        *,
        distance_weight: float,
        log_sum_exp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum the attention that recent queries pay to their context (PyramidInfer, section 4.1).

        For each request, the causal softmax over all visible keys (and the head's sink) is averaged
        over the last `recents[r]` queries, whose weights rise linearly from 1 to `distance_weight`
        (their sum is divided out), and summed over the query heads of a KV head. The context is the
        `contexts[r]` keys right before those queries; earlier keys take part in the softmax, but
        are not reported.

        The method `pyramidinfer` calls this while it
        thins a prompt, on both devices.

        Args:
            softmax: as in `window_scores`.
            distance_weight: weight of the last query if the first has 1, positive.
            log_sum_exp: as in `window_scores`, for the recent queries.

        Returns:
            `[R, G, max(contexts)]` float32; 0 behind `contexts[r]`.

        Raises:
            ValueError: the batch holds no request.
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
        """Choose the prompt positions that each KV head keeps: sinks, window, best of the rest.

        The lower position wins a tie, so the result is a function of the scores alone.

        The selectors of a policy and `pyramidinfer` call this
        on both devices.

        Args:
            scores: `[R, G, >= max(prompt_lens) - window]` float32 without NaN, unit stride in the
                last dimension.
            prompt_lens: `[R]` int32.
            keeps: `[R]` int32, tokens that each head keeps,
                `sinks + window <= keeps[r] <= prompt_lens[r]`.
            window: tokens at the end of the prompt that are kept in any case.
            sinks: tokens at the start of the prompt that are kept in any case.
            max_keep: max(keeps), the width of the result.

        Returns:
            `[R, G, max(keeps)]` int32 positions, ascending; -1 behind `keeps[r]`.

        Raises:
            ValueError: there is no request.
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
        """Move the kept rows of K and V to the end of the prompt's positions, in place.

        Survivor i of r (in ascending order) moves to position `prompt_lens[r] - keeps[r] + i`,
        which is never below its own: a walk from the last survivor down overwrites no row that is
        still needed. Bits are moved, not values.

        With zero requests nothing is moved. Every eviction calls this, on both devices.

        Args:
            key_cache: `[P, G, N, D]`, written; any element type of 1, 2 or 4 bytes.
            value_cache: as `key_cache`, written.
            block_table: `[>= R, M]` int32.
            kept: `[R, G, >= max(keeps)]` int32 from `select`; entries behind `keeps[r]` are not
                read.
            prompt_lens: `[R]` int32.
            keeps: `[R]` int32.
            max_keep: max(keeps).
        """
