# SPDX-License-Identifier: Apache-2.0
"""The C++ turns of the queries to come against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.every_kernel import cpu, reference
from tests.methods.views import cos_sin
from vllm_pyramid.kernels.cpu.structs import PyrFutureQueries
from vllm_pyramid.kernels.records import WindowBatch
from vllm_pyramid.methods.observed_expected.kernels import cpu as own_cpu
from vllm_pyramid.step.rotary import Rotary

pytestmark = pytest.mark.cpu


def windows(make_batch: Callable[..., Any], **options: Any) -> WindowBatch:
    """Return three requests of which the last 16 queries are turned, among others."""
    found: WindowBatch = make_batch([1100, 57, 300], [16, 17, 18], **options).windows(16)
    return found


@pytest.mark.parametrize("rotated", [None, 64, 32])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_to_come(make_batch, two_threads, rotated, halves, dtype) -> None:
    """Turn by an embedding that scales, whose table ends within the positions to come."""
    batch = windows(make_batch, dtype=dtype, group=3)
    table = None if rotated is None else (1.3 * cos_sin(rotated, 1500)).to(dtype)
    arguments = (batch.query, batch.query_ends, torch.tensor([1099, 56, 2000], dtype=torch.int32))
    rotary = None if table is None else Rotary(table, halves)
    options = {"queries": 16, "positions": 512}
    right = reference.future_queries(*arguments, rotary, **options, compute_dtype=torch.float64)
    found = cpu.future_queries(*arguments, rotary, **options)
    torch.testing.assert_close(found, right, rtol=2e-5, atol=1e-5)
    rows = (batch.query, *(x[1:2] for x in arguments[1:]))
    assert torch.equal(cpu.future_queries(*rows, rotary, **options)[0], found[1])
    if rotary is not None:
        other = cpu.future_queries(*arguments, replace(rotary, halves=not halves), **options)
        assert not torch.allclose(found, other)


def test_bad_arguments_raise(make_batch) -> None:
    batch = windows(make_batch)
    lasts = batch.prompt_lens - 1

    def refused(message: str, *changed: Any, **options: Any) -> None:
        arguments = (*changed, *(batch.query, batch.query_ends, lasts, None)[len(changed) :])
        with pytest.raises(ValueError, match=message):
            cpu.future_queries(*arguments, **{"queries": 16, "positions": 8, **options})

    query, ends = batch.query, batch.query_ends
    refused("query_ends of request 0 is 15", query, ends - 1)
    refused("query_ends of request 2", query, ends + 1)
    refused(
        "the last of the 16 queries of request 1 stands at position 14", query, ends, lasts - 42
    )
    refused("66 channels cannot turn", query, ends, lasts, Rotary(torch.zeros(4, 66)))
    refused("rows of cos_sin must be contiguous", query, ends, lasts, Rotary(torch.zeros(8, 4).T))
    refused(
        "cos_sin has dtype torch.float64", query, ends, lasts, Rotary(torch.zeros(4, 8).double())
    )
    refused("query must have unit stride", query.mT.contiguous().mT)
    refused("last_positions must be int32", query, ends, lasts.long())
    refused("positions 0 must be at least 1", positions=0)
    refused("at least one request", query, ends[:0], lasts[:0])


def test_the_record(make_batch, monkeypatch) -> None:
    """Use values that all differ, so that none can take the place of another."""
    batch = windows(make_batch, group=3, dtype=torch.bfloat16)
    seen: list[bytes] = []
    monkeypatch.setattr(own_cpu, "run", lambda name, record: seen.append(record))
    table, lasts = torch.zeros(90, 40, dtype=torch.float16)[:, :32], batch.prompt_lens - 1
    inputs = (batch.query, batch.query_ends, lasts, Rotary(table, halves=True))
    out = cpu.future_queries(*inputs, queries=7, positions=512)
    record = PyrFutureQueries.from_buffer_copy(seen[0])
    tensors = (out, batch.query, table, batch.query_ends, lasts)
    names = ("out", "query", "cos_sin", "query_ends", "last_positions")
    for name, tensor in zip(names, tensors, strict=True):
        assert getattr(record, name) == tensor.data_ptr(), name
    assert (record.query_dtype, record.cos_sin_dtype) == (1, 2)
    assert (*batch.query.shape, 3) == (record.T, record.H, record.D, record.R)
    assert (record.window, record.positions, record.rows) == (7, 512, 90)
    assert (record.rotated, record.halves, record.cos_sin_t) == (32, 1, 40)
    assert (record.query_t, record.query_h) == batch.query.stride()[:2]
    assert record.threads == torch.get_num_threads()
