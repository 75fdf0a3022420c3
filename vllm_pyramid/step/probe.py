# SPDX-License-Identifier: Apache-2.0
"""Try a policy's scorer and selector on a made-up request, before an engine depends on them.

A class that returns a wrong result is refused at start-up, and does not end a running server.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_pyramid.step.eviction_batch import WrongResultError, check_scores, check_selection
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.scorer_inputs import ScorerInputs

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy

_TOKENS = 40  # of the request, in addition to window and sinks


def probe(policy: Policy, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """Score and select once with a worker's heads, on the CPU; ValueError says what failed.

    One thread is used: threads that the front end starts do not exist in a process that is forked
    from it afterwards, which would wait for them for ever.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _probe(policy, _made_up(policy, num_heads, num_kv_heads, head_size))
    finally:
        torch.set_num_threads(threads)


def _probe(policy: Policy, inputs: ScorerInputs) -> None:
    scorer, selector, num_kv_heads = policy.scorer, policy.selector, inputs.num_kv_heads
    try:
        scores = scorer.probed(inputs)
        if scores is None:
            scores = torch.rand(num_kv_heads, inputs.num_tokens)
        else:
            check_scores(scorer.kind, scores, num_kv_heads, inputs.num_tokens, scorer.asked)
            if not (scores < torch.inf).all():
                raise WrongResultError(
                    f"the scorer {scorer.kind!r} returned NaN or infinity, which cannot be ranked"
                )
            if scorer.in_parts:
                _check_parts(policy, inputs, scores)
        keep = policy.window + policy.sinks + _TOKENS // 2
        scores = scores.clone()
        scores[:, : policy.sinks] = scores[:, inputs.num_tokens - policy.window :] = torch.inf
        if (selected := selector.probed(scores, keep)) is not None:
            tokens = inputs.num_tokens
            if check_selection(selector.kind, selected, num_kv_heads, keep, tokens):
                raise WrongResultError(
                    f"the selector {selector.kind!r} returned wrong places: `select` must return "
                    f"[G, keep] = [{num_kv_heads}, {keep}] different places below {tokens}"
                )
    except WrongResultError:
        raise
    except Exception as error:
        raise ValueError(
            f"policy {policy.name!r}: its scorer {scorer.kind!r} or selector {selector.kind!r} "
            f"failed on a made-up request: {type(error).__name__}: {error}"
        ) from error


def _check_parts(policy: Policy, inputs: ScorerInputs, scores: torch.Tensor) -> None:
    """Raise WrongResultError if the scorer says `in_parts` and mixes KV heads."""
    parts = replace(inputs, heads_at_once=1).parts()
    found = torch.cat([part for view in parts if (part := policy.scorer.probed(view)) is not None])
    if not torch.allclose(found, scores, rtol=1e-3, atol=1e-5):
        raise WrongResultError(
            f"the scorer {policy.scorer.kind!r} says `in_parts = True`, but gives a KV head other "
            "scores where it sees fewer heads: leave `in_parts` out"
        )


def _made_up(policy: Policy, num_heads: int, num_kv_heads: int, head_size: int) -> ScorerInputs:
    tokens = policy.window + policy.sinks + _TOKENS
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, num_kv_heads, tokens, head_size, generator=source)
    angles = torch.rand(tokens + 1, head_size // 2, generator=source)
    scorer = policy.scorer
    looks_back = scorer.needs_queries or scorer.keeps_queries
    count = max(policy.window, 1) if looks_back else 1
    return ScorerInputs.of_tensors(
        torch.randn(count, num_heads, head_size, generator=source),
        *rows[:, 0],
        window=policy.window,
        sinks=policy.sinks,
        rotary=Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1)),
        knows_rotary=scorer.needs_rotary,
        asks_ranks=scorer.asks_ranks,
    )
