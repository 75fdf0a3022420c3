# SPDX-License-Identifier: Apache-2.0
"""Attention recall: by hand, by NumPy, and by the kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.every_kernel import cpu, reference
from tests.kernels.pages import int32
from vllm_pyramid.kernels.recall import kept_mass
from vllm_pyramid.kernels.records import Reduction, Softmax


def test_kept_mass_by_hand() -> None:
    window, lens, keeps = 2, int32(6, 5), int32(4, 2)
    mass = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[5.0, 0.0, 5.0, -math.inf]]])
    kept = torch.tensor([[[1, 3, 4, 5]], [[3, 4, -1, -1]]], dtype=torch.int32)
    assert kept_mass(mass, kept, lens, keeps, window=window).tolist() == [
        [pytest.approx(0.6)],
        [0.0],
    ]
    assert kept_mass(mass * 0, kept, int32(6, 5), keeps, window=window)[0].tolist() == [1.0]


@pytest.mark.parametrize("module", [cpu, reference])
def test_recall_of_what_is_selected(make_batch: Any, module: Any) -> None:
    """Check that all tokens hold everything, and the best ones what NumPy finds."""
    batch = make_batch([90, 45], [16, 16])
    mass = module.window_scores(batch.windows(16), Softmax(0.125), Reduction(pooling="none"))
    lens = batch.seq_lens
    everything = module.select(mass, lens, lens, window=16)
    whole = kept_mass(mass, everything, lens, lens, window=16)
    torch.testing.assert_close(whole, torch.ones(2, 2))
    keeps = int32(26, 20)
    best = module.select(mass, lens, keeps, window=16)
    found = kept_mass(mass, best, lens, keeps, window=16)
    for r, (n, keep) in enumerate([(74, 10), (29, 4)]):
        for g in range(2):
            row = np.sort(mass[r, g, :n].numpy().astype(np.float64))
            assert found[r, g].item() == pytest.approx(row[-keep:].sum() / row.sum(), rel=1e-5)
