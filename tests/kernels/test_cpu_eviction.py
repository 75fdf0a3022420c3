# SPDX-License-Identifier: Apache-2.0
"""The C++ window scores, selection, compaction and cache writes against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.arguments import check_no_requests, take_softmax
from tests.kernels.every_kernel import cpu, reference
from tests.kernels.readers import READERS, window_scores
from vllm_pyramid.kernels.records import GQA_REDUCTIONS, POOLINGS, Reduction, Softmax


def scores_of(module: Any, batch: Any, window: int, **options: Any) -> torch.Tensor:
    softmax = take_softmax(options, batch.query.shape[2] ** -0.5)
    return window_scores(module, batch.attention(), softmax, window=window, **options)


@pytest.mark.parametrize("gqa_reduce", GQA_REDUCTIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kernel_size", [1, 5, 7, 31])
def test_reductions_and_pooling(make_batch, check_reader, gqa_reduce, pooling, kernel_size) -> None:
    batch = make_batch([90, 45, 17], [16, 32, 16], group=3, layout="rows", block_size=8)
    options = {"gqa_reduce": gqa_reduce, "pooling": pooling, "kernel_size": kernel_size}
    options |= {"window": 16, "soft_cap": 2.5 if kernel_size == 7 else 0.0}
    check_reader(READERS["window scores"], batch.attention(), **options)


@pytest.mark.parametrize("given", [False, True])
def test_sinks_far_from_the_logits(make_batch, each_isa, given) -> None:
    """Check the limits: a weightless sink keeps the bits, one that takes all leaves nothing."""
    batch = make_batch([300, 57], [20, 16], group=2)
    lse, out = torch.empty(batch.query.shape[:2]), torch.empty_like(batch.query)
    cpu.paged_attention(out, batch.attention(), Softmax(0.125), log_sum_exp=lse)
    options = {"window": 8, "log_sum_exp": lse if given else None}
    for _ in each_isa():
        plain = scores_of(cpu, batch, **options)
        nothing = scores_of(cpu, batch, sinks=torch.full((4,), -math.inf), **options)
        assert torch.equal(nothing, plain)
        for sink in (100.0, 1e30):
            everything = scores_of(cpu, batch, sinks=torch.full((4,), sink), **options)
            assert everything[~plain.isneginf()].abs().max() < 1e-30


@pytest.mark.parametrize("window", [1, 9, 64])
def test_windows(make_batch, check_reader, two_threads, window) -> None:
    batch = make_batch([1025, 65, 2048], [64, 64, 64], group=4).attention()
    check_reader(READERS["window scores"], batch, window=window)


def test_scores_without_room_for_the_logits(make_batch) -> None:
    """Compare logits that are kept with more than 64 MiB, which are computed twice: same bits."""
    batch = make_batch([2100] * 2, [64] * 2, kv_heads=2, group=8, head_size=32)
    how = (Softmax(0.2), Reduction())
    alone = [cpu.window_scores(batch.one(r).windows(64), *how) for r in range(2)]
    repeated, prompts = torch.tensor([0, 1] * 10), batch.windows(64)
    many = replace(
        prompts,
        block_table=prompts.block_table[repeated].contiguous(),
        query_ends=prompts.query_ends[repeated].contiguous(),
        prompt_lens=prompts.prompt_lens[repeated].contiguous(),
    )
    found = cpu.window_scores(many, *how)
    for i, r in enumerate(repeated.tolist()):
        assert torch.equal(found[i], alone[r][0])


def test_longer_output_on_request(make_batch) -> None:
    batch = make_batch([60, 40], [8, 8])
    wide = scores_of(cpu, batch, window=8, max_prompt_len=100)
    assert wide.shape == (2, 2, 92)
    assert wide[:, :, 52:].isneginf().all()
    assert torch.equal(wide[:, :, :52], scores_of(cpu, batch, window=8))


def test_bad_scores_raise(make_batch) -> None:
    batch, wide = make_batch([60, 40], [8, 8]), make_batch([60], [8], head_size=520)
    long = replace(batch, seq_lens=torch.tensor([60, 4000], dtype=torch.int32))
    for wrong, message, options in (
        (make_batch([60, 40], [60, 40]), "1 is 40; it must exceed window = 40", {"window": 40}),
        (batch, "query_ends of request 0 is 8", {"window": 9}),
        (batch, "gqa_reduce 'median'", {"gqa_reduce": "median"}),
        (batch, "kernel_size 4 must be positive and odd", {"kernel_size": 4}),
        (batch, "more than the output holds", {"max_prompt_len": 50}),
        (batch, r"sinks has dtype torch\.float64", {"sinks": torch.zeros(4).double()}),
        (wide, r"head size 520: .* up to 512", {}),
        (long, "request 1 has 4000 tokens", {}),
    ):
        with pytest.raises(ValueError, match=message):
            scores_of(cpu, wrong, **{"window": 8, **options})


VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-30, 1e-42, math.inf, -math.inf, 3.0]


@st.composite
def selections(draw: st.DrawFn) -> dict[str, Any]:
    """Select from ragged rows with many equal scores, with budgets from the least to all."""
    window, sinks = draw(st.integers(0, 9)), draw(st.integers(0, 4))
    heads = draw(st.integers(1, 3))
    lens = draw(st.lists(st.integers(window + sinks + 1, 300), min_size=1, max_size=3))
    keeps = [draw(st.integers(max(1, window + sinks), n)) for n in lens]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(lens), heads, max(lens) - window)
    if draw(st.booleans()):
        scores = torch.tensor(VALUES)[torch.randint(len(VALUES), shape, generator=generator)]
    else:
        scores = torch.randn(shape, generator=generator)
    return {
        "scores": scores,
        "prompt_lens": torch.tensor(lens, dtype=torch.int32),
        "keeps": torch.tensor(keeps, dtype=torch.int32),
        "window": window,
        "sinks": sinks,
    }


@settings(max_examples=150)
@given(selections())
def test_select_is_exact(arguments: dict[str, Any]) -> None:
    assert torch.equal(cpu.select(**arguments), reference.select(**arguments))


def test_select_many_threads(two_threads) -> None:
    scores = torch.randn(3, 4, 20000).round(decimals=2)
    prompt_lens = torch.tensor([20000, 777, 12345], dtype=torch.int32)
    keeps = torch.tensor([2048, 64, 12345], dtype=torch.int32)
    arguments = (scores[..., :-8], prompt_lens, keeps)  # a view: rows are not contiguous
    found = cpu.select(*arguments, window=8, sinks=4, max_keep=12400)
    assert torch.equal(found[..., :12345], reference.select(*arguments, window=8, sinks=4))
    assert (found[..., 12345:] == -1).all()


@settings(max_examples=60)
@given(
    selections(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.sampled_from([(16, 64), (8, 128), (16, 24), (16, 512)]),
    st.booleans(),
)
def test_compact_moves_bits(arguments, dtype, shape, planes) -> None:
    kept = reference.select(**arguments)
    requests, heads = kept.shape[:2]
    block_size, head_size = shape
    entries = -(-int(arguments["prompt_lens"].max()) // block_size)
    blocks = requests * entries + 2
    bits = torch.randint(256, (blocks, heads, 2 * block_size, head_size * dtype.itemsize)).byte()
    memory = bits.view(dtype)
    if not planes:
        memory = memory.view(blocks, heads, block_size, 2 * head_size)
    half = block_size if planes else head_size
    table = torch.randperm(blocks)[: requests * entries].view(requests, entries).int()
    lens = (arguments["prompt_lens"], arguments["keeps"])
    found, right = memory.clone(), memory.clone()
    for module, target in ((cpu, found), (reference, right)):
        key, value = target.split(half, dim=2 if planes else 3)
        module.compact(key, value, table, kept, *lens)
    assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("module", [cpu, reference])
def test_no_requests(make_batch: Any, module: Any) -> None:
    """Refuse a batch without requests where a result would have no width; else do nothing."""
    check_no_requests(module, make_batch([40], [1]))


def test_bad_selections_raise() -> None:
    lens, keeps = torch.tensor([30], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    scores = torch.zeros(1, 2, 22)
    for message, arguments, options in (
        (r"keeps of request 0 is 20, outside sinks \+ window = 21", (lens, keeps), {"sinks": 13}),
        (r"is 31, outside .* prompt_lens = 30", (lens, keeps + 11), {}),
        ("22 columns", (lens + 1, keeps), {}),
        ("more than the output holds", (lens, keeps), {"max_keep": 19}),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.select(scores, *arguments, window=8, **options)
    with pytest.raises(ValueError, match="float32"):
        cpu.select(scores.double(), lens, keeps, window=8)


def test_bad_compactions_raise() -> None:
    cache, table = torch.zeros(2, 1, 16, 64), torch.tensor([[0, 1]], dtype=torch.int32)
    lens, keeps = torch.tensor([30], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    before = cache.clone()

    def refused(message: str, kept: list[int], keeps: torch.Tensor = keeps) -> None:
        with pytest.raises(ValueError, match=message):
            cpu.compact(cache, cache, table, torch.tensor([[kept]], dtype=torch.int32), lens, keeps)

    refused("not strictly ascending", [4, 4, 5])
    refused("not strictly ascending", [4, 3, 5])
    refused("spans -1 .. 5", [-1, 4, 5])
    refused("spans 1 .. 30", [1, 4, 30])
    refused("has 2 columns", [1, 4])
    refused("outside 0 .. prompt_lens = 30", [1, 4], keeps + 28)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 512])
def test_reshape_and_cache(two_threads, tokens, dtype, head_size) -> None:
    memory = torch.randn(40, 2, 32, head_size).to(dtype)
    packed = torch.randn(tokens, 8, head_size).to(dtype)  # rows of a fused projection: strided
    key, value = packed[:, 4:6], packed[:, 6:]
    slots = torch.randperm(640)[:tokens]
    slots[1::4] = -1
    found, right = memory.clone(), memory.clone()
    for module, target in ((cpu, found), (reference, right)):
        module.reshape_and_cache(key, value, target[:, :, :16], target[:, :, 16:], slots)
    assert torch.equal(found, right)


def test_reshape_and_cache_converts_and_pads() -> None:
    memory = torch.zeros(4, 2, 32, 64, dtype=torch.bfloat16)
    key, value = torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    slots = torch.arange(5)  # fewer than the padded tokens
    cpu.reshape_and_cache(key, value, memory[:, :, :16], memory[:, :, 16:], slots)
    assert torch.equal(memory[0, :, :5], key[:5].bfloat16().transpose(0, 1))
    assert torch.equal(memory[0, :, 16:21], value[:5].bfloat16().transpose(0, 1))
    assert memory[0, :, 5:16].abs().max() == 0


def test_bad_slots_raise() -> None:
    memory, key = torch.zeros(4, 2, 32, 64), torch.randn(3, 2, 64)
    caches = (memory[:, :, :16], memory[:, :, 16:])
    with pytest.raises(ValueError, match=r"slot 64, but the cache has 64 \(4 blocks of 16\)"):
        cpu.reshape_and_cache(key, key, *caches, torch.tensor([0, 64, 1]))
    with pytest.raises(ValueError, match="int64"):
        cpu.reshape_and_cache(key, key, *caches, torch.tensor([0, 1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="4 slots"):
        cpu.reshape_and_cache(key, key, *caches, torch.arange(4))
    assert memory.abs().max() == 0
