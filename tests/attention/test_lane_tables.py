# SPDX-License-Identifier: Apache-2.0
"""Lanes on CUDA devices: the numbers of those on the CPU, at addresses that never change."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention.test_head_lanes import GROUP, G, Layer, N, oracle
from tests.attention.test_head_lanes import D as SIZE
from tests.shifted_worker import Host, launch_tables
from vllm_pyramid.attention.backend_cuda import PyramidImplMixin
from vllm_pyramid.attention.backend_flash import PyramidFlashBuilder
from vllm_pyramid.attention.backend_triton import PyramidTritonBuilder
from vllm_pyramid.attention.per_head.context import HeadContext
from vllm_pyramid.attention.per_head.lane_tables import LaneTables
from vllm_pyramid.attention.per_head.lanes import HeadLanes
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.step.step import Step

L = 2
ROWS, TOKENS, BLOCKS = 6, 240, 8


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_tables(monkeypatch, Host())


def make_tables() -> LaneTables:
    """With a column more than all heads need, as vLLM's alignment may add."""
    return LaneTables(slice(0, L), G, ROWS, TOKENS, BLOCKS * G + 1, N, torch.device("cpu"))


def fill(tables: LaneTables, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for table in tables.of_runner:
        table.copy_(torch.randint(1, 999, table.shape, generator=generator))


def write(
    tables: LaneTables,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    skips: Any,
    host_lens: Any,
    num_tokens: int | None,
) -> None:
    """One step, whose tables vLLM has filled."""
    num_reqs = 0 if host_lens is None else len(host_lens)
    tables.find_slots(seq_lens, starts, num_reqs, num_tokens)
    tables.update(seq_lens, skips, host_lens)


def starts_of(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def common_of(counts: Sequence[int], padded: int = 0) -> Any:
    """vLLM's metadata of a step, as far as they are read."""
    return SimpleNamespace(
        num_reqs=len(counts) + padded,
        num_actual_tokens=sum(counts) + padded,
        query_start_loc=starts_of([*counts, *[0] * padded]),
        slot_mapping=torch.zeros(sum(counts) + padded),
        max_query_len=max(counts),
        max_seq_len=10**6,
    )


# Prompts, prompts and requests that decode, and steps that only decode, with fewer requests.
STEPS = [
    ([61, 48, 73, 58], [61, 48, 73, 58]),
    ([50, 1, 23, 100], [111, 49, 96, 158]),
    ([1, 1, 1], [112, 97, 159]),
    ([1, 1, 1, 1, 1], [25, 49, 1, 190, 24]),
]


def test_lanes_are_those_of_the_cpu() -> None:
    tables, random = make_tables(), np.random.default_rng(0)
    on_cpu = HeadLanes(G, N)
    persistent = (*tables.tables, tables.lens, tables.slots, tables.query_starts, tables.order)
    addresses = [tensor.data_ptr() for tensor in persistent]
    for seed, (counts, lens) in enumerate(STEPS):
        fill(tables, seed)
        skips = random.integers(0, np.array(lens) - np.array(counts) + 1, (L * G, len(lens)))
        skips = (skips // N * N).astype(np.int32)
        step = Step.nothing(L * G, len(lens))
        step.skips = skips
        seq_lens, starts = torch.tensor(lens, dtype=torch.int32), starts_of(counts)
        write(tables, seq_lens, starts, skips, np.array(lens, np.int32), sum(counts))
        expected = on_cpu.of_step(step, starts, seq_lens, max(lens))
        rows, places = len(lens) * G, sum(counts) * G
        for layer in range(L):
            common = common_of(counts)
            tables.describe(common, layer)
            filled = tables.of_runner[layer]
            assert torch.equal(tables.slots_of(layer, sum(counts)), on_cpu.slots(expected, filled))
            assert torch.equal(common.slot_mapping, tables.slots_of(layer, sum(counts)))
            assert (tables.slots[layer, places:] == -1).all()
            assert torch.equal(common.query_start_loc, expected.query_starts)
            assert (common.num_reqs, common.num_actual_tokens) == (rows, places)
            order = tables.order_of(common)
            assert (order is None) == (expected.order is None)
            if order is not None:
                assert torch.equal(order, expected.order)
            of_lanes = skips[layer * G : (layer + 1) * G].T.reshape(-1)
            held = np.repeat(lens, G) - of_lanes
            assert common.seq_lens.tolist() == held.tolist()
            assert tables.skips[layer, :rows].tolist() == of_lanes.tolist()
            assert common.max_seq_len == held.max()
            for lane, whole in enumerate(on_cpu.tables(expected, filled)):
                used = -(-int(held[lane]) // N)
                first = int(of_lanes[lane]) // N
                read = common.block_table_tensor[lane, :used]
                assert torch.equal(read, whole[first : first + used])
    assert [tensor.data_ptr() for tensor in persistent] == addresses


def test_padding_of_a_captured_batch_reads_and_writes_nothing() -> None:
    tables = make_tables()
    fill(tables, 0)
    counts, lens = STEPS[1]
    nothing = np.zeros((L * G, len(lens)), np.int32)
    host = np.array(lens, np.int32)
    write(tables, torch.from_numpy(host), starts_of(counts), nothing, host, sum(counts))
    # Two requests decode, in a graph of four: their skips are known, and those behind are zeros.
    skips = np.full((L * G, 2), 2 * N, np.int32)
    seq_lens = torch.tensor([112, 50, 0, 0], dtype=torch.int32)
    write(tables, seq_lens, starts_of([1, 1, 0, 0]), skips, np.array([112, 50], np.int32), 2)
    common = common_of([1, 1], padded=2)
    tables.describe(common, 1)
    assert common.seq_lens.tolist() == [112 - 2 * N] * G + [50 - 2 * N] * G + [0] * 2 * G
    assert common.query_start_loc.tolist() == [*range(2 * G), *[2 * G] * (2 * G + 1)]
    assert len(common.slot_mapping) == 4 * G
    assert (common.slot_mapping[: 2 * G] > 0).all() and (common.slot_mapping[2 * G :] == -1).all()
    assert tables.order_of(common) is None


def test_a_capture_reads_the_null_block_and_writes_nothing() -> None:
    """vLLM prepares no step for it, and builds metadata of whatever batch it captures."""
    tables = make_tables()
    fill(tables, 0)
    host = np.array([30, 40], np.int32)
    nothing = np.zeros((L * G, 2), np.int32)
    write(tables, torch.from_numpy(host), starts_of([30, 40]), nothing, host, 70)
    tables.forget_step()
    for counts in ([1, 1, 1, 1], [60, 60], [1, 1]):
        common = common_of(counts)
        tables.describe(common, 0)
        starts = common.query_start_loc.tolist()
        lens = np.repeat(counts, G).tolist()
        assert starts == [0, *np.cumsum(lens)]
        assert (common.slot_mapping == -1).all() and not common.block_table_tensor.any()
        assert common.max_seq_len == 10**6  # vLLM's bound holds for each replay
        assert common.seq_lens.tolist() == [1] * len(lens)
    # A step without real requests forgets slots as well.
    write(tables, torch.from_numpy(host), starts_of([30, 40]), nothing, host, 70)
    assert (tables.slots != -1).any()
    longest = torch.full((2,), BLOCKS * N, dtype=torch.int32)
    write(tables, longest, starts_of([1, 1]), nothing, None, None)
    assert (tables.slots == -1).all() and tables.max_lens is None
    assert torch.equal(tables.tables[0][:G, :BLOCKS].T.flatten(), tables.of_runner[0][0, :-1])


def test_each_layers_part_begins_as_a_tensor_of_its_own_would() -> None:
    for rows, tokens in ((1, 1), (3, 5), (5, 7)):
        tables = LaneTables(slice(0, 3), G, rows, tokens, 5, N, torch.device("cpu"))
        assert tables.lens.shape == (3, rows * G) and tables.slots.shape[1] >= tokens * G
        for layer in range(3):
            for tensor in (tables.tables, tables.of_runner, tables.lens, tables.slots):
                part = tensor[layer].storage_offset() * tensor[layer].element_size()
                assert part % 16 == 0


# Attention ----------------------------------------------------------------------------------------


class Stock:
    """vLLM's implementation, which knows nothing of skips; its cache is K and V."""

    num_heads, num_kv_heads = G * GROUP, G

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any
    ) -> None:
        own: Any = self
        assert (own.num_heads, own.num_kv_heads) == (GROUP, 1)
        batch = AttentionBatch(
            *(query, *cache, metadata.block_table_tensor, metadata.query_start_loc),
            *(metadata.seq_lens, torch.zeros_like(metadata.seq_lens)),
        )
        reference.paged_attention(output, batch, Softmax(SIZE**-0.5))


class Impl(PyramidImplMixin, Stock):
    """Ours over it."""


def make_impl(tables: LaneTables) -> Impl:
    impl: Any = Impl()
    hooks: Any = SimpleNamespace(in_layers=[])
    tracker: Any = None
    impl.context = HeadContext(tracker, 0, hooks, shifted=tables, lanes=HeadLanes(G, N))
    found: Impl = impl
    return found


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [50, 1, 23, 82], [61, 48, 73, 130]])
def test_each_head_attends_to_what_it_holds(counts: list[int]) -> None:
    """In decode steps, mixed ones and whole prompts; written to slots that were NaN before."""
    lens = [61, 48, 73, 130]
    layer, on_cpu = Layer(lens), HeadLanes(G, N)
    tables = LaneTables(
        *(slice(0, 1), G, len(layer.table), 400, layer.table.shape[1], N, torch.device("cpu"))
    )
    tables.of_runner[0].copy_(layer.table)
    skips = np.array([[0, 0, 0, 0], [24, 24, 0, 96], [48, 0, 72, 24]])
    skips = (np.minimum(skips, np.array(lens) - np.array(counts)) // N * N).astype(np.int32)
    seq_lens, host_lens = torch.tensor(lens, dtype=torch.int32), np.array(lens, np.int32)
    step = Step.nothing(G, len(lens))
    before = on_cpu.of_step(step, starts_of(lens), seq_lens, max(lens))
    layer.write(on_cpu, reference, before, lens)
    new = [rows[:, -count:] for rows, count in zip(layer.rows, counts, strict=True)]
    keys, values = torch.cat(new, dim=1)
    now = on_cpu.of_step(Step.nothing(G, len(lens)), starts_of(counts), seq_lens, max(lens))
    slots = on_cpu.slots(now, layer.table)
    for cache in (layer.keys, layer.values):
        cache[slots // N, :, slots % N] = torch.nan
    write(tables, seq_lens, starts_of(counts), skips, host_lens, sum(counts))
    reference.reshape_and_cache(
        *(on_cpu.as_one_head(keys), on_cpu.as_one_head(values), layer.keys, layer.values),
        tables.slots_of(0, sum(counts)),
    )
    metadata = common_of(counts)
    tables.describe(metadata, 0)
    tables.complete(metadata, metadata, 0)
    query = torch.randn(sum(counts) + 3, 2 * G * GROUP, SIZE)[:, ::2]  # padded, of wider rows
    out = torch.full(query.shape, torch.nan)
    impl: Any = make_impl(tables)
    attend = impl.context.attention_of(impl)
    attend(None, query, None, None, (layer.keys, layer.values), metadata, out)
    expected = oracle(layer, query[: sum(counts)], counts, skips)
    torch.testing.assert_close(out[: sum(counts)].double(), expected, rtol=0, atol=3e-6)
    assert out[sum(counts) :].isnan().all()
    assert (impl.num_heads, impl.num_kv_heads) == (G * GROUP, G)


def test_fused_output_quantisation_is_refused() -> None:
    impl, rows = make_impl(make_tables()), torch.zeros(1, G * GROUP, SIZE)
    metadata = SimpleNamespace(kv_step=SimpleNamespace(evictions=None))
    with pytest.raises(NotImplementedError, match="no fused output quantisation"):
        impl.forward(None, rows, rows, rows, rows, metadata, rows, torch.ones(1))


# Builders -----------------------------------------------------------------------------------------


def test_rows_are_split_up_to_the_batch_that_vllm_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    def of_triton(self: Any, spec: Any) -> None:
        self.seq_threshold_3D, self.max_seqs_64_segments, self.num_heads_q = 8, 2, 4 * G
        self.softmax_segm_output = torch.zeros(8, 4 * G, 16, 32)
        self.softmax_segm_max, self.softmax_segm_expsum = torch.zeros(2, 8, 4 * G, 16)

    def of_flash(self: Any, spec: Any) -> None:
        self.max_cudagraph_size = 48

    monkeypatch.setattr(TritonAttentionMetadataBuilder, "__init__", of_triton)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", of_flash)
    spec: Any = SimpleNamespace(tables_per_layer=G)
    builders: list[Any] = [PyramidTritonBuilder(spec) for _ in range(2)]
    for builder in builders:
        assert (builder.seq_threshold_3D, builder.max_seqs_64_segments) == (8 * G, 2 * G)
        assert builder.num_heads_q == 4
        assert builder.softmax_segm_output.shape == (8 * G, 4, 16, 32)
        assert builder.softmax_segm_max.shape == (8 * G, 4, 16)
        assert builder.softmax_segm_output is builders[0].softmax_segm_output
    flash: Any = PyramidFlashBuilder(spec)
    assert flash.max_cudagraph_size == 48 * G
