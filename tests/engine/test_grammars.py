# SPDX-License-Identifier: Apache-2.0
"""Eviction beside structured output and beam search."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.beside import BLOCK, BUDGET, SETTINGS, WHOLE, check_kept
from tests.engine.paper import HuggingFaceModel
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Outcome,
    count_preemptions,
    kept_at_evictions,
    random_prompts,
)

SCHEMA = {
    "type": "object",
    "properties": {"found": {"type": "boolean"}, "kind": {"enum": ["red", "green", "blue"]}},
    "required": ["found", "kind"],
    "additionalProperties": False,
}
PREEMPTING = {"kv_admission": "prompt"}
SMALL, LARGE = 8 * 20 + 1, 1200  # blocks; the demo model has 8 layers
CHOICES = ["yes", "no", "perhaps"]
PATTERN, LONG_PATTERN = r"[0-9]{4}-[a-f]{3}", r"[0-9]{60}-[a-f]{9}"


def _is_schema(text: str) -> bool:
    answer = json.loads(text)
    return (
        set(answer) == {"found", "kind"}
        and isinstance(answer["found"], bool)
        and answer["kind"] in ("red", "green", "blue")
    )


GRAMMARS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "regex": ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text)),
    "long": ({"regex": LONG_PATTERN}, lambda text: re.fullmatch(LONG_PATTERN, text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "json": ({"json": SCHEMA}, _is_schema),
}


def _in_grammar(grammar: str | None, max_tokens: int = 48, **extra: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=3,
        structured_outputs=StructuredOutputsParams(**GRAMMARS[grammar][0]) if grammar else None,
        extra_args=extra or None,
    )


def _demo(engines: EnginePool, **settings: Any) -> Engine:
    from vllm_pyramid.tools.demo import model_path

    # A random prompt's answer may be spaces for ever, where the grammar lets it.
    ours = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    return engines.get(model_path(), skip_tokenizer_init=False, **{**SETTINGS, **ours, **settings})


def _check_text(engine: Engine, grammar: str, outcome: Outcome) -> None:
    # Random prompts end inside a character, which would belong to the text of the answer.
    text = engine.llm.get_tokenizer().decode(outcome.token_ids, skip_special_tokens=True)
    assert GRAMMARS[grammar][1](text), (grammar, text)


def _check_differences(
    model: HuggingFaceModel, outcome: Outcome, kept: list[torch.Tensor] | None
) -> int:
    """Logits of the tokens that the grammar allows differ as those over the kept tokens do."""
    prompt = outcome.job.prompt
    rows = model.forward([*prompt, *outcome.token_ids[:-1]], len(prompt), kept)
    compared = 0
    for row, token, found in zip(
        rows[len(prompt) - 1 :], outcome.token_ids, outcome.logprobs, strict=True
    ):
        for other, logprob in found.items():
            if logprob > -1e3 and other != token:
                difference = float(row[token] - row[other])
                assert found[token] - logprob == pytest.approx(difference, abs=2e-3)
                assert difference > -2e-3
                compared += 1
    return compared


def test_grammars(engines: EnginePool, tmp_path: Path) -> None:
    """Answers follow their grammars, evicted or not; which tokens stay does not depend on it."""
    from vllm_pyramid.tools.demo import model_path

    engine = _demo(engines, kv_trace=str(tmp_path))
    prompts = random_prompts([200, 130, 40], vocab_size=400)
    cases = [
        (prompt, grammar, extra)
        for prompt in prompts
        for grammar in ("regex", "choice", "json", None)
        for extra in ({}, WHOLE)
    ]
    outcomes = engine.run(
        Job(prompt, _in_grammar(grammar, 48 if grammar else 12, **extra))
        for prompt, grammar, extra in cases
    )
    engine.check_whole()
    model = HuggingFaceModel(str(model_path()))
    compared = 0
    kept: dict[int, list[torch.Tensor]] = {}
    for (prompt, grammar, extra), outcome in zip(cases, outcomes, strict=True):
        evicts = len(prompt) > BUDGET + BLOCK and not extra
        assert bool(outcome.report["evicted_tokens"]) == evicts
        own = None
        if evicts:
            if len(prompt) not in kept:
                kept[len(prompt)] = check_kept(model, outcome, tmp_path)
            own, first = kept_at_evictions(tmp_path, outcome)[len(prompt)], kept[len(prompt)]
            assert all(torch.equal(*layers) for layers in zip(own, first, strict=True))
        compared += _check_differences(model, outcome, own)
        if grammar is not None:
            _check_text(engine, grammar, outcome)
    assert len(kept) == 2 and compared > 100


def test_grammars_beside_selected_pages(engines: EnginePool) -> None:
    """Answers follow their grammars; several answers and a seed read as many pages as one."""
    from vllm import SamplingParams

    attend = {"budget": 64, "dense_layers": 1, "sinks": 16, "recent": 16}
    selects = {"kv_policy": "select", "kv_policy_args": {"attend": attend}, "kv_budget": None}
    engine = _demo(engines, **selects)
    prompts = random_prompts([200, 130], vocab_size=400)
    cases = [(prompt, grammar) for prompt in prompts for grammar in GRAMMARS]
    outcomes = engine.run(Job(prompt, _in_grammar(grammar, 96)) for prompt, grammar in cases)
    for (_, grammar), outcome in zip(cases, outcomes, strict=True):
        _check_text(engine, grammar, outcome)
        assert 0 < outcome.report["pages_read"] < outcome.report["pages_visible"]
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    first, second = (engine.run([Job(prompts[0], sampled)])[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.report["pages_read"] == second.report["pages_read"] > 0
    engine.check_whole()


def test_grammars_and_preemption(engines: EnginePool) -> None:
    """Who comes back goes on in the middle of the grammar: answers are those of a large pool."""
    grammars = ("regex", "long", "json", "long", "choice", "long")
    prompts = random_prompts([130, 90, 110, 150, 60, 120], vocab_size=400)
    found = {}
    for blocks in (LARGE, SMALL):
        engine = _demo(engines, max_model_len=256, num_gpu_blocks_override=blocks, **PREEMPTING)
        with count_preemptions(engine) as count:
            outcomes = engine.run(
                Job(prompt, _in_grammar(grammar, max_tokens=96))
                for prompt, grammar in zip(prompts, grammars, strict=True)
            )
        engine.check_whole()
        for outcome, grammar in zip(outcomes, grammars, strict=True):
            _check_text(engine, grammar, outcome)
        found[blocks] = [outcome.token_ids for outcome in outcomes]
        assert bool(count["evicted"]) == (blocks == SMALL), count
    assert found[SMALL] == found[LARGE]


def test_beam_search_never_reads_an_evicted_cache(engines: EnginePool) -> None:
    """vLLM sends every beam anew for each token, and a prompt's next token sees all of it."""
    from vllm.sampling_params import BeamSearchParams

    from vllm_pyramid.tools.demo import model_path

    engine = _demo(engines, max_model_len=256, num_gpu_blocks_override=SMALL, **PREEMPTING)
    (prompt,) = random_prompts([120], vocab_size=400)
    before = engine.coordinator.counters.num_evictions
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    (output,) = engine.llm.beam_search([{"prompt_token_ids": prompt}], params)
    assert engine.coordinator.counters.num_evictions - before >= 1 + 3 * 2
    model = HuggingFaceModel(str(model_path()))
    beams = [(0.0, list[int]())]
    for _ in range(4):
        grown = [
            (total + float(logprob), [*tokens, int(token)])
            for total, tokens in beams
            for logprob, token in zip(*model.forward([*prompt, *tokens])[-1].topk(4), strict=True)
        ]
        beams = sorted(grown, reverse=True)[:2]
    for sequence, (total, tokens) in zip(output.sequences, beams, strict=True):
        assert sequence.tokens[len(prompt) :] == tokens
        assert sequence.cum_logprob == pytest.approx(total, abs=2e-3)
    engine.check_whole()
