# SPDX-License-Identifier: Apache-2.0
"""The geometries of models for which `compile_triton.py` compiles every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_pyramid.kernels.records import Softmax


@dataclass(frozen=True)
class Case:
    """One model geometry and the options of a call."""

    name: str
    num_kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype | None = None  # None: that of the queries
    scaled_rows: bool = False  # with a scale for each token and KV head
    joint: bool = True
    window: int = 32
    splits: int = 8
    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    reduce: str = "mean"
    pooling: str = "avg"


MAIN_CASES = (
    Case("head 128, group 4, bf16"),
    Case("head 128, group 4, bf16, int8 rows", cache=torch.int8, scaled_rows=True),
)
MORE_CASES = (
    Case("head 128, group 4, bf16, e4m3 cache", cache=torch.float8_e4m3fn),
    Case("head 128, group 4, bf16, e4m3 rows", cache=torch.float8_e4m3fn, scaled_rows=True),
    Case("head 64, group 8, bf16, int8 rows, window, sinks", head_size=64, group=8,
         cache=torch.int8, scaled_rows=True, sliding_window=128, sinks=True),
    Case("head 256, group 2, bf16, int8 rows, window, cap", head_size=256, group=2,
         cache=torch.int8, scaled_rows=True, sliding_window=4096, soft_cap=50.0),
    Case("head 64, group 8, bf16", head_size=64, group=8, pooling="max", reduce="max"),
    Case("head 80, group 1, fp16", head_size=80, group=1, num_kv_heads=32, dtype=torch.float16),
    Case("head 96, group 3, bf16, one split", head_size=96, group=3, splits=1, window=8),
    Case("head 256, group 2, bf16, window, cap", head_size=256, group=2, sliding_window=4096,
         soft_cap=50.0),
    Case("head 64, group 8, bf16, window, sinks", head_size=64, group=8, sliding_window=128,
         sinks=True),
    Case("head 128, group 32, bf16", group=32, num_kv_heads=1, window=64),
    Case("head 128, group 4, fp32", dtype=torch.float32, joint=False, pooling="none"),
    Case("head 64, group 4, fp32", dtype=torch.float32, head_size=64, reduce="sum"),
)  # fmt: skip


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def softmax_of(case: Case) -> Softmax:
    return Softmax(
        case.head_size**-0.5,
        soft_cap=case.soft_cap,
        sliding_window=case.sliding_window,
        sinks=torch.zeros(case.num_kv_heads * case.group) if case.sinks else None,
    )
