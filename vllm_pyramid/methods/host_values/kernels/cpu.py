# SPDX-License-Identifier: Apache-2.0
"""The C++ kernel for V in host memory, as `kernels/cpu/functions.py` calls the others."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu.attention import attention_record
from vllm_pyramid.kernels.cpu.checks import vector_address
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import TOPN
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.methods.host_values.kernels import Choosers
from vllm_pyramid.methods.host_values.kernels.reference import (  # pages: not used
    check_value_rows,
    copy_pages,
)

__all__ = ["copy_pages", "topn_attention"]


def topn_attention(
    out: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    top_ns: torch.Tensor,
    *,
    renormalize: bool = False,
    value_rows: torch.Tensor | None = None,
    choosers: Choosers | None = None,
) -> None:
    """Attend with one thread for each choosing request and KV head; others: `paged_attention`."""
    del choosers
    attention = attention_record(out, batch, batch.value_cache, softmax, None)
    requests = batch.seq_lens.shape[0]
    rows_address = 0
    if value_rows is not None:
        check_value_rows(value_rows, requests)
        rows_address = value_rows.data_ptr()
    top_n_address = vector_address("top_ns", top_ns, requests)
    run("topn_attention", TOPN.pack(attention, top_n_address, rows_address, renormalize))
