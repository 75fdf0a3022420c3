# SPDX-License-Identifier: Apache-2.0
"""How many tokens of one request a step of vLLM's scheduler can compute."""

from __future__ import annotations

from typing import NamedTuple

from vllm.config import VllmConfig


class StepLimit(NamedTuple):
    """A flag that limits the tokens of a step, set to `value`; 0 or None: no limit.

    `tokens` are the most of one request in a step because of it.
    """

    flag: str
    value: int | None
    tokens: int | None


def step_limits(config: VllmConfig) -> list[StepLimit]:
    """Return the limits of a step, by vLLM's finished configuration.

    vLLM takes the places that a draft model needs out of `--max-num-batched-tokens`.
    """
    scheduler, drafts = config.scheduler_config, config.speculative_config
    places = 0 if drafts is None else drafts.max_num_new_slots_for_drafting
    batched = scheduler.max_num_batched_tokens
    others = (
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold),
    )
    return [
        StepLimit("--max-num-batched-tokens", batched, batched - places),
        *(StepLimit(flag, value, value or None) for flag, value in others),
    ]
