# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of evictions before the first request, by made-up evictions.

Triton compiles a kernel for each set of its constants, and a constant may follow from a length. The
first request with such a length would wait for the compiler, with all others in its step; with
vLLM's `--jit-monitor-mode error` the engine would end. So each kernel is launched here with all
lengths that lead to different constants. The tables hold block 0 alone, vLLM's null block, which no
request uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.plan import EvictionPoint
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_rows import padded_width
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.window_mass import window_mass

# Of the blocks that are copied before an eviction: from a table, and from the host.
INDICES = (torch.int32, torch.int64)
# No constant of a kernel follows from a length beyond this.
LONGEST = 4096


@torch.inference_mode()
def compile_kernels(
    layers: Sequence[tuple[LayerContext, Any]],
    max_model_len: int,
    dtype: torch.dtype,
    *,
    traces: bool = False,
) -> None:
    """Launch the kernels of evictions, once for each kind of layer.

    Args:
        layers: contexts with vLLM's attention layers, whose caches exist. dtype: of the queries.
        traces: whether to launch the kernels of traces, too.
    """
    kinds = set()
    for context, layer in layers:
        policy = context.tracker.policy
        policies = [
            part for part in (policy, policy.inner_policy) if part is not None and part.evicts
        ]
        queries = max((max(part.window, part.trace_window) for part in policies), default=0)
        queries = max(1, min(queries, max_model_len))
        call = _made_up_inputs(context, layer, queries, dtype)
        # Everything of a layer that kernels depend on.
        query, cache, softmax = call.query, call.key_cache, call.softmax
        switches = softmax.soft_cap != 0, softmax.sinks is not None
        kind = (query.shape[1:], cache.shape[1:], cache.stride(), cache.dtype, switches)
        if kind in kinds:
            continue
        kinds.add(kind)
        calls = [call]
        table = call.block_table
        width = padded_width(table.shape[1])
        joins = context.step_end is not None or policy.schedule.waits_for_orders
        if joins and width > table.shape[1]:  # the width of tables that are joined
            padded = table.new_zeros(1, width)
            calls.append(replace(call, batch=replace(call.batch, block_table=padded)))
        for part in policies:
            for length in lengths_of(part, max_model_len):
                # A front that differs from the policy's is selected by other kernels.
                for front in (0, part.sinks + 1):
                    for one in calls:
                        _evict(one, part, length, front, context.tracker.num_layers, traces)
        if policies:
            block, target = (torch.zeros(1, dtype=t, device=query.device) for t in INDICES)
            call.ops.copy_blocks(*call.moved, block, target)
        starts = call.batch.query_start_loc.clamp(max=1)
        single = replace(call.batch, query=query[:1], query_start_loc=starts, max_query_len=1)
        for length in _powers_of_two(1, max_model_len):
            for hooks in context.hooks.cache:
                batch = replace(single, max_seq_len=length)
                hooks.compile_kernels(replace(call, batch=batch))
    shifted = layers[0][0].shifted
    assert shifted is not None
    shifted.warm_up()


def lengths_of(policy: Policy, max_model_len: int) -> list[int]:
    """Return lengths of prompts whose evictions together launch every variant.

    The constants that follow from a length are the next power of two of the length, or of the
    tokens in front of the window.
    """
    least = policy.sinks + policy.window + 2
    longest = min(max_model_len, LONGEST + policy.window)
    lengths = {
        min(power + more, longest)
        for power in _powers_of_two(least, LONGEST)
        for more in (0, policy.window)
    }
    return sorted(length for length in {*lengths, least} if least <= length <= longest)


def _powers_of_two(first: int, last: int) -> Iterator[int]:
    """Yield powers of two: from the greatest up to `first` to the least from `last` on."""
    power = 1 << (first.bit_length() - 1)
    yield power
    while power < last:
        power *= 2
        yield power


def _made_up_inputs(
    context: LayerContext, layer: Any, queries: int, dtype: torch.dtype
) -> AttentionInputs:
    """Return the attention of one request whose blocks are all block 0, in the layer's cache."""
    assert context.shifted is not None, "kernels are compiled where tables are shifted"
    impl, shifted, tables = layer.impl, context.shifted, context.tables_per_layer
    width = shifted.tables[shifted.place(context.layer)].shape[1]
    device, heads = shifted.lens.device, impl.num_heads // tables  # each table evicts by itself
    call: AttentionInputs = impl.call_of(
        layer,
        torch.zeros(queries, heads, impl.head_size, dtype=dtype, device=device),
        layer.kv_cache,
        torch.zeros(1, width, dtype=torch.int32, device=device),
        torch.arange(2, dtype=torch.int32, device=device) * queries,
        torch.ones(1, dtype=torch.int32, device=device),
        shifted.no_skips[:1],
        shifted.no_skips[:1],
        max_query_len=queries,
        max_seq_len=1,
    )
    return replace(call, layer=context.layer * tables)


def _evict(
    call: AttentionInputs, policy: Policy, length: int, front: int, num_layers: int, traces: bool
) -> None:
    """Score, select and compact a prompt of `length` tokens, whose first `front` ones stay."""
    keeps = np.full(num_layers, policy.sinks + policy.window + 1)
    queries, tokens = np.array([[len(call.query)], [length]], np.int32)
    plan = EvictionPoint.of(length, 1, int(keeps[0]), keeps, fill_blocks=False, front=front)
    evictions = StepEvictions(
        request_ids=["made up"],
        rows=np.zeros(1, np.int64),
        query_ends=queries,
        query_lens=queries,
        prompt_lens=tokens,
        points=tokens,
        plans=[plan],
        eviction_numbers=np.ones(1, np.int64),
        end_numbers=np.ones(1, np.int64),
        intervals=np.zeros(1, np.int64),
        previous_skips=np.zeros((num_layers, 1), np.int32),
        block_size=call.key_cache.shape[2],
        copies=[None],
        keep=[()],
    )
    batch = evictions.batch(call, policy, np.zeros(1, np.int64))
    if traces:
        window_mass(batch)
    scores = policy.scorer.compiled(batch)
    call.ops.unrankable(scores, batch.dead_prefixes, batch.lens)
    if not front or scores.shape[2] >= length:  # scores without a window know no other front
        batch.compact(batch.select(scores))
    for failure in evictions.failures.of.values():
        raise RuntimeError(f"policy {policy.name!r} failed on a made-up prompt: {failure.reason}")
