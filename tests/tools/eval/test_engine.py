# SPDX-License-Identifier: Apache-2.0
"""A policy against the whole cache through real engines, on the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_pyramid.tools.cli import main
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.eval.compare import made_up_prompts
from vllm_pyramid.tools.eval.engine import Request, Work, answer_all
from vllm_pyramid.tools.eval.forced import divergence
from vllm_pyramid.tools.eval.haystack import load_tokens
from vllm_pyramid.tools.eval.result import REFERENCE_TOKENS, Result

pytestmark = [
    pytest.mark.slow,
    *(pytest.mark.engine, pytest.mark.timeout(900)),
    pytest.mark.usefixtures("prepared_programs"),
]


@pytest.fixture
def fewer_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in the command's own child, not in two more below it, each with vLLM's imports."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def test_the_command(tmp_path: Path) -> None:
    """As a user runs it: a budget that keeps everything changes nothing, a small one does."""
    file = tmp_path / "rows.json"
    sizes = ("--num-prompts", "2", "--prompt-tokens", "1200", "--answer-tokens", "12")
    budgets = ("--budgets", "100%,4%", "--kv-policy-args", '{"min_tokens": 0, "window": 16}')
    dtype = ("--engine-args", json.dumps({"dtype": "float32"}))
    assert main(["eval", "--json", str(file), *sizes, *budgets, *dtype]) == 0
    whole, few = json.loads(file.read_text())["rows"]
    assert (whole["agreement"], whole["memory"]) == (1.0, 1.0)
    assert whole["divergence"] == pytest.approx(0.0, abs=1e-4)
    assert few["memory"] < 0.2 and few["divergence"] > 0.01
    assert few["worst"] <= few["agreement"] <= 1.0


def _answered(work: Work) -> dict[str, Result]:
    return dict(answer_all(work, lambda _: None))


@pytest.mark.usefixtures("fewer_processes")
def test_given_tokens_and_the_whole_caches_own_answer() -> None:
    """A reference, what other budgets make of it, and an answer behind given tokens."""
    tokens = load_tokens(model_path())
    (prompt,) = made_up_prompts(tokens, 1, 600)
    work = Work(
        label="x",
        model=str(model_path()),
        kv_policy="full",
        kv_policy_args={},
        policy_name="full",
        engine_args={"max_model_len": 700, "dtype": "float32"},
        requests=[
            Request(key="r", prompt_token_ids=prompt, budget=None, max_tokens=20, is_reference=True)
        ],
    )
    reference = _answered(work)["r"].reference
    assert reference is not None
    assert [place[0] for place in reference.likeliest] == reference.token_ids
    assert {len(place) for place in reference.logprobs} == {REFERENCE_TOKENS}

    def request(key: str, budget: str | None, **changes: Any) -> Request:
        values: dict[str, Any] = {"prompt_token_ids": prompt, "max_tokens": 0}
        return Request(key=key, budget=budget, **{**values, **changes})

    ids = reference.token_ids
    both = {"forced": ids, "reference": reference}
    requests = [request(budget, budget, **both) for budget in ("100%", "30%", "5%")]
    # Its own first tokens given, it goes on as before; so it does behind a longer prompt.
    requests.append(request("lead", "100%", forced=ids[:6], max_tokens=14))
    requests.append(request("longer", "100%", prompt_token_ids=prompt + ids[:6], max_tokens=14))
    # The same prompt as a conversation of three turns, whose ends evict.
    turns = [len(prompt) // 3, 2 * len(prompt) // 3]
    requests.append(request("turns", "30%", turns=turns, **both))
    snapkv = {"label": "y", "kv_policy": "snapkv", "policy_name": "snapkv", "requests": requests}
    found = _answered(work.model_copy(update=snapkv))
    same, less, least = (found[budget] for budget in ("100%", "30%", "5%"))
    assert same.agreement == 1.0 and same.divergence == pytest.approx(0.0, abs=1e-4)
    assert same.divergence is not None and less.divergence is not None
    assert least.divergence is not None and least.agreement is not None
    assert same.divergence < less.divergence < least.divergence
    assert least.agreement < 1.0 and least.divergence > 0.1
    eviction = found["turns"].eviction
    assert eviction.inner_evictions == 2 and eviction.kv_turns == [*turns, len(prompt)]
    assert eviction.kept_tokens == less.eviction.kept_tokens
    assert less.eviction.inner_evictions is less.eviction.kv_turns is None
    assert less.divergence != found["turns"].divergence
    assert found["lead"].text and found["lead"].text == found["longer"].text


def test_the_divergence_counts_what_is_left_as_one_token() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 9, generator=generator, dtype=torch.float64).log_softmax(dim=-1)
    few = [0, 2, 3, 7]
    lumped = [torch.cat([x[few].exp(), 1 - x[few].exp().sum()[None]]).log() for x in (theirs, ours)]
    expected = float((lumped[0].exp() * (lumped[0] - lumped[1])).sum())
    assert divergence(theirs[few].tolist(), ours[few].tolist()) == pytest.approx(expected)
    assert divergence(theirs.tolist(), theirs.tolist()) == pytest.approx(0.0, abs=1e-6)
    whole = float((theirs.exp() * (theirs - ours)).sum())
    assert divergence(theirs.tolist(), ours.tolist()) == pytest.approx(whole, abs=1e-6)
    assert expected < whole
