# SPDX-License-Identifier: Apache-2.0
"""V elsewhere on Triton: rows and pages between memories, attention by two tables, choosers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.every_kernel import reference, triton_ops
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.host_values.kernels import Choosers
from vllm_pyramid.methods.host_values.kernels.triton import workspace_cells

LENS, QUERIES = [40, 90, 33, 17], [1, 37, 1, 17]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_are_written_as_with_k(device, dtype):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 3, 24, generator=generator)
    rows = rows.to(torch.float32 if dtype == torch.float32 else torch.bfloat16).to(device)
    slots = torch.tensor([5, -1, 70, 0, 79, -1, 33], device=device)  # fewer than there are rows
    found, right = (torch.zeros(5, 3, 16, 24).to(dtype).to(device) for _ in range(2))
    for ops, cache in ((triton_ops, found), (reference, right)):
        ops.write_rows(rows, cache, slots, scale=0.5 if dtype.itemsize == 1 else 1.0)
    assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))
    assert right.float().abs().sum(dim=(1, 3)).nonzero().shape[0] == 5
    with pytest.raises(ValueError, match=r"rows .* must be \[>= 10, 3, 24\]"):
        triton_ops.write_rows(rows, found, torch.zeros(10, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_pages_are_copied_whole(ints, device, dtype):
    generator = torch.Generator().manual_seed(4)
    source = torch.randint(0, 256, (6, 3, 16, 40 * dtype.itemsize), generator=generator)
    source = source.to(torch.uint8).view(dtype).to(device)
    table = ints([[5, 1, 4], [0, 3, 2], [2, 2, 1]])
    places = torch.tensor([[3, 0, 0], [0, 1, 1], [1, 2, 2]], dtype=torch.int32, device=device)
    found, right = (torch.zeros_like(source[:4]) for _ in range(2))
    for ops, target in ((triton_ops, found), (reference, right)):
        ops.copy_pages(target, source, table, places)
    for page, block in ((3, 5), (0, 3), (1, 1)):
        assert torch.equal(found[page].view(torch.uint8), source[block].view(torch.uint8))
    assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))
    with pytest.raises(ValueError, match="are not alike"):
        triton_ops.copy_pages(found[:, :2], source, table, places)
    with pytest.raises(ValueError, match="must be dense"):
        triton_ops.copy_pages(found.transpose(1, 2), source.transpose(1, 2), table, places)


def copied_apart(paged):
    """Copy V to fewer pages of another memory in another order; return them and their table."""
    used = sorted({int(b) for b in paged.block_table.flatten().tolist()} - {paged.garbage_block})
    values = torch.full_like(paged.value_cache[: len(used) + 1], float("nan"))
    places = {block: len(used) - i for i, block in enumerate(used)} | {paged.garbage_block: 0}
    for block in used:
        values[places[block]] = paged.value_cache[block]
    table = [[places[int(block)] for block in row] for row in paged.block_table.tolist()]
    return values, torch.tensor(table, dtype=torch.int32, device=values.device)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("head_size", "dtype"), [(64, torch.bfloat16), (40, torch.float32)])
def test_attention_by_two_tables(make_paged, device, head_size, dtype, splits):
    paged = make_paged(LENS, 2, head_size, dtype)
    values, value_table = copied_apart(paged)
    batch = paged.batch(QUERIES, LENS, [0, 16, 3, 0], group=3)
    query = batch.query
    apart = replace(batch, value_cache=values, value_table=value_table)
    right = torch.empty(query.shape, dtype=torch.float64, device=device)
    softmax = Softmax(head_size**-0.5)
    reference.paged_attention(right, apart, softmax, compute_dtype=torch.float64)
    together, out = torch.empty_like(query), torch.empty_like(query)
    triton_ops.paged_attention(together, batch, softmax, num_splits=splits)
    triton_ops.paged_attention(out, apart, softmax, num_splits=splits)
    assert torch.equal(out, together)
    error = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), right, rtol=error, atol=error)
    with pytest.raises(ValueError, match="key and value cache must both be"):
        triton_ops.paged_attention(out, replace(apart, value_table=None), softmax)


@pytest.mark.parametrize("at_once", [None, 1, 2])
def test_a_part_of_a_batch_with_little_scratch(make_paged, ints, device, at_once):
    """Let requests 1 to 3 choose, the last among all its keys, for any size of the workspace."""
    paged = make_paged(LENS, 2, 32, torch.float32)
    top_ns = ints([5, 7, 9, 40])
    batch = paged.batch([3, 2, 1, 4], LENS, group=2)
    query, starts = batch.query, batch.query_start_loc
    whole = torch.full_like(query, float("nan"))
    triton_ops.topn_attention(whole, batch, Softmax(0.2), top_ns)
    part = replace(
        batch,
        block_table=paged.block_table[1:],
        query_start_loc=starts[1:],
        seq_lens=batch.seq_lens[1:],
        skips=batch.skips[1:],
        max_query_len=4,
        max_seq_len=90,
    )
    workspace = None
    if at_once is not None:
        workspace = torch.full((at_once * workspace_cells(1, 4, 90, 9),), float("nan"))
        workspace = workspace.to(device)
    pairs = torch.tensor([[0, 0], [0, 1], [1, 0]], dtype=torch.int32, device=device)
    choosers = Choosers(pairs, 9, workspace=workspace)
    out = torch.full_like(query, float("nan"))
    triton_ops.topn_attention(out, part, Softmax(0.2), top_ns[1:], choosers=choosers)
    assert torch.equal(out[3:], whole[3:]) and out[:3].isnan().all()
    alone = replace(part, seq_lens=part.seq_lens[:2], skips=part.skips[:2])
    out.fill_(float("nan"))
    choosers = replace(choosers, alone=True)
    triton_ops.topn_attention(out, alone, Softmax(0.2), top_ns[1:3], choosers=choosers)
    assert torch.equal(out[3:6], whole[3:6]) and out[6:].isnan().all()
    small = replace(choosers, workspace=torch.zeros(100, device=device))
    with pytest.raises(ValueError, match="the workspace has 100 cells; a query of 4 heads"):
        triton_ops.topn_attention(out, alone, Softmax(0.2), top_ns[1:3], choosers=small)
