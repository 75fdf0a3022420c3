# SPDX-License-Identifier: Apache-2.0
"""Launch the kernels of page selection before the first request, on devices that compile them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_pyramid.methods.pages.choosing import TILE, padded
from vllm_pyramid.methods.pages.kernels import device_page_ops
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists

if TYPE_CHECKING:
    from vllm_pyramid.methods.pages import SelectPages
    from vllm_pyramid.methods.pages.step_rows import Bounds
    from vllm_pyramid.methods.pages.summaries import Summaries
    from vllm_pyramid.step.attention_inputs import AttentionInputs


def compile_kernels(
    inputs: AttentionInputs, selection: SelectPages, summaries: Summaries, bounds: Bounds
) -> None:
    """Launch what a step may launch, on made-up `inputs` of `max_seq_len` tokens in block 0."""
    batch, ops, scorer = inputs.batch, inputs.ops, selection.scorer
    size, heads, device = bounds.block_size, inputs.key_cache.shape[1], inputs.query.device
    assert batch.max_seq_len is not None, "the warm-up says how long the table is"
    most = padded(-(-batch.max_seq_len // size), TILE)
    length = min(batch.max_seq_len, batch.block_table.shape[1] * size)
    zero, one = (torch.full((1,), n, dtype=torch.int32, device=device) for n in (0, 1))
    own, pool = device_page_ops(ops), summaries.multiplied()
    if scorer.summary_kind is not None:
        written = (summaries.rows, inputs.key_cache, batch.block_table, zero, one, zero)
        own.summarise_pages(*written, kind=scorer.summary_kind, max_pages=1)
    rows = PageBatch(
        inputs.query[:1],
        batch.block_table,
        *(zero, one * (length - 1), zero),
        size,
        max_pages=most + 1,
        key_scale=inputs.key_scale,
    )
    chosen = PageLists.zeros(1, heads, most, device)
    for keys in (None, inputs.key_cache):  # decode steps summarise what they fill
        own.choose_pages(
            rows,
            inputs.softmax,
            pool,
            one * min(most, bounds.sinks + bounds.recent + 1),
            torch.empty(1, inputs.query.shape[1], most, device=device),
            chosen,
            kind=scorer.score_kind,
            combine=selection.combine,
            sinks=bounds.sinks,
            recent=bounds.recent,
            key_cache=keys,
        )
    out = torch.empty_like(inputs.query[:1])
    for queries in (1, 2):  # with two there are kernels of prompts, too
        for longest in (batch.max_seq_len, most * size):
            read = replace(
                batch,
                query=inputs.query[:1],
                block_table=chosen.block_table,
                seq_lens=chosen.seq_lens,
                skips=chosen.skips,
                max_query_len=queries,
                max_seq_len=longest,
            )
            ops.paged_attention(out, read, inputs.softmax)
