# SPDX-License-Identifier: Apache-2.0
"""Selected pages: the whole cache's answer where all is read, an oracle's where it is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.drafts import count_drafts
from tests.engine.hybrids import make_hybrid
from tests.engine.oracles import check_log_probabilities
from tests.engine.paged_paper import PagedModel, Pages, SummaryCheck, pages_read
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Models,
    Outcome,
    Start,
    assert_same_tokens,
    greedy,
    random_prompts,
)
from vllm_pyramid.methods.pages.reads import PageReads
from vllm_pyramid.policy import load_policy

MODEL, LAYERS, HEADS, KV_HEADS = "qwen3", 4, 4, 2
N, DENSE, SINKS, RECENT = 16, 1, 1, 2  # of a block; layers; pages
BUDGET = 6  # pages
ATTEND: dict[str, Any] = {
    "budget": BUDGET * N,
    "dense_layers": DENSE,
    "sinks": SINKS * N,
    "recent": (RECENT - 1) * N,
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": N,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
}
LENGTHS = (1, 15, 16, 17, 33, 96, 97, 257, 512, 700)
TOKENS = 20
SELECT: dict[str, Any] = {"kv_policy": "select", "kv_policy_args": {"attend": ATTEND}, **SETTINGS}


def _jobs(tokens: int = TOKENS, lengths: tuple[int, ...] = LENGTHS, **extra_args: Any) -> list[Job]:
    """Some meet requests that decode, or come in chunks."""
    return [
        Job(prompt, greedy(tokens, logprobs=2, **extra_args), arrival=index // 2)
        for index, prompt in enumerate(random_prompts(lengths, seed=5))
    ]


def _assert_equal(ours: list[Outcome], theirs: list[Outcome]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs  # floats, bit for bit


def _fresh(engine: Engine) -> Engine:
    assert engine.llm.reset_prefix_cache()
    return engine


@pytest.fixture(scope="module")
def model(tiny_model: Models) -> Path:
    return tiny_model(MODEL)


def _planned(outcome: Outcome, budget: int = BUDGET, skips: int = 0) -> dict[str, int]:
    """What a response must say, by arithmetic: the last token is sampled and not computed."""
    read = visible = 0
    prompt, generated = len(outcome.job.prompt), len(outcome.token_ids)
    for position in range(prompt, prompt + generated - 1):
        pages = position // N + 1 - skips
        visible += LAYERS * pages
        read += DENSE * pages + (LAYERS - DENSE) * min(pages, budget)
    return {"pages_read": read, "pages_visible": visible, "attended_tokens": generated - 1}


def _assert_read(outcomes: list[Outcome], **how: int) -> None:
    for outcome in outcomes:
        planned = _planned(outcome, **how)
        assert {key: outcome.report[key] for key in planned} == planned, len(outcome.job.prompt)


# The oracle ---------------------------------------------------------------------------------------


def _scores(kind: str, query: torch.Tensor, keys: torch.Tensor, combine: str) -> torch.Tensor:
    """Weights of the full pages before a query's own: `[Q, D]` and `[T, D]`, in float64."""
    pages = keys.double().unflatten(0, (-1, N))
    q = query.double()
    if kind == "box":
        logits = torch.maximum(q[:, None] * pages.amax(1), q[:, None] * pages.amin(1)).sum(-1)
    else:
        mean = pages.mean(dim=1)
        deviation = (pages - mean[:, None]).pow(2).mean(dim=1).sqrt()
        logits = q @ mean.T + (q.abs() @ deviation.T if kind == "spread" else 0.0)
    weights = (logits / q.shape[1] ** 0.5).softmax(dim=-1)
    return weights.mean(dim=0) if combine == "mean" else weights.amax(dim=0)


def _oracle_runs(
    model: Path, outcomes: list[Outcome], pages: Pages
) -> Iterator[tuple[Outcome, PagedModel, torch.Tensor]]:
    """Each outcome, the oracle behind its prompt and answer, and the answer's log probabilities."""
    oracle = PagedModel(str(model))
    oracle.pages = pages
    for outcome in outcomes:
        prompt, oracle.name = outcome.job.prompt, outcome.request_id
        logprobs = oracle.forward(prompt + outcome.token_ids[:-1], len(prompt))
        yield outcome, oracle, logprobs[len(prompt) - 1 :]


def _choices(outcome: Outcome, pages: Pages) -> Iterator[tuple[int, int, list[list[int]]]]:
    """Layer, position and the pages of each KV head, of an outcome's tokens that chose."""
    for (name, layer, position), heads in pages.items():
        if name == outcome.request_id:
            yield layer, position, heads


def _check_best(found: list[int], scores: torch.Tensor, own: int) -> bool:
    """Sinks and recent pages are found, and what scores best; whether there was another page."""
    always = {*range(SINKS), *range(own - RECENT + 1, own + 1)}
    assert always <= set(found)
    best = [float(scores[page]) for page in found if page not in always]
    rest = [float(scores[page]) for page in range(own) if page not in found]
    assert not rest or min(best) >= max(rest) - 1e-5
    return bool(rest)


@pytest.mark.parametrize(("scorer", "combine"), [("spread", "mean"), ("box", "max")])
def test_an_independent_implementation_gives_its_tokens(tiny, model, scorer, combine) -> None:
    attend = {**ATTEND, "scorer": scorer, "combine": combine}
    engine = tiny(MODEL, **{**SELECT, "kv_policy_args": {"attend": attend}})
    _fresh(engine).shuffle_blocks()
    with pages_read(engine) as pages:
        outcomes = engine.run(_jobs(lengths=(17, 97, 257, 512)))
    _assert_read(outcomes)
    chosen = 0
    for outcome, oracle, logprobs in _oracle_runs(model, outcomes, pages):
        prompt = outcome.job.prompt
        check_log_probabilities(logprobs, outcome, 2e-4)
        for layer, position, heads in _choices(outcome, pages):
            own = position // N
            assert layer >= DENSE and position >= len(prompt) and len(heads) == KV_HEADS
            for head, found in enumerate(heads):
                assert len(set(found)) == len(found) == min(BUDGET, own + 1)
                assert found == sorted(found)
                group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
                query = oracle.queries[layer][group, position]
                keys = oracle.keys[layer][head, : own * N]
                scores = _scores(scorer, query, keys, combine)
                chosen += _check_best(found, scores, own)
    assert chosen > 3 * TOKENS * (LAYERS - DENSE) * KV_HEADS / 2


def test_the_page_scorer_of_the_documents_chooses(
    engines: EnginePool, tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine, the pages that it scores highest; where it raises, its requests end."""
    page = (Path(__file__).parents[2] / "docs" / "select.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_pages.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    model = tiny_model("llama-mha")  # KV heads with one query head each
    scorer = {"kind": "my_pages:HalvesScorer", "weight": 0.5}
    args = {"attend": {**ATTEND, "scorer": scorer}}
    engine = _fresh(engines.get(model, **{**SELECT, "kv_policy_args": args}))
    with pages_read(engine) as pages:
        outcomes = engine.run(_jobs(lengths=(97, 257)))
    _assert_read(outcomes)
    compared = 0
    for outcome, oracle, _ in _oracle_runs(model, outcomes, pages):
        for layer, position, heads in _choices(outcome, pages):
            own = position // N
            for head, found in enumerate(heads):
                keys = oracle.keys[layer][head, : own * N].double().unflatten(0, (own, 2, N // 2))
                halves = keys.mean(dim=2) @ oracle.queries[layer][head, position].double()
                scores = halves[:, 0] + 0.5 * halves[:, 1]
                assert _check_best(found, scores, own)
                compared += 1
    assert compared == len(outcomes) * (TOKENS - 1) * (LAYERS - DENSE) * len(heads)

    (selector,) = engine.attention_layers(evicting=True)[0].impl.context.hooks.before_attention
    calls = []

    def fail_once(query: torch.Tensor) -> torch.Tensor:
        calls.append(len(query))
        if len(calls) == 1:
            raise ArithmeticError("no extension")
        return torch.cat([query, 0.5 * query], dim=-1)

    monkeypatch.setattr(type(selector.scorer), "extend", staticmethod(fail_once))
    (ended,) = _fresh(engine).run(_jobs(lengths=(257,)))
    (completion,) = ended.output.outputs
    assert completion.finish_reason == "error" and len(completion.token_ids) == 1
    engine.check_whole()
    again = _fresh(engine).run(_jobs(lengths=(97, 257)))
    assert [o.token_ids for o in again] == [o.token_ids for o in outcomes]


def test_layers_may_read_different_numbers_of_pages_from_a_context_on(tiny: Start) -> None:
    """A pyramid of budgets, and everything below `min_context`: what attention is given says so."""
    attend = {**ATTEND, "allocator": {"kind": "arithmetic", "beta": 2.0}, "min_context": 264}
    engine = tiny(MODEL, **{**SELECT, "kv_policy_args": {"attend": attend}})
    with pages_read(_fresh(engine)) as pages:
        outcomes = engine.run(_jobs(lengths=(97, 257, 512)))
    budgets = load_policy("select", args={"attend": attend}).attend.pages(512, LAYERS, N)
    assert budgets[DENSE] > budgets[-1] >= SINKS + RECENT
    assert int(budgets[DENSE:].sum()) == BUDGET * (LAYERS - DENSE)
    for outcome in outcomes:
        read, length = 0, len(outcome.job.prompt)
        for position in range(length, length + TOKENS - 1):
            seen = position // N + 1
            for layer in range(LAYERS):
                chooses = layer >= DENSE and position >= 264
                read += min(seen, int(budgets[layer])) if chooses else seen
                if (outcome.request_id, layer, position) in pages:
                    heads = pages[outcome.request_id, layer, position]
                    assert chooses and {len(own) for own in heads} == {budgets[layer]}
        assert outcome.report["pages_read"] == read, length
    short = outcomes[0].report
    assert short["pages_read"] == short["pages_visible"]


# Invariance ---------------------------------------------------------------------------------------


def test_drafts_change_nothing(tiny: Start) -> None:
    """Each draft chooses by itself, and a rejected one leaves no trace in a summary."""
    prompts = [
        [8 + (7 * i + i // 40) % 40 for i in range(length)] for length in (97, 257, 512, 330)
    ]

    def jobs() -> list[Job]:
        return [Job(prompt, greedy(40, logprobs=2)) for prompt in prompts]

    engine = _fresh(tiny(MODEL, **SELECT))
    plain = engine.run(jobs())
    drafted = tiny(
        MODEL,
        **SELECT,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    )
    count = count_drafts(drafted)
    check = SummaryCheck()
    outcomes = drafted.run(jobs(), check)
    assert check.pages > 3000
    assert 0 < count["accepted"] < count["drafted"] - 20, count
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in plain]
    attended = sum(one.report["attended_tokens"] for one in outcomes)
    assert 4 * 39 < attended <= 4 * 39 + count["drafted"]
    for one in outcomes:
        assert one.report["pages_read"] < one.report["pages_visible"]
    drafted.check_whole()


@pytest.mark.parametrize("span", [None, (20, 28)], ids=["alone", "with kv_keep"])
def test_evicted_and_selected(engines, model, tmp_path_factory, span) -> None:
    """Half of the prompt is kept, and a part of that read: both as planned, and as an oracle's."""
    folder = tmp_path_factory.getbasetemp() / "evicted-and-selected"
    folder.mkdir(exist_ok=True)
    engine = engines.get(
        model,
        kv_policy="select-evicted",
        kv_policy_args={"attend": ATTEND},
        kv_trace=str(folder),
        **SETTINGS,
    )
    _fresh(engine).shuffle_blocks()
    check = SummaryCheck()
    own = {} if span is None else {"kv_keep": list(span)}
    with pages_read(engine) as pages:
        outcomes = engine.run(_jobs(lengths=(160, 512, 700), **own), check)
    assert check.pages > 1000
    engine.run(_jobs(lengths=(16,)))
    oracle = PagedModel(str(model))
    oracle.pages = pages
    left_out = 0
    for outcome in outcomes:
        prompt, generated = outcome.job.prompt, outcome.token_ids
        kept = outcome.report["kept_tokens"]
        skips = {(len(prompt) - held) // N for held in kept}
        assert len(skips) == 1 and outcome.report["evicted_tokens"] > 0
        _assert_read([outcome], skips=skips.pop())
        with np.load(folder / f"{outcome.request_id}.npz") as file:
            layers = [torch.from_numpy(file[f"kept_{layer}"]).long() for layer in range(LAYERS)]
        for heads in layers:
            for held in heads.tolist():
                left_out += len({*range(20, 28)} - {*held})
        with np.load(folder / f"{outcome.request_id}~pages.npz") as file:  # by the next step
            assert int(file["pages_read"].sum()) == outcome.report["pages_read"]
        # Page j of the cache holds the survivors that moved there.
        oracle.name = outcome.request_id
        oracle.survivors = layers
        logprobs = oracle.forward(prompt + generated[:-1], len(prompt))[len(prompt) - 1 :]
        check_log_probabilities(logprobs, outcome, 2e-4)
    assert (left_out == 0) == (span is not None)
    engine.check_whole()


def test_evicted_inside_the_prompt_and_selected(tiny: Start) -> None:
    """Keys move at every point; with a large budget it is what the policy is without `attend`."""
    chunk = {"tokens": 128, "keep": 96, "scorer": "keydiff"}
    common = {**SETTINGS, "kv_policy": "keydiff", "kv_budget": 64}
    evicted = tiny(MODEL, **common, kv_policy_args={"chunk": chunk})
    lengths = (97, 330, 512, 700)
    expected = evicted.run(_jobs(60, lengths))
    attend = {"kind": "pages", **ATTEND, "budget": 3 * N, "recent": 0}
    engine = tiny(MODEL, **common, kv_policy_args={"chunk": chunk, "attend": attend})
    _assert_equal(engine.run(_jobs(60, lengths, kv_attend_budget="100%")), expected)
    _fresh(engine)
    check = SummaryCheck()
    few = engine.run(_jobs(60, lengths), check)
    assert check.pages > 1000
    for one, whole in zip(few, expected, strict=True):
        assert one.report["inner_evictions"] == whole.report["inner_evictions"]
        assert one.report["pages_read"] < 0.7 * one.report["pages_visible"]
        assert one.logprobs[0] == whole.logprobs[0] and one.logprobs != whole.logprobs
    assert sum(one.report["inner_evictions"] for one in few) > 5
    engine.check_whole()


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "lfm2", "gemma3n"])
def test_layers_of_other_kinds_attend_as_ever(engines, tmp_path, family) -> None:
    """Windows, learned sinks, states: only layers with full attention select."""
    folder = make_hybrid(family, tmp_path)
    jobs = {"lengths": (33, 257, 512)}
    common = {**SETTINGS, "max_num_batched_tokens": 512}
    if family == "lfm2":  # whose queries and keys vLLM turns wrongly on a CPU, see families.py
        common["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    full = engines.get(folder, kv_policy="full", **common).run(_jobs(**jobs))
    attend = {**ATTEND, "dense_layers": 0}
    engine = engines.get(folder, kv_policy="select", kv_policy_args={"attend": attend}, **common)
    _assert_equal(_fresh(engine).run(_jobs(**jobs, kv_attend_budget=4096)), full)
    few = _fresh(engine).run(_jobs(**jobs))
    for one, whole in zip(few, full, strict=True):
        layers, prompt = len(one.report["layers"]), len(one.job.prompt)
        pages = [p // N + 1 for p in range(prompt, prompt + TOKENS - 1)]
        assert one.report["pages_visible"] == layers * sum(pages)
        assert one.report["pages_read"] == layers * sum(min(p, BUDGET) for p in pages)
        assert one.logprobs[0] == whole.logprobs[0]
        assert (one.logprobs == whole.logprobs) == (prompt == 33)
    alone = [_fresh(engine).run([Job(one.job.prompt, one.job.params)])[0] for one in few]
    assert_same_tokens(few, alone)
    engine.check_whole()


def test_the_metrics_and_the_scheduler_count_pages(tiny: Start) -> None:
    engine = _fresh(tiny(MODEL, **SELECT))
    (hooks,) = [one for one in engine.scheduler.pyramid.hooks if isinstance(one, PageReads)]
    before = hooks.totals()
    outcomes = engine.run(_jobs(lengths=(257, 97)))
    after = engine.scheduler.pyramid.reports.policy_stats()
    for name in ("pages_read", "pages_visible"):
        assert after[name] - before[name] == sum(one.report[name] for one in outcomes) > 0
