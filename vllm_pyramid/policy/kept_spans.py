# SPDX-License-Identifier: Apache-2.0
"""Spans of a prompt that every layer and KV head keeps within its budget (`kv_keep`).

A span is a range of token positions, `start <= position < end`. At a request's first eviction a
token's place in the cache is its position, so any span can be found there. Behind an eviction each
KV head holds other survivors: then only a span that begins at position 0 is found, whose tokens are
the first ones of every head for as long as all of them stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import EvictionPoint, LevelPlan
from vllm_pyramid.plan.budget import MAX_TOKENS
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.limits import MAX_SPANS

if TYPE_CHECKING:
    from vllm_pyramid.policy.request import ServedRequest

Spans: TypeAlias = tuple[tuple[int, int], ...]

_HOW = "give the start and the end of each span, one after the other, such as [0, 57, 120, 131]"


def parse_spans(value: object, where: str) -> Spans:
    """Parse `[start, end, start, end, ...]`, token positions that do not fall; None is no span.

    Args:
        where: names the key in messages.

    Raises:
        ValueError: wrong type, order or range, or more than `MAX_SPANS` spans.
    """
    if value is None:
        return ()
    if isinstance(value, list | tuple) and len(value) > 2 * MAX_SPANS:
        raise ValueError(
            f"{where} has {len(value)} numbers, and at most {MAX_SPANS} spans are kept: join some"
        )
    if not isinstance(value, list | tuple) or any(type(bound) is not int for bound in value):
        raise ValueError(f"{where} must be a list of whole numbers, not {quoted(value)}: {_HOW}")
    if len(value) % 2:
        raise ValueError(f"{where} has {len(value)} numbers, an odd number of them: {_HOW}")
    spans = tuple(zip(value[::2], value[1::2], strict=True))
    rises = all(before[1] <= later[0] for before, later in pairwise(spans))
    if not rises or any(not 0 <= start < end <= MAX_TOKENS for start, end in spans):
        raise ValueError(
            f"{where} must name spans of at least one token, in order and apart, at positions from "
            f"0 to {MAX_TOKENS}, not {quoted(value)}: {_HOW}"
        )
    return spans


def flat(spans: Spans) -> list[int]:
    """Return the spans as a request gives them."""
    return list(chain.from_iterable(spans))


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the positions of all spans, which may overlap, as spans in order and apart."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return tuple(found)


def leading(spans: Spans) -> int:
    """Return how many of the prompt's first tokens merged spans keep."""
    return spans[0][1] if spans and spans[0][0] == 0 else 0


def only_leading(spans: Spans) -> Spans:
    """Return the span that begins at position 0, if there is one."""
    return spans[:1] if leading(spans) else ()


def needed_tokens(spans: Spans, point: EvictionPoint) -> npt.NDArray[np.int64]:
    """Return how many tokens stay in any case at an eviction: spans, sinks and window, `[layers]`.

    Args:
        spans: merged.
    """
    front = np.maximum(point.front, min(leading(spans), point.computed)).astype(np.int64)
    behind = np.maximum(point.computed - point.recent.astype(np.int64), front)
    needed = front + point.computed - behind
    for start, end in spans:
        needed += np.maximum(np.minimum(end, behind) - np.maximum(start, front), 0)
    return needed


def check_spans_fit(
    served: ServedRequest, prompt_len: int, num_layers: int, block_size: int
) -> None:
    """Refuse spans that end behind the prompt, or that do not fit the smallest layer's budget.

    Args:
        num_layers: layers that evict. block_size: tokens of the largest cache block.

    Raises:
        ValueError: with the numbers.
    """
    spans = served.keep
    if not spans:
        return
    if spans[-1][1] > prompt_len:
        raise ValueError(
            f"kv_keep ends at token {spans[-1][1]}, and the prompt has {prompt_len}: spans lie "
            "inside the prompt"
        )
    plan = served.plan(prompt_len, num_layers, block_size)
    if not plan.evicts:
        return
    assert not plan.is_deferred, "policies that defer lengths are refused"
    for point in plan.levels if isinstance(plan, LevelPlan) else plan.points:
        needed = needed_tokens(spans, point)
        lacking = np.flatnonzero((needed > point.keep) & (point.skip > 0))
        if not lacking.size:
            continue
        layer = int(lacking[point.keep[lacking].argmin()])
        protected = sum(
            min(end, point.computed) - start for start, end in spans if start < point.computed
        )
        raise ValueError(
            f"the spans to be kept (kv_keep, or the server's --kv-keep) have {protected} of the "
            f"first {point.computed} tokens, {needed[layer]} with window and sinks, and the "
            f"smallest layer keeps {point.keep[layer]}: ask for a larger kv_budget, or keep less"
        )
