# SPDX-License-Identifier: Apache-2.0
"""Decode given tokens, to measure what a model says of them behind an evicted prompt.

vLLM's prompt log probabilities come from the prefill, before anything is evicted. So a logits
processor leaves only the continuation's next token, and vLLM returns the log probabilities before
any processor (`logprobs_mode="raw_logprobs"`). With a reference, the likeliest tokens of the whole
cache at each place, the processor compares what the kept cache makes of them. It runs in a worker,
which writes its findings to a file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

FORCED_KEY, REFERENCE_KEY, FINDINGS_KEY = "forced_token_ids", "forced_reference", "forced_findings"
# For `LLM(logits_processors=[...])`.
QUALIFIED_NAME = f"{__name__}:ForcedTokens"


def divergence(reference: list[float], found: list[float]) -> float:
    """Return KL(reference || found) in nats over the same tokens, all others counted as one."""
    ours, theirs = (torch.tensor(x, dtype=torch.float64) for x in (found, reference))
    rest = [torch.log1p(-x.exp().sum().clamp(max=1 - 1e-9)) for x in (theirs, ours)]
    kl = (theirs.exp() * (theirs - ours)).sum() + rest[0].exp() * (rest[0] - rest[1])
    return max(float(kl), 0.0)


class ForcedTokens(AdapterLogitsProcessor):
    """Requests with `extra_args={"forced_token_ids": [...]}` generate these tokens first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By the file that it goes to and by place: a preempted request comes here anew, and chunks
        # of its recomputed prompt come by with logits that mean nothing. The last ones count.
        self._found: dict[str, dict[int, tuple[bool, float]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra = params.extra_args or {}
        forced = extra.get(FORCED_KEY)
        if forced is None:
            return None
        reference: dict[str, Any] = extra.get(REFERENCE_KEY, {})

        def compare(place: int, logits: torch.Tensor) -> None:
            found = logits.float().log_softmax(dim=-1)
            agrees = int(found.argmax()) == forced[place]
            ours = found[reference["likeliest"][place]].tolist()
            findings = self._found.setdefault(extra[FINDINGS_KEY], {})
            findings[place] = (agrees, divergence(reference["logprobs"][place], ours))
            if len(findings) == len(forced):
                _write(Path(extra[FINDINGS_KEY]), [findings[i] for i in range(len(forced))])

        def next_token(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            place = len(output_token_ids)
            if place >= len(forced):
                return logits
            if reference:
                compare(place, logits)
            alone = torch.full_like(logits, -torch.inf)
            alone[forced[place]] = 0.0
            return alone

        return next_token


def _write(path: Path, findings: list[tuple[bool, float]]) -> None:
    """Replace the file at once: all ranks write the same findings while one may be reading."""
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(json.dumps(findings))
    own.replace(path)


def forced_params(
    token_ids: list[int], extra_args: dict[str, object], more: int = 0
) -> SamplingParams:
    """Return parameters of a request that decodes `token_ids`, then `more` tokens of its own.

    It returns the log probabilities of all. A text's end among the given tokens ends nothing.
    """
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(token_ids) + more,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args={**extra_args, FORCED_KEY: token_ids},
    )
