# SPDX-License-Identifier: Apache-2.0
"""Checks of values that flags and requests share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from contextlib import suppress

from vllm_pyramid.plan.budget import MAX_TEXT, MAX_TOKENS
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.kinds import did_you_mean
from vllm_pyramid.policy.limits import MAX_KEY

_PREFIX = "kv"
# Keys that begin with `kv` and that vLLM itself reads.
OTHERS_KEYS = frozenset(("kv_transfer_params", "kv_cache_report_mode"))


def looks_like_ours(key: object) -> bool:
    """Return whether a key begins with `kv`, in any case and behind any prefix."""
    if not isinstance(key, str) or key in OTHERS_KEYS:
        return False
    return _begin(key).startswith(_PREFIX)


def _begin(key: str) -> str:
    return key[:MAX_KEY].lstrip(" \t\n_-.").lower()


def refuse_unknown(
    keys: Iterable[object], valid: Collection[str], where: str, *, similar_only: bool = False
) -> None:
    """Raise ValueError for the first key that looks like one of ours and is none, naming the
    closest.

    `valid` are our keys, `where` says what has the keys; `similar_only`: refuse only keys that
    nearly match one of ours.
    """
    for key in keys:
        if key in valid or not looks_like_ours(key):
            continue
        begin = _begin(str(key))
        hint = did_you_mean(f"kv_{begin[2:].lstrip('_-. ').replace('-', '_')}", valid, cutoff=0.75)
        if hint or not similar_only:
            raise ValueError(
                f"unknown key {quoted(key)} in {where}{hint}; the keys of vllm-pyramid there are: "
                f"{', '.join(valid)}"
            )


def parse_min_tokens(value: object, where: str) -> int | None:
    """Parse the floor of shares, a whole number of tokens; None if it is not given."""
    if value is None:
        return None
    number = -1
    if type(value) is int:
        number = value
    elif isinstance(value, str) and len(value) <= MAX_TEXT and value.isascii() and value.isdigit():
        number = int(value)
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(
            f"{where} must be a number of tokens such as 256, or 0 for no floor, not "
            f"{quoted(value)}"
        )
    return number


def parse_session_ttl(value: object) -> float | None:
    """Parse `kv_session_ttl`: seconds above 0, at most ten years; None if it is not given."""
    if value is None:
        return None
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not 0 < number <= 315_360_000:
        raise ValueError(
            f"kv_session_ttl must be a number of seconds above 0, such as 3600, not {quoted(value)}"
        )
    return number
