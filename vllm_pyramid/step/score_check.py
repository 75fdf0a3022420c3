# SPDX-License-Identifier: Apache-2.0
"""Scores that cannot be ranked: found before a layer selects by them. Attention, behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_pyramid.kernels.records import FP8_DTYPES
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.failures import SCORES, Failure, Failures
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload


def mark_wrong_scores(batch: EvictionBatch, scores: torch.Tensor) -> torch.Tensor:
    """Let requests fail that have NaN or +inf among the scores that count; return which: `[S]`.

    The scores, `[S, G, columns]`, of the first `sinks` and last `window` tokens do not count, as
    these stay, nor columns without a token. A token with a score of -inf goes first.
    """
    policy = batch.policy
    counts = batch.host_dead_prefixes + policy.sinks, batch.host_lens - policy.window
    firsts, ends = upload(np.stack(counts).astype(np.int32), scores.device)
    wrong = batch.call.ops.unrankable(scores, firsts, ends)
    reason = (
        f"{batch.where}: the scorer {policy.scorer.kind!r} gave NaN or infinity, which "
        "cannot be ranked"
    )
    batch.evictions.failures.flag(Failure(SCORES, reason), batch.request_ids, wrong)
    return wrong


def mark_wrong_attention(
    failures: Failures, request_ids: Sequence[str], layer: int, rows: torch.Tensor
) -> None:
    """Let requests fail whose last query's attention, `[S, H, D]`, is NaN or infinite, or its sum
    is.

    The query sees every key, so it tells of a NaN anywhere in the cache of the layer, and below.
    """
    sums = rows.float().flatten(1).sum(dim=1)
    wrong = (sums - sums) != 0  # NaN; fewer launches than `isfinite`
    reason = f"layer {layer}: attention is NaN or infinite, so no scores follow from the cache"
    failures.flag(Failure(SCORES, reason), request_ids, wrong)


def check_attention(step: Step, layer: int, out: torch.Tensor) -> None:
    """Let requests fail that are evicted from and whose attention `out`, `[>= T, H, D]`, is wrong.

    `layer` is the last one. A request from which no layer evicts goes on as without a policy.
    Attention that vLLM has rounded to whole numbers tells nothing.
    """
    evictions = step.evictions
    if evictions is None or not out.is_floating_point():
        return
    evicted = np.flatnonzero(evictions.is_reported)
    if not evicted.size:
        return
    ends = evictions.query_ends[evicted]
    if step.layout is not None:
        ends = step.layout.query_starts[layer, evictions.rows[evicted] + 1]
    last = upload(ends.astype(np.int64) - 1, out.device)
    if out.dtype in FP8_DTYPES:  # not every device can index those
        rows = out.view(torch.uint8).index_select(0, last).view(out.dtype)
    else:
        rows = out.index_select(0, last)
    names = [evictions.request_ids[index] for index in evicted.tolist()]
    mark_wrong_attention(step.failures, names, layer, rows)


def replaced(values: torch.Tensor, wrong: torch.Tensor, value: float) -> torch.Tensor:
    """Return `values`, `[S, ...]`, with one value in the rows of requests that have failed.

    What is chosen by it is valid, and belongs to requests that end.
    """
    return values.contiguous().masked_fill_(wrong.view(-1, *[1] * (values.dim() - 1)), value)


def ranked(batch: EvictionBatch, scores: torch.Tensor) -> tuple[EvictionBatch, torch.Tensor] | None:
    """Return the requests that can be selected from, and their scores; None if there is none.

    On the CPU failed requests are left out, and keep what they hold. Elsewhere the host does not
    know them: they are selected from, whatever their scores are.
    """
    mark_wrong_scores(batch, scores)
    if scores.device.type != "cpu":
        return batch, scores
    failed = batch.evictions.failures.of
    rows = [row for row, name in enumerate(batch.request_ids) if name not in failed]
    if len(rows) == len(batch.shortened):
        return batch, scores
    return (batch.only(rows), scores[rows]) if rows else None
