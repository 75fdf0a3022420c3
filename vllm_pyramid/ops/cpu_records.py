# SPDX-License-Identifier: Apache-2.0
"""The records that the C++ kernels take: csrc/cpu/abi.h in `struct` formats, and the call."""

from __future__ import annotations

import struct

from vllm_pyramid.ops import cpu_library

# The fields of the records in csrc/cpu/abi.h, in order: q for pointers and integers, d for doubles.
ATTENTION = struct.Struct("=35q2d")
KEY_MASS = struct.Struct("=5q")  # behind the fields of attention
TOPN = struct.Struct("=3q")  # likewise
SCORES = struct.Struct("=30q2d")
RECENT_MASS = struct.Struct("=28q3d")
SELECT = struct.Struct("=13q")
COMPACT = struct.Struct("=24q")
CACHE_WRITE = struct.Struct("=22q")


def run(name: str, record: bytes) -> None:
    """Call `pyr_<name>` with a record.

    Raises:
        ValueError: values of tensors do not fit; the reason is the kernel's.
    """
    library = cpu_library.load()
    if getattr(library, f"pyr_{name}")(record):
        raise ValueError(library.pyr_last_error().decode())
