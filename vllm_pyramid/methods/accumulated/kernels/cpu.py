# SPDX-License-Identifier: Apache-2.0
"""`add_key_mass` in C++, as `kernels/cpu/functions.py` calls the other kernels."""

from __future__ import annotations

import torch

from vllm_pyramid.kernels.cpu.attention import attention_record
from vllm_pyramid.kernels.cpu.checks import vector_address
from vllm_pyramid.kernels.cpu.library import run
from vllm_pyramid.kernels.cpu.structs import KEY_MASS
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.methods.accumulated.kernels import MASS_KINDS
from vllm_pyramid.methods.accumulated.kernels.reference import check_mass


def add_key_mass(
    mass: torch.Tensor,
    batch: AttentionBatch,
    softmax: Softmax,
    *,
    kind: str = "sum",
    first_queries: torch.Tensor | None = None,
    log_sum_exp: torch.Tensor | None = None,
) -> None:
    """Add the mass with one thread for each request and KV head.

    Queries are added one after the other, so the way in which a prompt is cut into chunks does not
    change the bits, given the same log-sum-exp.
    """
    check_mass(mass, batch.key_cache, kind)
    first = 0
    if first_queries is not None:
        first = vector_address("first_queries", first_queries, batch.seq_lens.shape[0])
    # C++ uses neither the output nor V here: K stands in for V, which may be in another memory.
    attention = attention_record(batch.query, batch, batch.key_cache, softmax, log_sum_exp)
    own = (mass.data_ptr(), first, *mass.stride()[:2], MASS_KINDS.index(kind))
    run("key_mass", KEY_MASS.pack(attention, *own))
