# SPDX-License-Identifier: Apache-2.0
"""Pages, masks of heads and reserves in `lab/method_study`, against the engine's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lab.tests.study_scripts import Sizes, step_of_noise, study_scripts
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.pages.kernels import reference as reference_pages
from vllm_pyramid.methods.pages.kernels.records import PageBatch
from vllm_pyramid.policy import load_policy

pytestmark = pytest.mark.cpu

NAMES = ("model", "selected", "static_heads", "methods")
LAYERS, HEADS, KV_HEADS, TOKENS, BEHIND, SIZE = 2, 4, 2, 16 * 60 + 5, 14, 16


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with study_scripts(NAMES) as found:
        yield found


@pytest.fixture
def made(modules: dict[str, ModuleType]) -> tuple[Any, Any]:
    sizes = Sizes(HEADS, KV_HEADS, TOKENS, BEHIND, SIZE)
    return step_of_noise(modules["model"], 1, sizes, scale=2.0)


def selected(modules: dict[str, ModuleType], preset: str, budget: str, kept: Any = None) -> Any:
    args = {"attend.budget": budget, "attend.min_tokens": 0, "attend.dense_layers": 1}
    attend: Any = load_policy(preset, None, args).attend
    return modules["selected"].Selected(attend, attend.pages(TOKENS, LAYERS, 16), kept)


@pytest.mark.parametrize("preset", ["select", "quest"])
def test_pages_are_the_engines(modules: dict[str, ModuleType], made: Any, preset: str) -> None:
    """Those that the reference kernels choose, for queries on both sides of a page's end."""
    step, cache = made
    way = selected(modules, preset, "12%")
    keys = torch.cat([cache.keys, step.k], dim=1)
    seen = way._seen(step, keys)
    total = TOKENS + BEHIND
    blocks = -(-total // 16)
    padded = torch.zeros(KV_HEADS, blocks * 16, SIZE)
    padded[:, :total] = keys
    part, rows = way.part, torch.zeros(BEHIND, dtype=torch.int32)
    positions = torch.arange(TOKENS, total, dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    batch = PageBatch(step.q.transpose(0, 1), table, rows, positions, rows, 16)
    pool = part.scorer.summarise(padded.unflatten(1, (blocks, 16)).transpose(0, 1))
    scores = reference_pages.score_pages(
        batch, Softmax(scale=step.scale), pool, kind=part.scorer.score_kind, combine=part.combine
    )
    budgets = torch.full((BEHIND,), int(way.pages[1]), dtype=torch.int32)
    chosen = reference_pages.select_pages(
        batch, scores, budgets, sinks=part.sink_pages(16), recent=part.recent_pages(16)
    )
    for query, position in enumerate(positions.tolist()):
        for head in range(KV_HEADS):
            pages = chosen.pages[query, head, : int(chosen.counts[query])]
            wanted = torch.isin(torch.arange(total) // 16, pages) & (
                torch.arange(total) <= position
            )
            assert torch.equal(seen[head, query], wanted)


def test_the_whole_budget_and_dense_layers_are_the_whole_cache(
    modules: dict[str, ModuleType], made: Any
) -> None:
    step, cache = made
    whole = modules["model"].Whole().attend(step, cache)
    torch.testing.assert_close(selected(modules, "select", "100%").attend(step, cache), whole)
    few = selected(modules, "select", "12%")
    assert float((few.attend(step, cache) - whole).abs().max()) > 0.01
    dense = modules["model"].Step(0, step.q, step.k, step.v, step.scale)
    torch.testing.assert_close(few.attend(dense, cache), whole)


def test_a_question_that_is_a_prompt_sees_everything(
    modules: dict[str, ModuleType], made: Any
) -> None:
    step, cache = made
    keys = torch.cat([cache.keys, step.k], dim=1)
    few = selected(modules, "select", "12%")
    asked = modules["selected"].Selected(few.part, few.pages, asked=5)
    seen, plain = asked._seen(step, keys), few._seen(step, keys)
    assert seen[:, :5].sum(-1).tolist() == [[TOKENS + 1 + i for i in range(5)]] * KV_HEADS
    assert torch.equal(seen[:, 5:], plain[:, 5:]) and not torch.equal(seen, plain)


def test_pages_of_what_was_kept(modules: dict[str, ModuleType], made: Any) -> None:
    """All pages of the kept are the kept; some are fewer."""
    step, cache = made
    places = [torch.randperm(TOKENS)[:480].sort().values for _ in range(KV_HEADS)]
    kept = [places] * LAYERS
    evicted = modules["model"].Evicted(kept).attend(step, cache)
    torch.testing.assert_close(
        selected(modules, "select", "90%", kept).attend(step, cache), evicted
    )
    few = selected(modules, "select", "12%", kept)
    seen = few._seen(step, torch.cat([cache.keys[:, :480], step.k], dim=1))
    assert seen[:, :, :480].sum(-1).max() <= 16 * int(few.pages[1])
    assert float((few.attend(step, cache) - evicted).abs().max()) > 0.01


def test_masks_keep_as_much_as_is_said(modules: dict[str, ModuleType]) -> None:
    model = SimpleNamespace(layers=10, kv_heads=4)
    probes = modules["static_heads"].HeadProbes(model, None)
    ids = list(range(4000))
    kept = probes.kept("random", ids, 2000)
    lengths = [len(head) for layer in kept for head in layer]
    assert set(lengths) == {4000, 384} and sum(lengths) / 40 == pytest.approx(2000, abs=46)
    streaming = next(head for layer in kept for head in layer if len(head) == 384)
    assert streaming.tolist() == [*range(128), *range(3744, 4000)]
    other = probes.kept("random", ids[:-1], 2000)
    assert [[len(head) for head in layer] for layer in other] != [
        [len(head) for head in layer] for layer in kept
    ]
    with pytest.raises(ValueError, match="200 tokens a head are less than the 384"):
        probes.kept("random", ids, 200)


def test_reserves_and_floors_stay(modules: dict[str, ModuleType], monkeypatch: Any) -> None:
    """Against scores that want nothing of what must stay."""
    methods = modules["methods"]
    torch.manual_seed(1)
    scores = torch.rand(KV_HEADS, TOKENS)
    scores[:, :200] = scores[:, 700:] = -1.0
    model = SimpleNamespace(layers=LAYERS)
    recorded = SimpleNamespace(tokens=TOKENS)
    monkeypatch.setattr(methods.Prompt, "scores", lambda self, policy: [scores] * LAYERS)
    template = [*range(100), 160, 161, 800]
    messages = [0, 100, 160, 800]
    prompt = methods.Prompt(model, list(range(TOKENS)), recorded, None, messages, 0, template)
    plain, ends, floor, spans = (
        methods.Method.parse("one", "snapkv-expected", own).kept(prompt, "25%")[0][0]
        for own in ({}, {"ends": 0.2}, {"floor": 16}, {"spans": True})
    )
    assert len(plain) == len(ends) == len(floor) == len(spans)
    assert set(template) <= set(spans.tolist()) and not set(template) <= set(plain.tolist())
    with pytest.raises(ValueError, match="151 tokens stay, and a layer keeps 149"):
        methods.Method.parse("one", "snapkv-expected", {"spans": True}).kept(prompt, "149")
    assert {place for place in plain.tolist() if place < 200} == set(range(4))
    fifth = round(0.2 * len(ends))
    assert set(range(fifth)) | set(range(TOKENS - fifth, TOKENS)) <= set(ends.tolist())
    counts = [
        int(((floor >= a) & (floor < b)).sum()) for a, b in ((0, 100), (100, 160), (160, 800))
    ]
    assert counts[0] == 16 and counts[1] == 16 and counts[2] > 16


def test_arguments_of_the_study_are_checked(modules: dict[str, ModuleType]) -> None:
    parse = modules["methods"].Method.parse
    with pytest.raises(ValueError, match="names no probe: one of echo, mean attention, random"):
        parse("one", "full", {"static": "ech"})
    assert parse("one", "full", {"static": "echo"}).evicts and not parse("one", "full", {}).evicts
    made = [parse("a", "select", {}), parse("a", "select", {"attend.scorer": "box"})]
    made += [parse("a", "snapkv-expected", own) for own in ({}, {"ends": 0.1}, {"spans": True})]
    assert len({method.definition for method in made}) == 5
