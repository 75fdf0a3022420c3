# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels: the functions of `reference.py`, whose docstrings are the contract.

A call packs its arguments into one record (csrc/cpu/abi.h) and hands over its address: a few
microseconds, no tensor is created. What costs nothing is checked here, what needs the values of
tensors in C++; both raise ValueError.

Supported: float32, bfloat16 and float16 caches, head sizes that are multiples of 8 up to 256.
"""

from __future__ import annotations

import struct

import torch

from vllm_pyramid.ops import cpu_library
from vllm_pyramid.ops.cpu_library import current_isa, set_isa
from vllm_pyramid.ops.recall import WindowStatistics, kept_mass
from vllm_pyramid.ops.reference import GQA_REDUCTIONS, POOLINGS
from vllm_pyramid.ops.reference_mass import MASS_KINDS, check_mass
from vllm_pyramid.ops.topn import check_value_rows

__all__ = [
    "add_key_mass",
    "available",
    "compact",
    "current_isa",
    "kept_mass",
    "load_error",
    "paged_attention",
    "recent_mass",
    "reshape_and_cache",
    "select",
    "set_isa",
    "topn_attention",
    "window_scores",
]

MAX_HEAD_SIZE = 256
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INT32_MAX = 2**31 - 1

# The fields of the records in csrc/cpu/abi.h, in order: q for pointers and integers, d for doubles.
_ATTENTION = struct.Struct("=34q2d")
_KEY_MASS = struct.Struct("=5q")  # behind the fields of attention
_TOPN = struct.Struct("=3q")  # likewise
_SCORES = struct.Struct("=29q2d")
_RECENT_MASS = struct.Struct("=27q3d")
_SELECT = struct.Struct("=13q")
_COMPACT = struct.Struct("=24q")
_CACHE_WRITE = struct.Struct("=22q")


def load_error() -> str:
    """Why the library cannot be used and what to do about it; empty where it can."""
    try:
        cpu_library.load()
    except cpu_library.LibraryError as error:
        return str(error)
    return ""


def available() -> bool:
    """Whether the kernels can be used.

    Raises:
        ValueError: `VLLM_PYRAMID_CPU_ISA` asks for what this CPU lacks.
    """
    return not load_error()


def _run(name: str, record: bytes) -> None:
    library = cpu_library.load()
    if getattr(library, f"pyr_{name}")(record):
        raise ValueError(library.pyr_last_error().decode())


def _check_cache(name: str, cache: torch.Tensor) -> tuple[int, ...]:
    if cache.dim() != 4:
        raise ValueError(f"{name} must be [P, G, N, D], got shape {tuple(cache.shape)}")
    if cache.stride(3) != 1:
        raise ValueError(
            f"{name} must have unit stride in its last dimension, got {cache.stride()}"
        )
    return cache.stride()[:3]


def _check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[int, ...]:
    strides = _check_cache("key_cache", key_cache) + _check_cache("value_cache", value_cache)
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            "key_cache and value_cache differ: "
            f"{tuple(key_cache.shape)} {key_cache.dtype}, "
            f"{tuple(value_cache.shape)} {value_cache.dtype}"
        )
    return strides


def _dtype_code(name: str, tensor: torch.Tensor) -> int:
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; the C++ kernels take float32, bfloat16 and float16"
        )
    return code


def _check_heads(name: str, tensor: torch.Tensor, heads: int, head_size: int) -> tuple[int, int]:
    """`tensor` is `[T, heads, head_size]`, or `heads` a multiple; returns its outer strides."""
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) != 3 or shape[2] != head_size or heads == 0 or shape[1] % heads or not shape[1]:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; the cache has {heads} KV heads of {head_size}, so "
            f"it must be [T, a multiple of {heads}, {head_size}]"
        )
    if strides[2] != 1:
        raise ValueError(f"{name} must have unit stride in its last dimension, got {strides}")
    return strides[0], strides[1]


def _check_head_size(head_size: int) -> None:
    if head_size % 8 or not 8 <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(
            f"head size {head_size}: the C++ kernels take multiples of 8 up to {MAX_HEAD_SIZE}"
        )


def _vector(name: str, tensor: torch.Tensor, length: int) -> int:
    """The address of a contiguous int32 vector of `length`."""
    if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.shape[0] != length:
        raise ValueError(
            f"{name} must be int32 [{length}], got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if length > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride(0)}")
    return tensor.data_ptr()


def _table(table: torch.Tensor, requests: int) -> int:
    """The row stride of a block table."""
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] < requests:
        raise ValueError(
            f"block_table must be int32 [>= {requests}, M], got {table.dtype} {tuple(table.shape)}"
        )
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"rows of block_table must be contiguous, got {table.stride()}")
    return table.stride(0)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `reference.reshape_and_cache`."""
    strides = _check_caches(key_cache, value_cache)
    blocks, heads, block_size, head_size = key_cache.shape
    if key.dtype != key_cache.dtype or value.dtype != key_cache.dtype:
        key, value = key.to(key_cache.dtype), value.to(key_cache.dtype)
    key_strides = _check_heads("key", key, heads, head_size)
    value_strides = _check_heads("value", value, heads, head_size)
    tokens = slot_mapping.shape[0]
    if key.shape[1] != heads or value.shape[1] != heads:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must have the cache's "
            f"{heads} KV heads"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping must be int64 [T], got {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
        )
    if min(key.shape[0], value.shape[0]) < tokens or (tokens > 1 and slot_mapping.stride(0) != 1):
        raise ValueError(
            f"slot_mapping must be contiguous and no longer than key and value, got {tokens} slots "
            f"of stride {slot_mapping.stride(0)} for {key.shape[0]} and {value.shape[0]} tokens"
        )
    record = _CACHE_WRITE.pack(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        *(key_cache.element_size(), tokens, heads, head_size, block_size, blocks),
        *key_strides,
        *value_strides,
        *strides,
        torch.get_num_threads(),
    )
    _run("reshape_and_cache", record)


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """See `reference.paged_attention`. Queries that see nothing get zeros.

    A request's result does not depend on the rest of the batch, on the number of threads, or on
    where in its table the visible positions lie: the same tokens give the same bits.
    """
    inputs = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, skips)
    options = (scale, sliding_window, soft_cap, sinks)
    _run("paged_attention", _attention_record(out, *inputs, *options))


def add_key_mass(
    mass: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kind: str = "sum",
    first_queries: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> None:
    """See `reference_mass.add_key_mass`. Two passes over K, one thread a request and KV head.

    Queries are added one after the other: how a prompt is cut into chunks does not change the bits.
    The maxima are not needed here.
    """
    del max_query_len, max_seq_len
    check_mass(mass, key_cache, kind)
    first = 0
    if first_queries is not None:
        first = _vector("first_queries", first_queries, seq_lens.shape[0])
    inputs = (query, key_cache, key_cache, block_table, query_start_loc, seq_lens, skips)
    options = (scale, sliding_window, soft_cap, sinks)
    record = _attention_record(query, *inputs, *options)
    own = (mass.data_ptr(), first, *mass.stride()[:2], MASS_KINDS.index(kind))
    _run("key_mass", record + _KEY_MASS.pack(*own))


def topn_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    top_ns: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    renormalize: bool = False,
    value_rows: torch.Tensor | None = None,
) -> None:
    """See `topn.topn_attention`.

    Requests that use all their keys get the bits of `paged_attention`.
    """
    inputs = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, skips)
    options = (scale, sliding_window, soft_cap, sinks)
    record = _attention_record(out, *inputs, *options)
    requests = seq_lens.shape[0]
    rows_address = 0
    if value_rows is not None:
        check_value_rows(value_rows, requests)
        rows_address = value_rows.data_ptr()
    top_n_address = _vector("top_ns", top_ns, requests)
    _run("topn_attention", record + _TOPN.pack(top_n_address, rows_address, renormalize))


def _attention_record(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> bytes:
    """The checked arguments of attention as csrc/cpu/abi.h wants them."""
    strides = _check_caches(key_cache, value_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    _check_head_size(head_size)
    query_strides = _check_heads("query", query, kv_heads, head_size)
    out_strides = _check_heads("out", out, kv_heads, head_size)
    tokens, heads = query.shape[:2]
    if out.shape != query.shape:
        raise ValueError(f"out {tuple(out.shape)} and query {tuple(query.shape)} must be alike")
    requests = seq_lens.shape[0]
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if sliding_window < 0 or soft_cap < 0:
        raise ValueError(f"sliding_window {sliding_window} and soft_cap {soft_cap} must be >= 0")
    sinks_address = sinks_code = 0
    if sinks is not None:
        sinks_address, sinks_code = sinks.data_ptr(), _dtype_code("sinks", sinks)
        if sinks.shape != (heads,) or (heads > 1 and sinks.stride(0) != 1):
            raise ValueError(f"sinks must be contiguous [{heads}], got {tuple(sinks.shape)}")
    return _ATTENTION.pack(
        out.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_table.data_ptr(),
        _vector("query_start_loc", query_start_loc, requests + 1),
        _vector("seq_lens", seq_lens, requests),
        _vector("skips", skips, requests),
        sinks_address,
        *(_dtype_code("out", out), _dtype_code("query", query)),
        *(_dtype_code("key_cache", key_cache), sinks_code),
        *(tokens, heads, kv_heads, head_size, block_size, blocks, requests, block_table.shape[1]),
        *out_strides,
        *query_strides,
        *strides,
        _table(block_table, requests),
        *(min(sliding_window, INT32_MAX), torch.get_num_threads()),
        *(scale, soft_cap),
    )


def window_scores(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ends: torch.Tensor,
    prompt_lens: torch.Tensor,
    *,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    gqa_reduce: str = "mean",
    pooling: str = "avg",
    kernel_size: int = 5,
    max_prompt_len: int | None = None,
    statistics: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, WindowStatistics]:
    """See `reference.window_scores`."""
    key_strides = _check_cache("key_cache", key_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    _check_head_size(head_size)
    query_strides = _check_heads("query", query, kv_heads, head_size)
    requests = prompt_lens.shape[0]
    if gqa_reduce not in GQA_REDUCTIONS or pooling not in POOLINGS:
        raise ValueError(
            f"gqa_reduce {gqa_reduce!r} must be one of {GQA_REDUCTIONS} and pooling {pooling!r} "
            f"one of {POOLINGS}"
        )
    if window < 1 or kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"window {window} must be >= 1 and kernel_size {kernel_size} odd")
    if soft_cap < 0 or requests == 0:
        raise ValueError(f"soft_cap {soft_cap} must be >= 0 and requests {requests} >= 1")
    longest = int(prompt_lens.max()) if max_prompt_len is None else max_prompt_len
    if longest <= window:
        raise ValueError(f"prompts of {longest} tokens have none before a window of {window}")
    out = torch.empty((requests, kv_heads, longest - window), dtype=torch.float32)
    numbers = torch.empty((3, requests, kv_heads), dtype=torch.float32) if statistics else None
    record = _SCORES.pack(
        out.data_ptr(),
        0 if numbers is None else numbers.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        _vector("query_ends", query_ends, requests),
        _vector("prompt_lens", prompt_lens, requests),
        *(_dtype_code("query", query), _dtype_code("key_cache", key_cache)),
        *(query.shape[0], query.shape[1], kv_heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], longest - window),
        *query_strides,
        *key_strides,
        _table(block_table, requests),
        *(window, GQA_REDUCTIONS.index(gqa_reduce), POOLINGS.index(pooling), kernel_size),
        torch.get_num_threads(),
        *(scale, soft_cap),
    )
    _run("window_scores", record)
    return out if numbers is None else (out, WindowStatistics(*numbers))


def recent_mass(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ends: torch.Tensor,
    seq_lens: torch.Tensor,
    skips: torch.Tensor,
    recents: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float,
    distance_weight: float,
    soft_cap: float = 0.0,
    max_context: int | None = None,
) -> torch.Tensor:
    """See `reference.recent_mass`."""
    key_strides = _check_cache("key_cache", key_cache)
    blocks, kv_heads, block_size, head_size = key_cache.shape
    _check_head_size(head_size)
    query_strides = _check_heads("query", query, kv_heads, head_size)
    requests = seq_lens.shape[0]
    if not scale > 0 or soft_cap < 0 or not distance_weight > 0:
        raise ValueError(
            f"scale {scale} and distance_weight {distance_weight} must be positive, soft_cap "
            f"{soft_cap} at least 0"
        )
    columns = int(contexts.max()) if max_context is None else max_context
    out = torch.zeros((requests, kv_heads, columns), dtype=torch.float32)
    record = _RECENT_MASS.pack(
        out.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        block_table.data_ptr(),
        _vector("query_ends", query_ends, requests),
        _vector("seq_lens", seq_lens, requests),
        _vector("skips", skips, requests),
        _vector("recents", recents, requests),
        _vector("contexts", contexts, requests),
        *(_dtype_code("query", query), _dtype_code("key_cache", key_cache)),
        *(query.shape[0], query.shape[1], kv_heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], columns),
        *query_strides,
        *key_strides,
        *(_table(block_table, requests), torch.get_num_threads()),
        *(scale, soft_cap, distance_weight),
    )
    _run("recent_mass", record)
    return out


def select(
    scores: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    max_keep: int | None = None,
) -> torch.Tensor:
    """See `reference.select`."""
    if scores.dim() != 3 or scores.dtype != torch.float32 or scores.stride(2) != 1:
        raise ValueError(
            f"scores must be float32 [R, G, columns] with unit stride in the last dimension, got "
            f"{scores.dtype} {tuple(scores.shape)}, strides {scores.stride()}"
        )
    requests, heads, columns = scores.shape
    if window < 0 or sinks < 0 or requests == 0:
        raise ValueError(f"window {window}, sinks {sinks} must be >= 0, requests {requests} >= 1")
    longest = int(keeps.max()) if max_keep is None else max_keep
    out = torch.empty((requests, heads, max(longest, 0)), dtype=torch.int32)
    record = _SELECT.pack(
        out.data_ptr(),
        scores.data_ptr(),
        _vector("prompt_lens", prompt_lens, requests),
        _vector("keeps", keeps, requests),
        *(requests, heads, longest, columns, scores.stride(0), scores.stride(1), window, sinks),
        torch.get_num_threads(),
    )
    _run("select", record)
    return out


def compact(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kept: torch.Tensor,
    prompt_lens: torch.Tensor,
    keeps: torch.Tensor,
    *,
    max_keep: int | None = None,
) -> None:
    """See `reference.compact`. Any element type; `max_keep` is not needed here."""
    del max_keep
    strides = _check_caches(key_cache, value_cache)
    blocks, heads, block_size, head_size = key_cache.shape
    requests = prompt_lens.shape[0]
    if kept.dtype != torch.int32 or kept.dim() != 3 or kept.shape[:2] != (requests, heads):
        raise ValueError(
            f"kept must be int32 [{requests}, {heads}, columns], got {kept.dtype} "
            f"{tuple(kept.shape)}"
        )
    if kept.shape[2] > 1 and kept.stride(2) != 1:
        raise ValueError(f"rows of kept must be contiguous, got strides {kept.stride()}")
    record = _COMPACT.pack(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_table.data_ptr(),
        kept.data_ptr(),
        _vector("prompt_lens", prompt_lens, requests),
        _vector("keeps", keeps, requests),
        *(key_cache.element_size(), heads, head_size, block_size, blocks, requests),
        *(block_table.shape[1], kept.shape[2]),
        *strides,
        *(_table(block_table, requests), kept.stride(0), kept.stride(1), torch.get_num_threads()),
    )
    _run("compact", record)
