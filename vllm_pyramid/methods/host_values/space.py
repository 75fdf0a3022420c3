# SPDX-License-Identifier: Apache-2.0
"""How large the host pool is, and what that makes of the device's, page by page."""

from __future__ import annotations

_GIB = 2**30


def gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"


def capped_cache_bytes(
    device_bytes: int, swap_bytes: int | None, *, page_bytes: int, longest_pages: int, longest: int
) -> int:
    """Return the bytes that the device's KV cache may have, so that each page has one on the host.

    ValueError: the host could not hold a single request of `longest` tokens.
    """
    if swap_bytes is None or swap_bytes >= device_bytes:
        return device_bytes
    pages, needed = swap_bytes // page_bytes, longest_pages + 1  # and vLLM's null block
    if pages < needed:
        raise ValueError(
            f"--kv-swap-space {gib(swap_bytes)} holds {pages} pages of V of {page_bytes} bytes; a "
            f"request of max_model_len {longest} tokens needs {needed} ({gib(needed * page_bytes)})"
            ": raise --kv-swap-space or lower --max-model-len"
        )
    return pages * page_bytes


def check_host_memory(
    pool_bytes: int, swap_bytes: int | None, *, free_bytes: int, workers: int
) -> None:
    """Raise ValueError unless the pools of this machine's workers can be allocated."""
    if swap_bytes is not None and pool_bytes > swap_bytes:
        raise ValueError(
            f"the device's KV cache of {gib(pool_bytes)} has pages for which --kv-swap-space "
            f"{gib(swap_bytes)} has no room, because --num-gpu-blocks-override sets their number: "
            "leave the override out, or raise --kv-swap-space"
        )
    if pool_bytes * workers > free_bytes:
        raise ValueError(
            f"V takes {gib(pool_bytes)} of host memory a worker, as much as the device's KV cache, "
            f"{gib(pool_bytes * workers)} for {workers}; this host has {gib(free_bytes)} free: set "
            "a smaller --kv-swap-space (the device's KV cache then shrinks with it) without "
            "--num-gpu-blocks-override, or free memory"
        )
