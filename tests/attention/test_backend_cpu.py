# SPDX-License-Identifier: Apache-2.0
"""The CPU back end lets requests read shared pages together, unless the user forbids it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import build_batch
from vllm_pyramid.attention.backend_cpu import SHARED_VARIABLE, PyramidCpuImpl
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.cpu.library import shared_rows
from vllm_pyramid.step.attention_inputs import AttentionInputs


@pytest.mark.parametrize("is_forbidden", [False, True])
def test_the_variable_forbids_sharing(monkeypatch: pytest.MonkeyPatch, is_forbidden: bool) -> None:
    """Check that without sharing a request keeps the bits that it has alone."""
    if is_forbidden:
        monkeypatch.setenv(SHARED_VARIABLE, "0")
    requests = 32
    batch = build_batch([2060 + r for r in range(requests)], [1] * requests, kv_heads=1)
    batch.block_table[:, :128] = batch.block_table[0, :128]
    layer = PyramidCpuImpl(2, 64, 0.125, num_kv_heads=1)
    inputs = AttentionInputs(layer.ops, 0, batch.attention(), layer.softmax)
    out, right = (torch.empty(batch.query.shape) for _ in range(2))
    before = shared_rows()
    layer._attend(inputs, out)
    assert shared_rows() - before == (0 if is_forbidden else requests * 2)
    cpu.paged_attention(right, batch.attention(), layer.softmax)
    torch.testing.assert_close(out, right, rtol=0, atol=0 if is_forbidden else 2e-6)


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_VARIABLE, "off")
    with pytest.raises(ValueError, match="VLLM_PYRAMID_SHARED_PREFIXES=off must be 0 or 1"):
        PyramidCpuImpl(2, 64, 0.125, num_kv_heads=1)
