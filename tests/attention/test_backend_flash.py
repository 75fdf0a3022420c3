# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over a cache of 8-bit floats: it gets quantised queries, and scorers do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.plumbing import stand_ins
from vllm_pyramid.attention.backend_flash import PyramidFlashImpl
from vllm_pyramid.attention.head_lists import head_names
from vllm_pyramid.attention.per_head.context import HeadContext
from vllm_pyramid.attention.per_head.lanes import HeadLanes
from vllm_pyramid.kernels import reference
from vllm_pyramid.step.attention_inputs import AttentionInputs, HeadRequests

HEADS, GROUP, N, SIZE, BLOCKS = 2, 2, 16, 32, 9
KEY_SCALE, VALUE_SCALE, QUERY_SCALE = 0.5, 2.0, 0.25


def floats(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer() -> Any:
    """vLLM's layer, as far as its scales are read."""
    scales = {"k": KEY_SCALE, "v": VALUE_SCALE, "q": QUERY_SCALE}
    tensors = {f"_{name}_scale": torch.tensor(scale) for name, scale in scales.items()}
    return SimpleNamespace(_k_scale_float=KEY_SCALE, _v_scale_float=VALUE_SCALE, **tensors)


class Context(SimpleNamespace):
    """A layer's context that keeps what scorers are given, and chooses what is attended to."""

    def __init__(self, choose: Callable[[AttentionInputs], AttentionInputs]) -> None:
        hooks = SimpleNamespace(in_layers=True, attend=(), after_write=())
        of_layer = {"layer": 0, "ranks": None, "rotary": None, "values": None}
        super().__init__(hooks=hooks, tables_per_layer=1, **of_layer)
        self.before_attention = choose
        self.scored: list[AttentionInputs] = []
        self.attention_of = lambda impl: impl.stock_attention
        self.attend = lambda inputs, out: False
        self.after_attention = lambda inputs, out: self.scored.append(inputs)


@pytest.fixture
def impl(monkeypatch: pytest.MonkeyPatch) -> PyramidFlashImpl:
    stand_ins.install_flash_attention(partial(monkeypatch.setattr, raising=False))
    made = PyramidFlashImpl(
        *(HEADS * GROUP, SIZE, SIZE**-0.5, HEADS),
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="fp8",
    )
    assert not made.supports_quant_query_input, "the layer would quantise"
    made.process_weights_after_loading(torch.float32)
    stand_ins.COUNTS.clear()
    return made


def metadata_of(lens: list[int], counts: list[int], table: torch.Tensor) -> Any:
    """FlashAttention's, with what our builder adds; a row longer than the step's tokens."""
    ints = partial(torch.tensor, dtype=torch.int32)
    starts = ints([0, *counts]).cumsum(0, dtype=torch.int32)
    none = "scheduler_metadata", "mm_prefix_query_range_tensor", "rswa_prefix_lens"
    return SimpleNamespace(
        **dict.fromkeys(none),
        num_actual_tokens=sum(counts),
        causal=True,
        max_num_splits=0,
        block_table=table,
        query_start_loc=starts,
        seq_lens=ints(lens),
        max_query_len=max(counts),
        max_seq_len=max(lens),
        kv_step=SimpleNamespace(evictions=None),
        kv_no_skips=torch.zeros_like(ints(lens)),
        kv_offsets=torch.zeros_like(ints(lens)),
    )


def cache_of(heads: int) -> torch.Tensor:
    cache = floats(BLOCKS, heads, N, 2 * SIZE, seed=1)
    return (cache * 4).to(torch.float8_e4m3fn).view(torch.uint8)


def rows_of(tokens: int) -> torch.Tensor:
    """Queries as models give them: next to keys and values, and padded."""
    return floats(tokens + 3, (HEADS * GROUP + 2 * HEADS) * SIZE, seed=2)[
        :, : HEADS * GROUP * SIZE
    ].unflatten(1, (-1, SIZE))


def as_lists(inputs: AttentionInputs) -> AttentionInputs:
    """Each KV head of a row with a list of pages: the row's own, the other way round."""
    requests, names = len(inputs.seq_lens), head_names(cache_of(HEADS))
    table = inputs.block_table[:requests, None].flip(2).expand(-1, HEADS, -1)
    named = table * names.per_block + torch.arange(HEADS)[:, None] * names.per_head
    of_heads = HeadRequests(
        torch.arange(requests * HEADS + 1, dtype=torch.int32),
        inputs.seq_lens.repeat_interleave(HEADS),
    )
    batch = replace(inputs.batch, block_table=named.int())
    return replace(inputs, batch=batch, head_requests=of_heads)


@pytest.mark.parametrize("lists", [False, True])
def test_scorers_look_at_queries_of_full_width(impl: Any, lists: bool) -> None:
    """The table is one layer's; with `lists`, a method has chosen pages of each KV head."""
    lens, counts = ([48, 48], [1, 1]) if lists else ([41, 17], [20, 1])
    table = torch.tensor([[3, 1, 8], [5, 2, 4]], dtype=torch.int32)
    cache, query, layer = cache_of(HEADS), rows_of(sum(counts)), make_layer()
    context = Context(as_lists if lists else lambda inputs: inputs)
    impl.context = context
    out = torch.full(query.shape, torch.nan)
    impl.forward(layer, query, query, query, cache, metadata_of(lens, counts, table), out)
    assert stand_ins.COUNTS["flash attention"] == stand_ins.COUNTS["quantised queries"] == 1
    assert stand_ins.COUNTS["flash attention, one KV head"] == lists
    (scored,) = context.scored
    assert torch.equal(scored.query, query[: sum(counts)])
    expected = torch.empty_like(scored.query)
    batch = scored.batch
    if lists:
        batch = replace(batch, block_table=table.flip(1))
    reference.paged_attention(expected, batch, scored.softmax)
    torch.testing.assert_close(out[: sum(counts)], expected, rtol=0, atol=1e-5)
    assert out[sum(counts) :].isnan().all()


def test_lists_do_not_name_heads_beyond_32_bits(impl: PyramidFlashImpl) -> None:
    """Gaps between pages make more names than the pages have rows."""

    def cache_with(gap: int) -> torch.Tensor:
        shape, of_head = (2**24, HEADS, N, 2 * SIZE), N * 2 * SIZE
        strides = (HEADS * of_head + gap, of_head, 2 * SIZE, 1)
        return torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta")

    assert impl.names_of_heads(cache_with(0)) == (HEADS, 1)
    assert impl.names_of_heads(cache_with(8)) is None


def test_lanes(impl: PyramidFlashImpl) -> None:
    """KV heads with tables of their own: requests of one head, in the order of prompts."""
    counts, lens, no_evictions = [5, 1], [37, 20], cast("Any", None)
    cache, query, layer = cache_of(1), rows_of(sum(counts)), make_layer()
    context = HeadContext(no_evictions, 0, lanes=HeadLanes(HEADS, N))
    impl.context = context
    table = torch.tensor([[1, 5, 7], [2, 3, 6], [8, 4, 0], [4, 1, 0]], dtype=torch.int32)
    of_lanes = [count for count in counts for _ in range(HEADS)]
    metadata = metadata_of([37, 37, 20, 20], of_lanes, table)
    tokens = [list(range(5)), [5]]
    order = [HEADS * t + g for own in tokens for g in range(HEADS) for t in own]
    metadata.kv_order = torch.tensor(order)
    out = torch.full(query.shape, torch.nan)
    context.attention_of(impl)(layer, query, query, query, cache, metadata, out)
    assert stand_ins.COUNTS["flash attention, one KV head"] == 1
    view = cache.view(torch.float8_e4m3fn)
    for row, (own, length) in enumerate(zip(tokens, lens, strict=True)):
        for head in range(HEADS):
            held = table[row * HEADS + head]
            keys, values = (
                (part[held.long(), 0].flatten(0, 1)[:length].float() * scale)
                for part, scale in ((view[..., :SIZE], KEY_SCALE), (view[..., SIZE:], VALUE_SCALE))
            )
            for place, token in enumerate(own):
                seen = length - len(own) + place + 1
                heads = slice(head * GROUP, (head + 1) * GROUP)
                weights = (query[token, heads] @ keys[:seen].T * SIZE**-0.5).softmax(dim=-1)
                right = weights @ values[:seen]
                torch.testing.assert_close(out[token, heads], right, rtol=0, atol=1e-5)
