# SPDX-License-Identifier: Apache-2.0
"""What tokens and the times at which they came are worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from lab.eval.task import Figure
from vllm_pyramid.tools.eval.phrases import begins_with


def speeds(tokens: Sequence[Sequence[int]], times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return speeds over the whole job and while all requests decode, and times of tokens.

    `decode_tokens_per_s` counts the tokens between the last request's first token and the first
    request's last one; None if a request ended before another one began.
    """
    seconds = max(own[-1] for own in times)
    began, ended = max(own[0] for own in times), min(own[-1] for own in times)
    within = sum(began < at <= ended for own in times for at in own)
    spans = [(at, step) for own in times for at, step in ((own[0], 1), (own[-1], -1))]
    at_once, most = 0, 0
    for _, step in sorted(spans, key=lambda span: (span[0], -span[1])):
        at_once += step
        most = max(most, at_once)
    return {
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(map(len, tokens)) / seconds, 2),
        "decode_tokens_per_s": round(within / (ended - began), 2) if within else None,
        "first_median_s": round(median(own[0] for own in times), 3),
        "token_median_ms": round(
            1000 * median(after - before for own in times for before, after in pairwise(own)), 2
        ),
        "at_once": most,
    }


def rightness(texts: Sequence[str], answers: Sequence[str]) -> dict[str, Any]:
    """Return how many texts begin with their answers, with Wilson's interval of the share."""
    right = sum(map(begins_with, texts, answers))
    share = Figure.share("right", right, len(texts))
    interval = [round(end, 3) for end in (share.low or 0.0, share.high or 0.0)]
    return {"right": f"{right} of {len(texts)}", "right_interval": interval}


def sameness(tokens: Sequence[Sequence[int]], whole: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the share of answers that are equal, and the mean share before a difference."""
    shares = []
    for mine, theirs in zip(tokens, whole, strict=True):
        pairs = enumerate(zip(mine, theirs, strict=True))
        same = next((place for place, (a, b) in pairs if a != b), len(mine))
        shares.append(same / len(mine))
    equal = mean(share == 1 for share in shares)
    return {"equal": round(equal, 3), "common": round(mean(shares), 3)}


def reference_of(variant: str, variants: Sequence[str]) -> str | None:
    """Return the variant of the same side that keeps the whole cache in 16 bits, if it runs."""
    wholes = ["openvino"] if variant.startswith("openvino") else ["vllm full", "stock"]
    return next((whole for whole in wholes if whole in variants), None)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table in Markdown: the median of each figure over the rounds, with its range."""
    names = ("tokens_per_s", "decode_tokens_per_s", "first_median_s", "token_median_ms")
    last = ("right", "equal", "common", "at_once")
    lines = [f"| {' | '.join(['variant', *names, *last])} |", "|---" + "|---:" * 8 + "|"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        cells = [variant]
        for name in names:
            known = [row[name] for row in own if row[name] is not None]
            spread = f"{median(known):g} ({min(known):g} to {max(known):g})" if known else ""
            cells.append(spread)
        cells += [" / ".join(dict.fromkeys(str(row.get(name, "")) for row in own)) for name in last]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
