# SPDX-License-Identifier: Apache-2.0
"""A policy against the whole cache on the same prompts: agreement and divergence.

The whole cache answers each prompt greedily. Then that answer is decoded again, token by token,
after the policy has evicted. Two engines run one after the other, each in a process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vllm_pyramid.tools.eval.engine import Request, Work, answer_all
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.phrases import CODE, held_out_facts
from vllm_pyramid.tools.eval.result import Reference, Result

FULL = "full"


@dataclass(frozen=True)
class Row:
    """One budget over all prompts.

    Attributes:
        budget: as given; None for a policy without one.
        agreement: share of the answers' tokens that are the likeliest ones after eviction too, the
            mean over the prompts. worst: the smallest of a prompt.
        divergence: KL(whole cache || policy) of the next token in nats, the mean over the prompts.
        memory: blocks held after the eviction, as a share of those of the whole prompt.
    """

    budget: str | None
    agreement: float
    worst: float
    divergence: float
    memory: float


def row_of(budget: str | None, results: Sequence[Result]) -> Row:
    """Return the figures of one budget."""
    agreement = [result.agreement for result in results if result.agreement is not None]
    divergence = [result.divergence for result in results if result.divergence is not None]
    assert len(agreement) == len(divergence) == len(results)
    memory = fmean(result.eviction.memory for result in results)
    return Row(budget, fmean(agreement), min(agreement), fmean(divergence), memory)


def compare(
    model: str,
    policy: str,
    policy_args: Mapping[str, Any],
    policy_name: str,
    prompts: Sequence[list[int]],
    budgets: Sequence[str | None],
    answer_tokens: int,
    engine_args: Mapping[str, Any],
    on_stage: Callable[[str], None],
    on_result: Callable[[], None],
) -> list[list[Result]]:
    """Return the results, `[budgets][prompts]`.

    Args:
        policy_name: as the engine reports it.
        prompts: token ids. answer_tokens: most tokens of an answer; it ends with the text.
        on_result: is called for each answer.

    Raises:
        ChildError: an engine failed. RuntimeError: an answer was not compared.
    """
    longest = max(map(len, prompts)) + answer_tokens + 1
    common: dict[str, Any] = {
        "model": model,
        "engine_args": {"max_model_len": longest, **engine_args},
    }
    whole = Work(
        label="the whole cache",
        kv_policy=FULL,
        kv_policy_args={},
        policy_name=FULL,
        requests=[
            Request(
                key=f"whole-{index}",
                prompt_token_ids=ids,
                budget=None,
                max_tokens=answer_tokens,
                is_reference=True,
            )
            for index, ids in enumerate(prompts)
        ],
        **common,
    )
    references: dict[str, Reference] = {}
    with closing(answer_all(whole, on_stage)) as answers:
        for key, result in answers:
            assert result.reference is not None
            references[key] = result.reference
            on_result()
    evicted = Work(
        label=policy_name,
        kv_policy=policy,
        kv_policy_args=dict(policy_args),
        policy_name=policy_name,
        requests=[
            Request(
                key=f"{number}-{index}",
                prompt_token_ids=ids,
                budget=budget,
                max_tokens=0,
                forced=references[f"whole-{index}"].token_ids,
                reference=references[f"whole-{index}"],
            )
            for index, ids in enumerate(prompts)
            for number, budget in enumerate(budgets)
        ],
        **common,
    )
    found: dict[str, Result] = {}
    with closing(answer_all(evicted, on_stage)) as answers:
        for key, result in answers:
            found[key] = result
            on_result()
    if missing := len(evicted.requests) - len(found):
        raise RuntimeError(f"{missing} answers were not compared")
    return [
        [found[f"{number}-{index}"] for index in range(len(prompts))]
        for number in range(len(budgets))
    ]


def made_up_prompts(tokens: Tokens, count: int, length: int) -> list[list[int]]:
    """Return prompts of at most `length` tokens: a fact in real text, and a question."""
    prompts = []
    for index in range(count):
        rng = random.Random(index)
        keys, _, facts = held_out_facts(rng, 1)
        text = tokens.hide(rng, facts, CODE.question(keys[0]).prompt, length)
        prompts.append(tokens.encode(text))
    return prompts
