# SPDX-License-Identifier: Apache-2.0
"""The window's mass and attention recall: by hand, by NumPy, and by the kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.arguments import head_sinks, take_reduction, take_softmax
from tests.kernels.every_kernel import cpu, reference
from vllm_pyramid.kernels.recall import kept_mass
from vllm_pyramid.kernels.records import Softmax

pytestmark = pytest.mark.cpu


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scores_of(module: Any, batch: Any, window: int, **options: Any) -> Any:
    prompts = batch.windows(window, options.pop("max_prompt_len", None))
    softmax = take_softmax(options, batch.query.shape[2] ** -0.5)
    reduction = take_reduction(options)
    return module.window_scores(prompts, softmax, reduction, **options)


@pytest.mark.parametrize("sinks", [None, head_sinks(8)], ids=["plain", "sinks"])
def test_mean_mass_is_the_attention_paid_to_the_context(make_batch: Any, sinks: Any) -> None:
    batch = make_batch([90], [16], group=4)
    found = scores_of(cpu, batch, window=16, pooling="none", sinks=sinks)
    pages = torch.zeros(batch.key_cache.shape[:3])
    cpu.add_key_mass(pages, batch.attention(), Softmax(0.125, sinks=sinks))
    mass = reference.gather_tokens(pages[..., None], batch.block_table[0], 0, 90)[..., 0].T[None]
    torch.testing.assert_close(found, mass[..., :74] / 4, rtol=1e-4, atol=1e-5)


def test_kept_mass_by_hand() -> None:
    window, lens, keeps = 2, ints(6, 5), ints(4, 2)
    mass = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[5.0, 0.0, 5.0, -math.inf]]])
    kept = torch.tensor([[[1, 3, 4, 5]], [[3, 4, -1, -1]]], dtype=torch.int32)
    assert kept_mass(mass, kept, lens, keeps, window=window).tolist() == [
        [pytest.approx(0.6)],
        [0.0],
    ]
    assert kept_mass(mass * 0, kept, ints(6, 5), keeps, window=window)[0].tolist() == [1.0]


@pytest.mark.parametrize("module", [cpu, reference])
def test_recall_of_what_is_selected(make_batch: Any, module: Any) -> None:
    """Check that all tokens hold everything, and the best ones what NumPy finds."""
    batch = make_batch([90, 45], [16, 16])
    mass = scores_of(module, batch, window=16, pooling="none")
    lens = batch.seq_lens
    everything = module.select(mass, lens, lens, window=16)
    whole = kept_mass(mass, everything, lens, lens, window=16)
    torch.testing.assert_close(whole, torch.ones(2, 2))
    keeps = ints(26, 20)
    best = module.select(mass, lens, keeps, window=16)
    found = kept_mass(mass, best, lens, keeps, window=16)
    for r, (n, keep) in enumerate([(74, 10), (29, 4)]):
        for g in range(2):
            row = np.sort(mass[r, g, :n].numpy().astype(np.float64))
            assert found[r, g].item() == pytest.approx(row[-keep:].sum() / row.sum(), rel=1e-5)
