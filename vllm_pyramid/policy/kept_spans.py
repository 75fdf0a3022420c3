# SPDX-License-Identifier: Apache-2.0
"""Spans of a prompt that every layer and KV head keeps beside its budget (`kv_keep`).

A span is a range of token positions, `start <= position < end`. A layer keeps these tokens, and
what it would keep of the prompt without them. Behind a request's first eviction each KV head holds
other survivors: then only a span that begins at position 0 is found, whose tokens are the first
ones of every head for as long as all of them stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, TypeAlias

from vllm_pyramid.plan import Budget, EvictionPoint, Plan, RetentionPlan
from vllm_pyramid.plan.budget import MAX_TOKENS
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.limits import MAX_SPANS

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy

Spans: TypeAlias = tuple[tuple[int, int], ...]

_HOW = "give the start and the end of each span, one after the other, such as [0, 57, 120, 131]"


def parse_spans(value: object, where: str) -> Spans:
    """Parse `[start, end, start, end, ...]`, token positions that do not fall; None is no span.

    ValueError: wrong type, order or range, or more than `MAX_SPANS` spans; `where` names the key.
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


def beside_budget(spans: Spans, tokens: int, policy: Policy) -> int:
    """Return how many of the first `tokens` tokens merged spans keep beside the budget.

    Sinks and window are counted by the budget, whether spans have them or not.
    """
    first, last = policy.sinks, tokens - policy.window
    return sum(max(min(end, last) - max(start, first), 0) for start, end in spans)


def stays_in_place(policy: Policy, first_end: int, block_size: int, spans: Spans) -> int:
    """Return how many of a prompt's first tokens its evictions leave where they are.

    These are whole blocks of the span at the beginning, which other requests may share. `first_end`
    tokens are computed at the first eviction.
    """
    moves_alone = policy.fill_blocks and all(part.works_with_orders for part in policy.parts)
    if not moves_alone or policy.schedule.waits_for_orders:
        return 0
    return min(leading(spans), first_end) // block_size * block_size


def end_plan(
    policy: Policy,
    prompt_len: int,
    num_layers: int,
    block_size: int,
    budget: Budget,
    spans: Spans,
    in_place: int = 0,
) -> Plan:
    """Return the plan of a prompt's end: what is kept of it without its spans, and these."""
    protected = beside_budget(spans, prompt_len, policy)
    rest = policy.allocator.plan(policy, prompt_len - protected, num_layers, block_size, budget)
    if not spans:
        return rest
    assert isinstance(rest, RetentionPlan) and not (rest.every or rest.inner or rest.pieces), (
        "refused by the parts' `unsupported`"
    )
    return replace(rest, points=(rest.end.beside(protected, in_place),))


def end_points(
    policy: Policy,
    ends: Sequence[int],
    num_layers: int,
    block_size: int,
    budget: Budget,
    spans: Spans,
    in_place: int = 0,
) -> list[EvictionPoint]:
    """Return what each layer keeps at the ends of several prompts, as `end_plan` plans it."""
    protected = [beside_budget(spans, end, policy) for end in ends]
    rests = [end - tokens for end, tokens in zip(ends, protected, strict=True)]
    points = policy.allocator.ends(policy, rests, num_layers, block_size, budget)
    if not spans:
        return points
    return [point.beside(tokens, in_place) for point, tokens in zip(points, protected, strict=True)]


def check_spans(spans: Spans, prompt_len: int) -> None:
    if spans and spans[-1][1] > prompt_len:
        raise ValueError(
            f"kv_keep ends at token {spans[-1][1]}, and the prompt has {prompt_len}: spans lie "
            "inside the prompt"
        )
