# SPDX-License-Identifier: Apache-2.0
"""The part of the kernels' contract that reads shared prefixes once: a part of `contract.py`."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_pyramid.kernels.records import AttentionBatch, Softmax

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


class SharedOps(Protocol):
    """The kernels that let requests read pages together; each back end has them."""

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
