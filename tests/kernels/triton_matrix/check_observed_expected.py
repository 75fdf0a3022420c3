# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected` against the reference in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.arguments import head_sinks
from tests.kernels.every_kernel import reference, triton_ops
from tests.kernels.test_cpu_observed_expected import Scored
from tests.methods.views import cos_sin
from vllm_pyramid.attention.cache_parts import parts_of_scaled_rows
from vllm_pyramid.kernels.records import FP8_DTYPES, Softmax, WindowBatch
from vllm_pyramid.methods.observed_expected.kernels import ScoreShape
from vllm_pyramid.step.rotary import Rotary


@dataclass(frozen=True)
class Case:
    """One model's heads and one policy. `rotated`: channels that turn; None for no embedding."""

    kv_heads: int = 2
    group: int = 4
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    queries: int = 16
    window: int = 24
    sinks: int = 4
    kernel_size: int = 21
    expected: float = 0.25
    positions: int = 512
    cap: float = 0.0
    learned: bool = False
    rotated: int | None = 64
    halves: bool = True

    @property
    def shape(self) -> ScoreShape:
        return ScoreShape(self.sinks, self.window, self.kernel_size, self.expected)

    @property
    def softmax(self) -> Softmax:
        own = head_sinks(self.kv_heads * self.group, torch.float32) if self.learned else None
        return Softmax(self.size**-0.5, self.cap, sinks=own)


CASES = {
    "llama": Case(kv_heads=1, size=128, rotated=128),
    "phi": Case(kv_heads=2, group=1, size=96, dtype=torch.float16, rotated=48),
    "gemma": Case(kv_heads=1, group=2, size=256, rotated=256, cap=5.0),
    "gpt-oss": Case(group=8, learned=True, rotated=64, window=16),
    "glm": Case(kv_heads=1, group=16, size=128, rotated=64, halves=False),
    "float32": Case(kv_heads=1, group=3, dtype=torch.float32, learned=True, cap=4.0),
    "no embedding": Case(group=3, rotated=None, size=32, dtype=torch.float16),
    "one query": Case(queries=1, window=1, sinks=0, kernel_size=1, size=32, rotated=32),
    "many queries": Case(kv_heads=1, group=2, queries=80, window=90, sinks=1, expected=2.0),
    "odd queries": Case(kv_heads=1, queries=5, window=7, kernel_size=63, positions=3),
    "observed alone": Case(expected=0.0, learned=True),
}


def made(make_paged, ints, case: Case, lens: list[int], starts: list[int], device) -> Scored:
    """Make requests with NaN in front of `starts`, and their queries to come."""
    paged = make_paged(lens, case.kv_heads, case.size, case.dtype, joint=case.size == 64)
    for r, start in enumerate(starts):
        block = int(paged.block_table[r, 0])
        for cache in (paged.key_cache, paged.value_cache):
            cache[block, :, :start] = math.nan
    ends, total = [], 0
    for gap in range(len(lens)):
        total += gap + case.queries
        ends.append(total)
    generator = torch.Generator().manual_seed(0)
    heads = case.kv_heads * case.group
    query = torch.randn(total + 1, heads, case.size, generator=generator)
    query += torch.randn(heads, case.size, generator=generator)  # queries of a head are alike
    query = query.to(case.dtype).to(device)
    batch = WindowBatch(
        *(query, paged.key_cache, paged.block_table, ints(ends), ints(lens), case.queries)
    )
    softmax = case.softmax
    if softmax.sinks is not None:
        softmax = replace(softmax, sinks=softmax.sinks.to(device))
    future = futures(case, batch, ints(lens), device) if case.expected else None
    return Scored(batch, paged.value_cache, softmax, case.shape, future, ints(starts))


def futures(case: Case, batch: WindowBatch, lens, device, dtype=torch.float32) -> torch.Tensor:
    """Return the queries to come by Triton, after a comparison with the reference."""
    rotary = None
    if case.rotated is not None:
        table = cos_sin(case.rotated, 400) * 1.3  # scaled, and shorter than the positions to come
        rotary = Rotary(table.to(dtype).to(device), case.halves)
    arguments = (batch.query, batch.query_ends, lens, rotary)
    options = {"queries": case.queries, "positions": case.positions}
    wanted = reference.future_queries(*arguments, **options, compute_dtype=torch.float64)
    found = triton_ops.future_queries(*arguments, **options)
    assert found.is_contiguous() and wanted.shape == found.shape
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-5)
    return found


def check(own: Scored, *, rtol: float = 2e-4, **more: torch.Tensor) -> torch.Tensor:
    found = own.by(triton_ops, **more)
    wanted = own.by(reference, compute_dtype=torch.float64, **more)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-8)
    shape, heads = own.shape, own.batch.key_cache.shape[1]
    starts, lens = own.starts.tolist(), own.batch.prompt_lens.tolist()
    for row, (start, n) in enumerate(zip(starts, lens, strict=True)):
        inside = found[row, :, start + shape.sinks : n - shape.window]
        total = torch.full((heads,), 1.0 + shape.expected, device=found.device)
        torch.testing.assert_close(inside.sum(dim=-1), total, rtol=1e-5, atol=0)
        assert found[row, :, :start].isneginf().all() and found[row, :, n:].isneginf().all()
        assert not found[row, :, start : start + shape.sinks].any()
        assert not found[row, :, n - shape.window : n].any()
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_scores(make_paged, ints, device, name):
    case = CASES[name]
    least = case.window + case.sinks
    lens, starts = [least + 20, least + 131, 2 * least + 40], [0, 7, 15]
    own = made(make_paged, ints, case, lens, starts, device)
    found = check(own)
    if case.expected:  # both parts matter
        alone = replace(own, shape=replace(own.shape, expected=0.0), future=None)
        first = alone.by(triton_ops)
        assert (found - first).nan_to_num(0.0).abs().max() > 1e-3
    if case.learned:
        other = replace(own, softmax=replace(own.softmax, sinks=None))
        assert not torch.allclose(other.by(triton_ops), found)


def test_long_requests_in_several_splits_and_tiles(make_paged, ints, device):
    """One request's last split lies inside its window; sums are of two tiles of columns."""
    case = Case(kv_heads=1, group=2, learned=True)
    check(made(make_paged, ints, case, [520, 1100], [0, 3], device))


def test_a_batch_changes_no_bit(make_paged, ints, device):
    case = Case(kv_heads=1, group=2)
    own = made(make_paged, ints, case, [90, 600], [2, 0], device)
    both = own.by(triton_ops)
    for row, n in enumerate([90, 600]):
        part = own.row(row)
        assert torch.equal(part.by(triton_ops)[0], both[row, :, :n])
        wider = replace(part, batch=replace(part.batch, max_prompt_len=1500))
        assert torch.equal(wider.by(triton_ops)[0, :, :n], both[row, :, :n])


def test_a_request_of_which_everything_stays_has_zeros(make_paged, ints, device):
    own = made(make_paged, ints, Case(kv_heads=1, group=2), [28, 24, 60, 33], [0, 0, 0, 7], device)
    found = own.by(triton_ops)
    wanted = own.by(reference, compute_dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=1e-8)
    assert not found[0, :, :28].any() and not found[3, :, 7:33].any() and found[2, :, 4:36].all()


@pytest.mark.parametrize("place", [0, 33, 60], ids=["sink", "inside", "window"])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_nan_reaches_the_scores_of_its_head_alone(make_paged, ints, device, which, place):
    """In V of the window, or of sinks that no pooling reaches, it reaches none."""
    own = made(make_paged, ints, Case(group=1, kernel_size=3), [70, 80], [0, 0], device)
    whole = own.by(triton_ops)
    cache = own.batch.key_cache if which == "keys" else own.values
    cache[own.batch.block_table[1, place // 16].long(), 1, place % 16] = math.nan
    found = own.by(triton_ops)
    wanted = own.by(reference, compute_dtype=torch.float64)
    wrong = found.isnan()
    assert torch.equal(wrong, wanted.isnan()) and torch.equal(found[~wrong], whole[~wrong])
    assert wrong[1, 1, 4:56].all() == (which == "keys" or place == 33)


def test_no_starts_are_zeros(make_paged, ints, device):
    own = made(make_paged, ints, Case(kv_heads=1), [70, 60], [0, 0], device)
    found = own.by(triton_ops)
    without = replace(own, starts=None).by(triton_ops)
    assert torch.equal(found, without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", FP8_DTYPES, ids=["e4m3", "e5m2"])
def test_caches_of_8_bit_floats(make_paged, ints, device, stored, dtype):
    own = made(make_paged, ints, Case(kv_heads=1, dtype=torch.float32), [70, 99], [0, 9], device)
    batch = own.batch
    keys, query = (batch.key_cache / 0.37).to(stored), batch.query.to(dtype)
    batch = replace(batch, query=query, key_cache=keys, key_scale=0.37)
    check(replace(own, batch=batch, values=own.values.to(stored)))


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "e4m3"])
def test_rows_with_scales_of_their_own(make_paged, ints, device, stored):
    case = Case(kv_heads=2, group=2, dtype=torch.float32)
    own = made(make_paged, ints, case, [70, 99], [0, 9], device)
    shape = (*own.values.shape[:3], 2 * (case.size + 4))
    memory = torch.int8 if stored == torch.int8 else torch.uint8
    parts = parts_of_scaled_rows(torch.zeros(shape, dtype=memory, device=device), stored)
    sizes = torch.rand(shape[:3], generator=torch.Generator().manual_seed(5)) * 4 + 0.1
    for cache, numbers, scales in (
        (own.batch.key_cache, parts.keys, parts.scales["key_scales"]),
        (own.values, parts.values, parts.scales["value_scales"]),
    ):
        rows = cache * sizes.to(device)[..., None]
        scales.copy_(rows.abs().amax(dim=-1) / (127.0 if stored == torch.int8 else 448.0))
        number = rows.nan_to_num(0.0) / scales.nan_to_num(1.0)[..., None]
        numbers.copy_((number.round() if stored == torch.int8 else number).to(stored))
    batch = replace(own.batch, key_cache=parts.keys, key_scales=parts.scales["key_scales"])
    own, scales = replace(own, batch=batch, values=parts.values), parts.scales["value_scales"]
    found = check(own, value_scales=scales)
    other = own.by(triton_ops, value_scales=torch.ones_like(scales))
    assert not torch.allclose(other, found)


def test_the_embedding_may_be_of_the_models_dtype(make_paged, ints, device):
    case = Case(kv_heads=1)
    own = made(make_paged, ints, case, [70], [0], device)
    futures(case, own.batch, ints([300]), device, torch.bfloat16)


def test_blocks_beyond_32_bit_offsets(make_huge, ints, device):
    """Use offsets above 2**31 elements, where a 32-bit product would wrap."""
    stride, size = 2**30, 64
    flat = make_huge(2 * stride + 8192, torch.bfloat16)
    shape, strides = (3, 1, 16, size), (stride, 1, size, 1)
    caches = flat.as_strided(shape, strides), flat[4096:].as_strided(shape, strides)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(shape, generator=generator).bfloat16().to(device) for _ in "kv"]
    query = torch.randn(16, 2, size, generator=generator).bfloat16().to(device)
    future = torch.randn(2, 2, 8, size, generator=generator).to(device)
    found = []
    for keys, values in (caches, data):
        keys.copy_(data[0])
        values.copy_(data[1])
        arguments = (ints([[2, 0, 1], [2, 1, 0]]), ints([8, 16]), ints([40, 33]))
        batch = WindowBatch(query, keys, *arguments, window=8)
        found.append(
            triton_ops.observed_expected_scores(
                batch, values, Softmax(0.125), ScoreShape(1, 8, 3), future=future
            )
        )
    assert torch.equal(found[0], found[1]) and found[0][:, :, 1:25].min() > 0
