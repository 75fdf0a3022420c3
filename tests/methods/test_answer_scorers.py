# SPDX-License-Identifier: Apache-2.0
"""R-KV and TriAttention against their formulas, written with loops in float64."""

from __future__ import annotations

import cmath
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.methods.test_scorers import WINDOW, Oracle, group
from tests.methods.views import MadeUp, cos_sin, made_up_centres, ready
from vllm_pyramid.methods.r_kv import latest_similar, redundancy_of
from vllm_pyramid.methods.triattention import Centres
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.capabilities import Feature, asked, refuse
from vllm_pyramid.policy.kinds import parse_component
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.step.rotary import Rotary


def _windows_importance(data: MadeUp, head: int) -> list[float]:
    """Of R-KV: what the window gives the keys before it, by the largest logit of a group."""
    past, total = data.tokens - WINDOW, torch.zeros(data.tokens - WINDOW, dtype=torch.float64)
    keys = data.keys[head, :past].double()
    for query in range(past, data.tokens):
        rows = [keys @ data.queries[query, h].double() for h in group(data, head)]
        largest = [
            max(float(row[key]) for row in rows) / math.sqrt(data.size) for key in range(past)
        ]
        total += torch.tensor(largest, dtype=torch.float64).softmax(dim=0)
    return [float(x) / WINDOW for x in total]


@cache
def _redundancies(data_seed: int, tokens: int, head: int, threshold: float) -> list[float]:
    data = MadeUp(seed=data_seed, tokens=tokens)
    unit = [k / (k.norm() + 1e-8) for k in data.keys[head].double()]
    cosines = [[float(a @ b) for b in unit] for a in unit]
    for key, row in enumerate(cosines):
        row[key] = 0.0
        similar = [other for other in range(tokens) if row[other] > threshold]
        row[max(similar, default=0)] = 0.0  # the latest is spared
    means = [sum(row[key] for row in cosines) / tokens for key in range(tokens)]
    return torch.tensor(means, dtype=torch.float64).softmax(dim=0).tolist()


def r_kv(data: MadeUp, head: int, token: int) -> float:
    given = _windows_importance(data, head)
    pooled = max(given[max(token - 3, 0) : token + 4])
    return 0.1 * pooled - 0.9 * _redundancies(data.seed, data.tokens, head, 0.2)[token]


FARTHEST = 64


def triattention(data: MadeUp, head: int, token: int, *, normalize: bool = False) -> float:
    """With complex numbers, and keys turned back to where they came from."""
    centres = Centres.read(str(made_up_centres(data.heads, data.size)))
    half, best = data.size // 2, -math.inf
    offsets = [2**i for i in range(FARTHEST.bit_length())]
    frequencies = [1e4 ** (-2 * f / data.size) for f in range(half)]

    def score(h: int, place: int) -> float:
        total, key = 0.0, data.keys[head, place].double()
        for f, omega in enumerate(frequencies):
            rotated = complex(float(key[f]), float(key[f + half]))
            plain = rotated * cmath.exp(-1j * omega * place)
            mean = centres.mean[3, h].double()
            centre = complex(float(mean[f]), float(mean[f + half]))
            product = centre * plain.conjugate()
            for offset in offsets:
                turn = cmath.exp(1j * omega * (data.tokens + offset - place))
                total += (product * turn).real / len(offsets)
            total += (float(centres.length[3, h, f]) - abs(centre)) * abs(plain)
        return total

    for h in group(data, head):
        found = score(h, token)
        if normalize:
            scores = torch.tensor([score(h, t) for t in range(data.tokens)], dtype=torch.float64)
            found = (found - float(scores.mean())) / float(scores.std(correction=0))
        best = max(best, found)
    return best


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "oracle"),
    [
        ({"kind": "r_kv", "threshold": 0.2}, r_kv),
        ({"kind": "triattention", "farthest": FARTHEST, "normalize": False}, triattention),
    ],
)
def test_scores_are_the_papers(settings: dict[str, Any], oracle: Oracle) -> None:
    data = MadeUp(tokens=41)
    scorer = ready(parse_component(Scorer, settings), data.heads, data.size)
    scores = scorer.score(data.view(WINDOW, 0))
    assert scores.shape == (data.kv_heads, data.tokens) and scores.dtype == torch.float32
    for head in range(data.kv_heads):
        for token in range(data.tokens - WINDOW):
            wanted = oracle(data, head, token)
            assert float(scores[head, token]) == pytest.approx(wanted, rel=2e-5, abs=1e-6)


def test_each_query_heads_scores_are_normalised_before_the_largest_counts() -> None:
    data = MadeUp(tokens=23)
    settings = {"kind": "triattention", "farthest": FARTHEST}
    scores = ready(parse_component(Scorer, settings), data.heads, data.size).score(data.view())
    for head, token in ((0, 0), (0, 22), (1, 9)):
        wanted = triattention(data, head, token, normalize=True)
        assert float(scores[head, token]) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_centres_are_those_of_a_models_layers_alone() -> None:
    """Layers that evict, and KV heads with lengths of their own, are numbered otherwise."""
    scorer = {"kind": "triattention", "centres": "centres.npz"}
    with pytest.raises(ValueError, match="finds centres by layers"):
        load_policy("adakv", 64, {"scorer": scorer})
    with pytest.raises(ValueError, match=r"layers do not evict.*the model's own layers"):
        refuse(load_policy("triattention", 256), asked(Feature.OTHER_LAYERS))


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("alike", [0.0, 0.8, 5.0])
def test_redundancy_needs_no_table_of_all_pairs(tokens: int, alike: float) -> None:
    """The keys are alike a little, or so much that each has a similar one among the latest."""
    source = torch.Generator().manual_seed(tokens)
    keys = torch.randn(3, tokens, 16, generator=source)
    keys += alike * torch.randn(3, 1, 16, generator=source)
    unit = keys.double() / (keys.double().norm(dim=-1, keepdim=True) + 1e-8)
    cosines = unit @ unit.transpose(1, 2)
    cosines.diagonal(dim1=1, dim2=2).zero_()
    places = torch.where(cosines > 0.5, torch.arange(tokens), 0)
    cosines.scatter_(2, places.amax(dim=-1, keepdim=True), 0.0)
    wanted = cosines.mean(dim=1).softmax(dim=-1)
    torch.testing.assert_close(redundancy_of(keys, 0.5).double(), wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("tokens", "alike", "share"),
    [(1152, 0.0, 0.56), (2176, 0.0, 0.53), (1152, 1.2, 0.11), (2176, 1.2, 0.06)],
)
def test_a_pair_of_keys_is_compared_once_at_most(tokens: int, alike: float, share: float) -> None:
    """Of all products of two keys; docs/design.md says so."""
    source = torch.Generator().manual_seed(0)
    keys = torch.randn(4, tokens, 64, generator=source)
    keys += alike * torch.randn(4, 1, 64, generator=source)
    with FlopCounterMode(display=False) as counter:
        latest_similar(keys / keys.norm(dim=-1, keepdim=True), 0.5)
    products = counter.get_total_flops() / (2 * 64 * 4)
    assert products / tokens**2 == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("halves", "scale"), [(True, 1.0), (False, 1.3)])
def test_frequencies_are_read_off_a_rounded_table(dtype, halves, scale) -> None:
    rotary = Rotary((scale * cos_sin(16, 5000)).to(dtype), halves)
    radians, factor = rotary.frequencies
    exact = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    # A 16-bit cosine misses its angle by a hundredth of a radian at most.
    near = 1e-2 / 4096 if dtype is torch.bfloat16 else 2e-7
    assert (radians - exact).abs().max() < near
    torch.testing.assert_close(factor, torch.full((8,), scale), rtol=5e-3, atol=0)
    if dtype is torch.float32:
        x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
        ahead = rotary.mean_turn_ahead(x, 100, torch.tensor([1, 2, 800]))
        known = rotary.mean_turn(x, torch.tensor([101, 102, 900]))
        torch.testing.assert_close(ahead, known, rtol=1e-3, atol=1e-3)


def test_embeddings_that_are_no_function_of_the_distance_are_refused() -> None:
    table = cos_sin(16, 4096)
    table[1000:] = cos_sin(16, 4096)[1000:].roll(700, dims=0)
    with pytest.raises(ValueError, match="do not grow by position alone"):
        _ = Rotary(table).frequencies


def test_files_that_hold_no_centres(tmp_path: Path) -> None:
    file = tmp_path / "centres.npz"
    with pytest.raises(ValueError, match="cannot read the centres"):
        Centres.read(str(file))
    Centres(torch.zeros(2, 4, 6), torch.zeros(2, 4, 4)).write(file)
    with pytest.raises(ValueError, match=r"lab\.heads\.queries"):
        Centres.read(str(file))
    Centres(torch.full((2, 4, 8), math.nan), torch.zeros(2, 4, 4)).write(file)
    with pytest.raises(ValueError, match="not finite"):
        Centres.read(str(file))
    file.write_text(json.dumps([]))
    with pytest.raises(ValueError, match="cannot read the centres"):
        Centres.read(str(file))
