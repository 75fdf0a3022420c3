# SPDX-License-Identifier: Apache-2.0
"""Decodes a given continuation, to measure its probability behind an evicted prompt.

vLLM's prompt log probabilities come from the prefill, before anything is evicted. So the
continuation is decoded: a logits processor leaves only its next token, and the log probabilities
that vLLM returns are those before any processor (`logprobs_mode="raw_logprobs"`).
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

FORCED_KEY = "forced_token_ids"
# For `LLM(logits_processors=[...])`.
QUALIFIED_NAME = f"{__name__}:ForcedTokens"


class ForcedTokens(AdapterLogitsProcessor):
    """Requests with `extra_args={"forced_token_ids": [...]}` generate exactly these tokens."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(FORCED_KEY)
        if forced is None:
            return None

        def only_next(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            alone = torch.full_like(logits, -torch.inf)
            alone[forced[min(len(output_token_ids), len(forced) - 1)]] = 0.0
            return alone

        return only_next


def forced_params(token_ids: list[int], extra_args: dict[str, object]) -> SamplingParams:
    """Parameters of a request that decodes `token_ids` and returns their log probabilities."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(token_ids),
        min_tokens=len(token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args={**extra_args, FORCED_KEY: token_ids},
    )
