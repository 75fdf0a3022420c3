# SPDX-License-Identifier: Apache-2.0
"""SnapKV, PyramidKV and H2O as KVCache-Factory defines them, on SmolLM2's queries and keys.

https://github.com/Zefan-Cai/KVCache-Factory, the PyramidKV authors' collection, as of 2026-07-02
(`pyramidkv/pyramidkv_utils.py`), written anew from reading it, a query head at a time in NumPy and
float32. What differs between the definitions is in lab/results/kvpress.md.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.kernels.every_kernel import cpu
from tests.methods.views import BLOCK, view_of
from tests.plumbing.real_model import real_model
from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.kinds import parse_component
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.tools.eval.haystack import load_tokens, topics

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

STUDY = Path(__file__).parents[1] / "method_study"
TOKENS, LAYERS, WINDOW = 1300, 30, 8
# Of 580 tokens beyond the window, 29 are a twentieth, and 30 layers fall by 38 each: nothing is
# rounded in either definition of the pyramid.
CAPACITY = 580 + WINDOW
Floats = npt.NDArray[np.float32]
Places = list[list[int]]  # [KV head] ascending


def window_attention(queries: Floats, keys: Floats, window: int) -> Floats:
    """What each query head's last queries give the keys, `[H, window, T]`: causal softmax."""
    tokens, heads, size = queries.shape
    found = []
    for head in range(heads):
        own_keys = keys[head * len(keys) // heads]
        logits = queries[-window:, head] @ own_keys.T / np.float32(np.sqrt(size))
        for row in range(window):
            logits[row, tokens - window + row + 1 :] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        found.append(weights / weights.sum(axis=1, keepdims=True))
    return np.stack(found)


def pooled(row: Floats, width: int, how: str) -> Floats:
    """The average over `width` neighbours, zeros beyond the ends counted, or their greatest."""
    half = width // 2
    edge = 0.0 if how == "avg" else -np.inf
    padded = np.pad(row, half, constant_values=edge)
    near = np.lib.stride_tricks.sliding_window_view(padded, width)
    return near.sum(axis=1) / np.float32(width) if how == "avg" else near.max(axis=1)


def window_scores(
    queries: Floats, keys: Floats, window: int, width: int, how: str, over_group: str
) -> Floats:
    """SnapKV's and PyramidKV's scores of the tokens before the window, `[G, T - window]`.

    The attention is summed over the window, then reduced over the query heads of a KV head, then
    pooled. With as many KV heads as query heads it is the repository's default, which caches a copy
    of each KV head for every query head.
    """
    mass = window_attention(queries, keys, window).sum(axis=1)[:, :-window]
    groups = mass.reshape(len(keys), -1, mass.shape[1])
    reduced = {"mean": groups.mean, "max": groups.max, "sum": groups.sum}[over_group](axis=1)
    return np.stack([pooled(row, width, how) for row in reduced])


def best(scores: Floats, count: int) -> Places:
    """The places of the greatest scores of each head."""
    return [sorted(np.argsort(-row, kind="stable")[:count].tolist()) for row in scores]


def pyramid(capacity: int, window: int, tokens: int, layers: int) -> list[int]:
    """Tokens that each layer keeps beside the window, in the repository's whole numbers.

    From `capacity`, the mean with the window; a twentieth in the last layer, equal steps rounded
    down. A prompt shorter than twice the mean keeps equally much everywhere.
    """
    mean, before = capacity - window, tokens - window
    if tokens < 2 * mean:
        return [mean] * layers
    last = mean // 20
    first = 2 * mean - last
    if first >= before:
        first, last = before, 2 * mean - before
    return [first - layer * ((first - last) // (layers - 1)) for layer in range(layers)]


@pytest.fixture(scope="module")
def caches() -> Iterator[list[Any]]:
    """Every layer's queries and keys of English text, rotary embedding applied."""
    folder = real_model("smollm2")
    text = "\n\n".join(topics().values())
    ids = load_tokens(folder).encode(text[: 8 * TOKENS])[:TOKENS]
    assert len(ids) == TOKENS
    sys.path.insert(0, str(STUDY))
    with torch.no_grad():
        model = importlib.import_module("model").Model(folder)
        yield model.prefill(ids)[0].layers
    sys.path.remove(str(STUDY))
    sys.modules.pop("model")


def arrays(cache: Any) -> tuple[Floats, Floats]:
    return cache.queries.numpy(), cache.keys.numpy()


def seen(cache: Any, window: int) -> ScorerInputs:
    """A layer as our scorers see it: pages in random order."""
    return view_of(cache.keys, cache.values, cache.queries[-window:], None, window=window, sinks=0)


def scored_here(cache: Any, settings: dict[str, Any], window: int) -> dict[str, torch.Tensor]:
    """Our scores of the tokens before the window: by the formula in PyTorch, and by the kernel."""
    view = seen(cache, window)
    formula = parse_component(Scorer, settings).score(view)
    batch = WindowBatch(
        view.queries.contiguous(),
        view.key_cache,
        view.block_row[None],
        torch.tensor([window], dtype=torch.int32),
        torch.tensor([TOKENS], dtype=torch.int32),
        window,
        max_prompt_len=TOKENS,
    )
    how = Reduction(settings["gqa_reduce"], settings["pooling"], settings["kernel_size"])
    kernel = cpu.window_scores(batch, Softmax(view.scale), how)[0]
    return {"formula": formula[:, :-window], "kernel": kernel[:, : TOKENS - window]}


def observed(pooling: str, width: int, over_group: str) -> dict[str, Any]:
    return {
        "kind": "observation_window",
        "pooling": pooling,
        "kernel_size": width,
        "gqa_reduce": over_group,
    }


@pytest.mark.parametrize("capacity", [CAPACITY, 160])
@pytest.mark.parametrize(
    ("window", "width", "pooling", "over_group"),
    [(8, 5, "avg", "mean"), (32, 5, "avg", "mean"), (8, 7, "max", "mean"), (32, 7, "max", "max")],
)
def test_snapkv_keeps_the_same_tokens(
    window: int, width: int, pooling: str, over_group: str, capacity: int, caches: list[Any]
) -> None:
    for layer, cache in enumerate(caches):
        theirs = window_scores(*arrays(cache), window, width, pooling, over_group)
        here = scored_here(cache, observed(pooling, width, over_group), window)
        for by, scores in here.items():
            error = np.abs(scores.numpy() - theirs).max() / theirs.max()
            assert error < 1e-5, f"layer {layer} by the {by}"
            ours = best(scores.numpy(), capacity - window)
            assert ours == best(theirs, capacity - window), f"layer {layer} by the {by}"


def test_a_copy_for_every_query_head(caches: list[Any]) -> None:
    """The repository's default: KV heads repeated before anything is scored, nothing reduced."""
    for layer, cache in enumerate(caches[::3]):
        queries, keys = arrays(cache)
        copied = torch.from_numpy(keys.repeat(queries.shape[1] // len(keys), axis=0))
        repeated = type(cache)(cache.queries, copied, copied)
        theirs = window_scores(queries, copied.numpy(), WINDOW, 5, "avg", "mean")
        for by, scores in scored_here(repeated, observed("avg", 5, "mean"), WINDOW).items():
            assert len(scores) == queries.shape[1]
            ours = best(scores.numpy(), CAPACITY - WINDOW)
            assert ours == best(theirs, CAPACITY - WINDOW), f"layer {3 * layer} by the {by}"


def test_pyramidkv_keeps_the_same_tokens(caches: list[Any]) -> None:
    """Lengths and ranking together, where neither definition rounds."""
    policy = load_policy("pyramidkv", str(CAPACITY), {"fill_blocks": False, "window": WINDOW})
    lengths = policy.plan(TOKENS, LAYERS, BLOCK).end.keep
    theirs = pyramid(CAPACITY, WINDOW, TOKENS, LAYERS)
    assert (lengths - WINDOW).tolist() == theirs
    assert (theirs[0], theirs[-1]) == (1131, 29)
    for layer, (cache, count) in enumerate(zip(caches, theirs, strict=True)):
        scores = window_scores(*arrays(cache), WINDOW, 5, "avg", "mean")
        ours = policy.scorer.score(seen(cache, WINDOW))[:, :-WINDOW].numpy()
        assert best(ours, count) == best(scores, count), f"layer {layer}"


@pytest.mark.parametrize(
    ("capacity", "tokens"),
    [(128, 1300), (256, 1300), (588, 1300), (700, 1300), (700, 1390), (2048, 8000)],
)
def test_lengths_of_layers_differ_by_the_step_that_is_rounded(capacity: int, tokens: int) -> None:
    """Rounding a step down leaves the upper layers more: together up to half a token a layer pair.

    Below twice the mean theirs is no pyramid any more, and ours is until the lowest layer is full.
    """
    policy = load_policy("pyramidkv", str(capacity), {"fill_blocks": False, "window": WINDOW})
    ours = (policy.plan(tokens, LAYERS, BLOCK).end.keep - WINDOW).tolist()
    theirs = pyramid(capacity, WINDOW, tokens, LAYERS)
    assert sum(ours) == (capacity - WINDOW) * LAYERS
    if tokens < 2 * (capacity - WINDOW):
        assert len(set(theirs)) == 1 and len(set(ours)) > 1
        return
    assert sum(ours) <= sum(theirs) < sum(ours) + LAYERS * LAYERS / 2 + LAYERS
    for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert -2 <= other - mine <= layer + 2, f"layer {layer}"


def test_h2o_sums_the_same_attention(caches: list[Any]) -> None:
    """Of all queries to each key; the mean over a group there, the sum here: the same order."""
    for layer, cache in list(enumerate(caches))[::6]:
        queries, keys = arrays(cache)
        all_mass = window_attention(queries, keys, TOKENS).sum(axis=1)
        theirs = all_mass.reshape(len(keys), -1, TOKENS).mean(axis=1)[:, :-WINDOW]
        view = seen(cache, TOKENS)
        mass = torch.zeros(view.key_cache.shape[:3])
        batch = AttentionBatch(
            view.queries.contiguous(),
            view.key_cache,
            view.value_cache,
            view.block_row[None],
            query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32),
            seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
            skips=torch.tensor([0], dtype=torch.int32),
            max_query_len=TOKENS,
            max_seq_len=TOKENS,
        )
        cpu.add_key_mass(mass, batch, Softmax(view.scale))
        ours = mass[view.block_row.long()].transpose(0, 1).flatten(1)[:, : TOKENS - WINDOW]
        group = queries.shape[1] // len(keys)
        assert (ours - group * torch.from_numpy(theirs)).abs().max() < 1e-5 * ours.max(), layer
        kept = best(ours.numpy(), CAPACITY - WINDOW)
        assert kept == best(theirs, CAPACITY - WINDOW), f"layer {layer}"


def test_a_difference_is_found(caches: list[Any]) -> None:
    """Another width, window or reduction keeps other tokens in every layer looked at."""
    for cache in caches[::6]:
        ours = scored_here(cache, observed("avg", 5, "mean"), WINDOW)["kernel"].numpy()
        kept = best(ours, 160 - WINDOW)
        for width, over_group in ((7, "mean"), (5, "max")):
            other = window_scores(*arrays(cache), WINDOW, width, "avg", over_group)
            assert kept != best(other, 160 - WINDOW)
