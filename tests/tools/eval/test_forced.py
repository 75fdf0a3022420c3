# SPDX-License-Identifier: Apache-2.0
"""The logits processor that decodes given tokens, as a worker calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm_pyramid.tools.eval.forced import (
    FINDINGS_KEY,
    FORCED_KEY,
    REFERENCE_KEY,
    ForcedTokens,
    forced_params,
)

VOCABULARY = 12
FORCED = [3, 7, 5]


def processor() -> ForcedTokens:
    return ForcedTokens(None, torch.device("cpu"), False)


def params(findings: Path) -> Any:
    """Of which `FORCED` are the greedy tokens, each with all the probability but a little."""
    reference = {
        "likeliest": [[token, 0] for token in FORCED],
        "logprobs": [[-0.01, -6.0]] * len(FORCED),
    }
    extra: dict[str, object] = {REFERENCE_KEY: reference, FINDINGS_KEY: str(findings)}
    return forced_params(FORCED, extra)


def logits_for(token: int) -> torch.Tensor:
    logits = torch.zeros(VOCABULARY, dtype=torch.bfloat16)
    logits[token] = 9.0
    return logits


def test_given_tokens_come_first_and_others_are_free() -> None:
    step: Any = processor().new_req_logits_processor(forced_params(FORCED, {}, more=2))
    noise = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    for place, token in enumerate(FORCED):
        left = step([1] * place, noise)
        assert left.isfinite().nonzero().flatten().tolist() == [token]
    assert step([1] * 3, noise) is noise


def test_other_requests_are_left_alone() -> None:
    from vllm import SamplingParams

    assert processor().new_req_logits_processor(SamplingParams()) is None
    assert FORCED_KEY in (forced_params(FORCED, {}).extra_args or {})


def test_a_preempted_request_is_compared_to_its_end(tmp_path: Path) -> None:
    """It comes anew, with the tokens it has and logits of chunks that mean nothing first."""
    path, worker = tmp_path / "x.json", processor()
    first: Any = worker.new_req_logits_processor(params(path))
    first([], logits_for(3))
    first([3], logits_for(7))
    assert not path.exists()
    again: Any = worker.new_req_logits_processor(params(path))
    again([3, 7], logits_for(0))  # a chunk of the recomputed prompt
    again([3, 7], logits_for(5))
    found = json.loads(path.read_text())
    assert [agrees for agrees, _ in found] == [True, True, True]
    assert all(nats < 0.1 for _, nats in found), "the last logits of a place count"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_tie_agrees_with_the_greedy_token(tmp_path: Path) -> None:
    """The reference's list of likeliest tokens may begin with the other of two equal ones."""
    path = tmp_path / "x.json"
    step: Any = processor().new_req_logits_processor(params(path))
    for place, token in enumerate(FORCED):
        logits = logits_for(token)
        logits[token + 1] = 9.0  # as likely, and later: the greedy choice is `token`
        step(FORCED[:place], logits)
    assert [agrees for agrees, _ in json.loads(path.read_text())] == [True] * 3
