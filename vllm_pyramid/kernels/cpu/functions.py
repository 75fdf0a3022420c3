# SPDX-License-Identifier: Apache-2.0
"""The back end in C++ for the CPU: this module implements `Ops` of `contract.py`.

Python checks shapes, dtypes and strides, C++ the values of tensors. Caches are float32, bfloat16,
float16, float8_e4m3fn or float8_e5m2; head sizes are multiples of 8 up to 512.
"""

from __future__ import annotations

from vllm_pyramid.kernels.contract import of_back_end
from vllm_pyramid.kernels.cpu import library as cpu_library
from vllm_pyramid.kernels.cpu.attention import paged_attention, reshape_and_cache, shared_attention
from vllm_pyramid.kernels.cpu.eviction import compact, select, window_scores
from vllm_pyramid.kernels.cpu.library import current_isa, set_isa
from vllm_pyramid.kernels.reference import (
    copy_blocks,
    unrankable,
    write_rows,  # not used on the CPU
)

__all__ = [
    "compact",
    "copy_blocks",
    "current_isa",
    "load_error",
    "of_method",
    "paged_attention",
    "reshape_and_cache",
    "select",
    "set_isa",
    "shared_attention",
    "unrankable",
    "window_scores",
    "write_rows",
]

of_method = of_back_end("cpu")


def load_error() -> str:
    """Load the library; return why that fails and what to do, or "". ValueError: as `load`."""
    try:
        cpu_library.load()
    except cpu_library.LibraryError as error:
        return str(error)
    return ""
