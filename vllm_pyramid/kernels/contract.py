# SPDX-License-Identifier: Apache-2.0
"""The contract of the kernels: the functions that every back end offers.

Three modules implement `Ops`: `reference.py` (plain PyTorch, the oracle of the tests),
`cpu/functions.py` (C++) and `triton/functions.py` (CUDA). On CUDA vLLM's kernels write the cache
and attend; `write_rows` and `paged_attention` serve only layers whose V is in host memory.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch

# Keys from which sharing pays. A request in a group has one more partial result to join, whatever
# their number; measured with bfloat16 on AVX-512-BF16 and float32 on AVX2, 128 keys gain less.
FEWEST_KEYS = 256
# Rows (query tokens times query heads of a KV head) of a group from which sharing pays, unless each
# of its requests has at most `THIN_ROWS` (kFewestRows, kThinRows of csrc/cpu/attention_shared.h).
FEWEST_ROWS, THIN_ROWS = 32, 2
# A prefix is shared in whole tiles of this many keys (kTileKeys of csrc/cpu/kernels.h).
TILE_KEYS = 64
# Rows up to which a request can be in a group (kSplitRows of csrc/cpu/kernels.h).
MOST_ROWS = 32


class Ops(Protocol):
    """The kernels of one device type; a module implements it.

    Every function raises ValueError if shapes, dtypes or strides do not fit; a docstring lists
    further checks. The reference checks less. No function keeps a tensor after it returns, or
    changes one that its docstring does not call written. With zero tokens, requests or blocks
    nothing is done, unless a docstring says otherwise.

    A back end may accept further optional arguments: the reference takes a `compute_dtype`, Triton
    scratch memory and numbers of splits.
    """

    def of_method(self, package: str, /) -> Any:
        """Return the kernels of a package such as `vllm_pyramid.methods.pages.kernels`."""

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

        Args:
            key, value: `[>= T, G, D]`; rows behind T are ignored.
            key_cache, value_cache: `[P, G, N, D]`, written.
            slot_mapping: `[T]` int64, `block * N + row`; negative entries (padding) are skipped.
            key_scale, value_scale: scales of all keys and of all values of the layer, positive.
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

        Args:
            rows: `[>= T, G, D]`; rows behind T are ignored.
            cache: `[P, G, N, D]`, written.
            slot_mapping: `[T]` int64, as in `reshape_and_cache`.
            scale: scale of all numbers of the cache, positive.
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

        Nothing is written for requests without queries. A query that sees no key, such as one at a
        position below `skips[r]`, gets zeros.

        Args:
            out: `[T, H, D]`, written; any floating-point dtype, unit stride in D.
            log_sum_exp: `[T, H]` float32, written if given: the natural logarithm of the sum of
                exp(logit) over the keys that a query sees, scaled and capped, WITHOUT the sink;
                -inf if it sees none. `add_key_mass`, `window_scores` and `recent_mass` accept it,
                add the sink themselves, and save one pass over K.
        """

    def shared_attention(
        self,
        out: torch.Tensor,
        batch: AttentionBatch,
        softmax: Softmax,
        *,
        log_sum_exp: torch.Tensor | None = None,
        fewest_keys: int = FEWEST_KEYS,
    ) -> None:
        """Attend as `paged_attention`, and read pages that requests share once for all of them.

        Requests form a group if the entries of their tables are equal from their skips on, which
        must be equal too; a group of n requests that share k keys saves (n - 1) * k reads of a key.
        A group shares only whole pages before all queries of each request, in whole tiles of
        `TILE_KEYS` keys from the skip on. Its requests have at most `MOST_ROWS` rows each, and
        together `FEWEST_ROWS` or more, unless each has at most `THIN_ROWS`. The layer has one table
        for all KV heads and no sliding window. Where prefixes are nested, the disjoint groups that
        save the most are formed. The groups follow from the tables alone, not from the order of
        requests.

        The partial softmax of a group and that of each request's other keys are joined by their
        maxima and sums (Hydragen, arXiv:2402.05099, section 3.1; ChunkAttention, arXiv:2402.15220,
        section 3.2). A request in a group gets the result of `paged_attention` except for rounding;
        the others get its bits.

        Args:
            out, log_sum_exp: as in `paged_attention`.
            fewest_keys: the fewest keys that a group shares, at least 1.
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

        Args:
            softmax: its sinks lower the weights of their heads, so that the weights of a query sum
                to less than 1. The sliding window is ignored.
            log_sum_exp: `[T, H]` float32 as `paged_attention` wrote it for the window's queries,
                without a sliding window; other rows are not read. It saves the first of two passes
                over K; the result is the same except for rounding.

        Returns:
            `[R, G, max(prompt_lens) - window]` float32; -inf behind `prompt_lens[r] - window`.

        Raises:
            ValueError: the batch holds no request, or no prompt is longer than the window.
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

        Args:
            scores: `[R, G, >= max(prompt_lens) - window]` float32 without NaN, unit stride in the
                last dimension.
            prompt_lens: `[R]` int32.
            keeps: `[R]` int32, tokens that each head keeps, `sinks + window <= keeps[r] <=
                prompt_lens[r]`.
            window, sinks: tokens at the end and at the start of the prompt that are kept in any
                case.
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
        """Move the kept rows of K and V to the end of the prompt's positions, in place, bit by bit.

        Survivor i of r (in ascending order) moves to position `prompt_lens[r] - keeps[r] + i`,
        which is never below its own: a walk from the last survivor down overwrites no row that is
        still needed.

        Args:
            key_cache, value_cache: `[P, G, N, D]`, written; any element type of 1, 2 or 4 bytes.
            block_table: `[>= R, M]` int32.
            kept: `[R, G, >= max(keeps)]` int32 from `select`; entries behind `keeps[r]` are not
                read.
            prompt_lens, keeps: `[R]` int32.
            max_keep: max(keeps).
        """

    def copy_blocks(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """Copy the rows of K and V in whole blocks to other blocks, bit by bit.

        Evictions call this for blocks that other requests will find as they were.

        Args:
            key_cache, value_cache: `[P, G, N, D]`, written; any element type of 1, 2 or 4 bytes.
            sources, targets: `[n]` int32 or int64 block ids. No target is there twice, or among the
                sources.
        """

    def unrankable(
        self, scores: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return which requests have NaN or +inf among the scores that count: `[R]` bool.

        Args:
            scores: `[R, G, columns]` float32, unit stride in the columns.
            firsts, ends: `[R]` int32, the columns that count: `firsts[r] .. ends[r] - 1`, as far as
                they exist.
        """


def of_back_end(name: str) -> Callable[[str], Any]:
    """Return `Ops.of_method` of the back end `name`."""

    @functools.cache
    def of_method(package: str, /) -> Any:
        return importlib.import_module(f"{package}.{name}")

    return of_method
