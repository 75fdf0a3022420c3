# SPDX-License-Identifier: Apache-2.0
"""The gates of `lab/method_study`: their ways of attending against attention written out."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch

from lab.tests.study_scripts import Sizes, step_of_noise, study_scripts

pytestmark = pytest.mark.cpu

NAMES = (
    "model",
    "gates_pages",
    "gates_meter",
    "gates_ridge",
    "gates_tiles",
    "gates_report",
    "matching",
    "sparse_prefill",
)
HEADS, KV_HEADS, TOKENS, BEHIND, SIZE = 4, 2, 16 * 20 + 5, 6, 8


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with study_scripts(NAMES, ("report", "code_task", "instruction_task", "own_tasks")) as found:
        yield found


@pytest.fixture
def made(modules: dict[str, ModuleType]) -> tuple[Any, Any]:
    sizes = Sizes(HEADS, KV_HEADS, TOKENS, BEHIND, SIZE)
    return step_of_noise(modules["model"], 0, sizes)


def weights(step: Any, cache: Any) -> torch.Tensor:
    """Attention to the prompt and the tokens behind it, `[H, n, T + n]`."""
    keys = torch.cat([cache.keys, step.k], dim=1).repeat_interleave(HEADS // KV_HEADS, dim=0)
    logits = step.q @ keys.mT * step.scale
    later = torch.ones(BEHIND, BEHIND, dtype=torch.bool).triu(1)
    logits[..., TOKENS:].masked_fill_(later, -torch.inf)
    return logits.softmax(dim=-1)


def test_all_pages_are_the_whole_cache(modules: dict[str, ModuleType], made: Any) -> None:
    step, cache = made
    whole = modules["model"].Whole().attend(step, cache)
    values = torch.cat([cache.values, step.v], dim=1).repeat_interleave(HEADS // KV_HEADS, dim=0)
    torch.testing.assert_close(whole, weights(step, cache) @ values)
    for scorer in modules["gates_pages"].SCORERS:
        same = modules["gates_pages"].Pages(scorer, 1.0).attend(step, cache)
        torch.testing.assert_close(same, whole)
        few = modules["gates_pages"].Pages(scorer, 0.3).attend(step, cache)
        assert float((few - whole).abs().max()) > 0.01


def test_scores_of_pages(modules: dict[str, ModuleType], made: Any) -> None:
    """Quest's is a bound of the greatest product; a page of equal keys has its key's product."""
    step, cache = made
    pages_of = modules["gates_pages"]
    pages, queries = pages_of._paged(step, cache)
    products = torch.einsum("ghnd,gpsd->ghnps", queries, pages)
    assert bool((pages_of.box(pages, queries, cache) >= products.amax(dim=-1) - 1e-5).all())
    equal = pages[:, :, :1].expand_as(pages)
    flat = equal.flatten(1, 2)
    same = modules["model"].LayerCache(cache.queries[: flat.shape[1]], flat, flat)
    expected = torch.einsum("ghnd,gpd->ghnp", queries, pages[:, :, 0])
    for name, scorer in pages_of.SCORERS.items():
        more = torch.tensor(16.0).log() if name == "exact" else 0.0
        got = scorer(equal, queries, same)
        torch.testing.assert_close(got, expected + more, rtol=1e-4, atol=1e-4)


def test_recall_of_pages(modules: dict[str, ModuleType], made: Any) -> None:
    """All pages have all of the attention; of some, the exact score's have the most."""
    step, cache = made
    survey = modules["gates_pages"].Survey((0.5, 1.0), 1)
    torch.testing.assert_close(
        survey.attend(step, cache), modules["model"].Whole().attend(step, cache)
    )
    of = {key: layers[0] for key, layers in survey.recalls.items()}
    assert all(of[name, 1.0] == pytest.approx(1.0) for name in modules["gates_pages"].SCORERS)
    assert all(0.0 < of[name, 0.5] < of["exact", 0.5] < 1.0 for name in ("box", "spread", "mean"))


@pytest.mark.parametrize("lengths", [(40, 40), (40, 61)])
def test_the_meter(modules: dict[str, ModuleType], made: Any, lengths: tuple[int, int]) -> None:
    step, cache = made
    kept = [[torch.randperm(TOKENS)[:length].sort().values for length in lengths]]
    metered = modules["gates_meter"].Metered(kept)
    got = metered.attend(step, cache)
    torch.testing.assert_close(got, modules["model"].Evicted(kept).attend(step, cache))
    all_weights = weights(step, cache)
    lost = all_weights[..., :TOKENS].sum(dim=-1)
    for head in range(HEADS):
        places = kept[0][head * KV_HEADS // HEADS]
        lost[head] -= all_weights[head][:, places].sum(dim=-1)
    torch.testing.assert_close(metered.true[0], lost.mean(dim=0), rtol=1e-4, atol=1e-5)
    assert float((metered.estimated[0] - metered.true[0]).abs().max()) < 0.05


def test_the_estimate(modules: dict[str, ModuleType]) -> None:
    """Exact for equal keys, a part of 64 and the rest; close for normal ones."""
    estimate = modules["gates_meter"].estimate
    torch.manual_seed(0)
    queries = torch.randn(3, SIZE)
    one = torch.randn(1, SIZE)
    torch.testing.assert_close(
        estimate(queries, one.expand(70, -1)),
        (queries @ one.T)[:, 0] + torch.tensor(70.0).log(),
        rtol=1e-4,
        atol=1e-4,
    )
    keys = 0.3 * torch.randn(6400, SIZE)
    true = (queries @ keys.T).logsumexp(dim=-1)
    torch.testing.assert_close(estimate(queries, keys), true, rtol=0.0, atol=0.1)


def test_ridge_values_bring_the_windows_outputs_back(
    modules: dict[str, ModuleType], made: Any
) -> None:
    """With next to no ridge exactly; with a larger one values change less."""
    _, cache = made
    window = 6
    kept = torch.cat([torch.randperm(TOKENS - window)[:80].sort().values, torch.arange(-6, 0)])
    kept %= TOKENS
    queries = cache.queries[-window:].transpose(0, 1)[: HEADS // KV_HEADS] * SIZE**-0.5
    keys, values = cache.keys[0], cache.values[0]
    logits = queries @ keys.T
    own = torch.arange(TOKENS - window, TOKENS)[:, None]
    logits = logits.masked_fill(torch.arange(TOKENS) > own, -torch.inf)
    wanted = logits.softmax(dim=-1) @ values
    left = logits[..., kept].softmax(dim=-1)
    assert float((left @ values[kept] - wanted).abs().max()) > 0.05
    mended = modules["gates_ridge"].mended
    changed = mended(queries, keys, values, kept, 1e-6)
    torch.testing.assert_close(left @ changed, wanted, rtol=1e-3, atol=1e-3)
    less = mended(queries, keys, values, kept, 1.0)
    assert 0 < float((less - values[kept]).norm()) < float((changed - values[kept]).norm())


def test_matching_makes_up_for_copies_of_a_key(modules: dict[str, ModuleType], made: Any) -> None:
    """A key that stands three times weighs three times, and its value is the mean of theirs."""
    step, _ = made
    script, layer_cache = modules["matching"], modules["model"].LayerCache
    torch.manual_seed(7)
    copies, distinct, window = 3, 12, 5
    keys = torch.randn(KV_HEADS, distinct, SIZE).repeat(1, copies, 1)
    keys = torch.cat([keys, torch.randn(KV_HEADS, window, SIZE)], dim=1)
    tokens = keys.shape[1]
    cache = layer_cache(torch.randn(400, HEADS, SIZE), keys, torch.randn_like(keys))
    last = torch.full((400,), tokens - 1)
    found = [script.References.of(cache.queries, cache, step.scale, last)]
    places = torch.cat([torch.arange(distinct), torch.arange(tokens - window, tokens)])
    kept = [[places] * KV_HEADS]
    whole = modules["model"].Whole().attend(step, cache)

    def error(**parts: bool) -> float:
        match = script.Match(ridge=1e-9, **parts)
        way = script.Matched(kept, match, found, [cache], window)
        return float((way.attend(step, cache) - whole).abs().max())

    assert error() < 1e-3
    assert error(bias=False) > 0.02
    assert error(values=False) > 0.02


def test_density_of_tiles(modules: dict[str, ModuleType]) -> None:
    density, tile, rows = modules["gates_tiles"].density, modules["gates_tiles"].TILE, 6
    tokens = rows * tile + 3
    made = modules["model"].LayerCache
    alike = made(*(torch.zeros(2, tokens, SIZE) for _ in range(3)))
    alike.queries = torch.zeros(tokens, HEADS, SIZE)
    tiles = rows * (rows + 1) / 2
    # All keys alike: a row of r tiles takes 0.6 of its worth; its diagonal tile counts about half.
    assert density(alike, 1.0, 1.0) == 1.0
    assert 0.5 < density(alike, 1.0, 0.6) < 0.85
    # One key that takes all of the attention, in the first tile: that and the diagonal are left.
    keys = torch.zeros(2, tokens, SIZE)
    keys[:, 5] = 100.0
    first = made(torch.ones(tokens, HEADS, SIZE), keys, keys)
    assert density(first, 1.0, 0.9) == pytest.approx((2 * rows - 1) / tiles)


@pytest.mark.parametrize("first_key", [False, True])
def test_sparse_prefill_attends_to_the_chosen_tiles(
    modules: dict[str, ModuleType], first_key: bool
) -> None:
    script = modules["sparse_prefill"]
    rows = 6
    tokens = rows * script.TILE + 3
    q = torch.ones(1, HEADS, tokens, SIZE)
    k, v = torch.zeros(1, KV_HEADS, tokens, SIZE), torch.randn(1, KV_HEADS, tokens, SIZE)
    if first_key:  # takes all of the attention
        k[:, :, 5] = 100.0
    prefill = script.SparsePrefill(0.999)
    dense, _, sparse = (prefill.step(layer, q, k, v, 1.0, None) for layer in range(3))
    torch.testing.assert_close(sparse, dense)  # with all tiles, or all that count
    tiles = rows * (rows + 1) / 2
    assert prefill.densities == [pytest.approx((2 * rows - 1) / tiles if first_key else 1.0)]
    fewer = script.SparsePrefill(0.5)
    found = [fewer.step(layer, q, k, v, 1.0, None) for layer in range(3)][2]
    assert first_key or not torch.allclose(found, dense)


def test_heads_of_a_kv_head_may_choose_together(modules: dict[str, ModuleType]) -> None:
    """They take the fewest tiles whose mean worth is enough; one head alone chooses as before."""
    chosen_tiles = modules["gates_tiles"].chosen_tiles
    torch.manual_seed(5)
    rows = 6
    tokens = rows * modules["gates_tiles"].TILE
    means = torch.randn(HEADS, rows, 1, SIZE).expand(-1, -1, tokens // rows, -1).flatten(1, 2)
    queries, keys = torch.randn(HEADS, tokens, SIZE) + means, means[:KV_HEADS] * 2
    apart = chosen_tiles(queries, keys, 1.0, 0.6)
    together = chosen_tiles(queries, keys, 1.0, 0.6, together=True)
    group = HEADS // KV_HEADS
    assert all(
        torch.equal(together[head], together[head // group * group]) for head in range(HEADS)
    )
    assert not torch.equal(apart, apart[::group].repeat_interleave(group, dim=0))
    assert together.sum() < rows * (rows + 1) / 2 * HEADS
    alone = [
        chosen_tiles(queries[:KV_HEADS], keys, 1.0, 0.6, together=way) for way in (True, False)
    ]
    assert torch.equal(*alone)


def test_what_foretells_differing_tokens(modules: dict[str, ModuleType]) -> None:
    area, false_alarms = (
        getattr(modules["gates_report"], name) for name in ("area", "false_alarms")
    )
    differs = pd.Series([0, 0, 0, 1, 1])
    assert area(pd.Series([0.1, 0.2, 0.3, 0.4, 0.5]), differs) == 1.0
    assert area(pd.Series([0.5, 0.5, 0.5, 0.5, 0.5]), differs) == 0.5
    assert area(pd.Series([0.1, 0.45, 0.3, 0.4, 0.5]), differs) == pytest.approx(5 / 6)
    assert false_alarms(pd.Series([0.1, 0.2, 0.3, 0.4, 0.5]), differs) == 0.0
    assert false_alarms(pd.Series([0.1, 0.45, 0.3, 0.4, 0.5]), differs) == pytest.approx(1 / 3)
    assert pd.isna(area(pd.Series([0.1, 0.2]), pd.Series([1, 1])))
