# SPDX-License-Identifier: Apache-2.0
"""Statistics of the window's mass and attention recall: by hand, by NumPy, and by the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.arguments import head_sinks, take_reduction, take_softmax
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.recall import WindowStatistics, kept_mass, window_statistics
from vllm_pyramid.kernels.records import GQA_REDUCTIONS, POOLINGS, Softmax

pytestmark = pytest.mark.cpu


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def statistics_of(*rows: list[float], window: int = 2) -> WindowStatistics:
    """Make a mass of one request per row, with one head; short rows are padded with -inf."""
    mass = torch.full((len(rows), 1, max(map(len, rows))), -math.inf)
    for r, row in enumerate(rows):
        mass[r, 0, : len(row)] = torch.tensor(row)
    return window_statistics(mass, ints(*(len(row) + window for row in rows)), window=window)


def test_by_hand() -> None:
    found = statistics_of([0.5] * 4, [0.0, 3.0, 0.0, 0.0, 0.0], [1.0, 3.0], [0.0, 0.0], [7.0])
    assert found.mass.flatten().tolist() == [2.0, 3.0, 4.0, 0.0, 7.0]
    entropy = [math.log(4), 0, -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), 0, 0]
    assert found.entropy.flatten().tolist() == pytest.approx(entropy, abs=1e-7)
    assert found.gini.flatten().tolist() == pytest.approx([0, 0.8, 0.25, 0, 0], abs=1e-7)
    assert all(tensor.dtype == torch.float32 for tensor in found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 8, width=32), min_size=1, max_size=40))
def test_by_definition(values: list[float]) -> None:
    """Compute the Gini coefficient as half the mean absolute difference over the mean."""
    x = np.array(values, dtype=np.float64)
    found = statistics_of(values)
    if x.sum() == 0:
        assert found.gini.item() == found.entropy.item() == 0
        return
    gini = np.abs(x[:, None] - x[None, :]).mean() / (2 * x.mean())
    assert found.gini.item() == pytest.approx(gini, abs=1e-6)
    share = x[x > 0] / x.sum()
    assert found.entropy.item() == pytest.approx(-(share * np.log(share)).sum(), abs=1e-6)


def scores_of(module: Any, batch: Any, window: int, **options: Any) -> Any:
    prompts = batch.windows(window, options.pop("max_prompt_len", None))
    softmax = take_softmax(options, batch.query.shape[2] ** -0.5)
    reduction = take_reduction(options)
    if options.pop("statistics", False):
        return module.window_scores_and_statistics(prompts, softmax, reduction, **options)
    return module.window_scores(prompts, softmax, reduction, **options)


@pytest.mark.parametrize("gqa_reduce", GQA_REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pooling", "sinks"), [*((pooling, None) for pooling in POOLINGS), ("avg", head_sinks(6))]
)
def test_statistics_of_the_kernels(
    make_batch: Any,
    each_isa: Callable[[], Iterator[str]],
    gqa_reduce: str,
    dtype: torch.dtype,
    pooling: str,
    sinks: torch.Tensor | None,
) -> None:
    batch = make_batch([1100, 57, 300, 9], [20, 16, 9, 8], group=3, dtype=dtype)
    options = {"window": 8, "gqa_reduce": gqa_reduce, "pooling": pooling, "sinks": sinks}
    _, right = scores_of(reference, batch, **options, statistics=True, compute_dtype=torch.float64)
    for _ in each_isa():
        scores, found = scores_of(cpu, batch, **options, statistics=True)
        assert torch.equal(scores, scores_of(cpu, batch, **options))
        for name in WindowStatistics._fields:
            torch.testing.assert_close(
                getattr(found, name), getattr(right, name), rtol=2e-5, atol=2e-6, msg=name
            )


def test_statistics_do_not_depend_on_pooling_or_padding(make_batch: Any) -> None:
    batch = make_batch([90, 45], [16, 16])
    _, right = scores_of(reference, batch, window=16, pooling="none", statistics=True)
    _, pooled = scores_of(reference, batch, window=16, pooling="max", statistics=True)
    _, wide = scores_of(cpu, batch, window=16, max_prompt_len=200, statistics=True)
    for found in (pooled, wide):
        torch.testing.assert_close(tuple(found), tuple(right), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, head_sinks(8)], ids=["plain", "sinks"])
def test_mean_mass_is_the_attention_paid_to_the_context(make_batch: Any, sinks: Any) -> None:
    batch = make_batch([90], [16], group=4)
    _, found = scores_of(cpu, batch, window=16, statistics=True, sinks=sinks)
    pages = torch.zeros(batch.key_cache.shape[:3])
    cpu.add_key_mass(pages, batch.attention(), Softmax(0.125, sinks=sinks))
    mass = reference.gather_tokens(pages[..., None], batch.block_table[0], 0, 90)[..., 0].T[None]
    torch.testing.assert_close(found.mass, mass[..., :74].sum(-1) / 4, rtol=1e-4, atol=1e-5)


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


def test_shapes_that_do_not_fit_raise() -> None:
    mass, kept = torch.zeros(2, 3, 8), torch.zeros(2, 3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="same R and G"):
        kept_mass(mass, kept[:, :2], ints(9, 9), ints(4, 4), window=2)
    with pytest.raises(ValueError, match=r"must be \[2\]"):
        kept_mass(mass, kept, ints(9), ints(4, 4), window=2)
