# SPDX-License-Identifier: Apache-2.0
"""The C++ turns of the queries to come against the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.every_kernel import cpu, reference
from tests.methods.views import cos_sin
from vllm_pyramid.kernels.records import WindowBatch
from vllm_pyramid.step.rotary import Rotary


def windows(make_batch, **options: Any) -> WindowBatch:
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
