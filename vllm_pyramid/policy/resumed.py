# SPDX-License-Identifier: Apache-2.0
"""Why a later turn of a conversation resumed no more than it did: reasons, and their words.

What only the front end knows of a session travels with the request (`WHY_KEY`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_pyramid.policy.limits import MAX_TURNS

# The front end adds this key to a request that names its session, if it knows why the request does
# not continue the session's last turn: one of the first three reasons, and the numbers to it.
WHY_KEY = "vllm_pyramid_why"

UNKNOWN, DIFFERS, SETTINGS = "unknown", "differs", "settings"
RESUMED, EXACT_MODE, PREFIX, UNEVICTED = "resumed", "exact", "prefix", "unevicted"
SHORT, MISSING, UNCACHED, CANNOT = "short", "missing", "uncached", "cannot"
# Labels of the counter, in the order of the documentation.
REASONS = (
    *(RESUMED, UNKNOWN, DIFFERS, SETTINGS, EXACT_MODE, CANNOT, PREFIX, UNEVICTED, SHORT, MISSING),
    UNCACHED,
)


def words_of(why: Sequence[str | int], prompt_len: int) -> str:
    """Return a reason and its numbers in words; those of `CANNOT` come with it."""
    reason, *numbers = why
    if reason == CANNOT:
        return str(numbers[0])
    if reason == DIFFERS:
        start, stop, of_last = numbers
        if start == stop:
            return (
                f"the prompt ends at token {start}, inside the session's last turn, which has "
                f"{of_last} tokens"
            )
        return (
            f"the prompt, of {prompt_len} tokens, first differs between tokens {start} and {stop} "
            f"from the session's last turn, which has {of_last}"
        )
    if reason == PREFIX:
        return (
            f"resuming would have begun with {numbers[0]} tokens, fewer than were found as a "
            "prefix, so the turn selects from its whole prompt"
        )
    if reason == SHORT:
        added, least = numbers
        return (
            f"the prompt has {added} tokens behind the turn before, and the last {least} of a "
            "prompt are always computed, to score it"
        )
    if reason == MISSING:
        return (
            f"what was kept of the turn that ends at token {numbers[0]} is not there: its blocks "
            "were needed, too few are free to copy it, or its request has not ended"
        )
    return _WORDS[str(reason)]


_WORDS = {
    RESUMED: "a session snapshot has no more of this prompt",
    UNKNOWN: "no earlier turn is known: the first of its session or conversation, or the session "
    f"was forgotten or has had {MAX_TURNS} turns in a row, or it came with another cache_salt or "
    "API key",
    SETTINGS: "the session's last turn had another policy, budget, kv_keep or kv_turn_mode",
    EXACT_MODE: "kv_turn_mode is exact: the turn selects from its whole prompt, of which what was "
    "found as a prefix is not computed again",
    UNEVICTED: "no earlier turn has evicted anything, so its prompt is found as a prefix",
    UNCACHED: "the server caches no prefixes (--no-enable-prefix-caching, or the model or policy "
    "has none)",
}


def read_why(extra_args: Any) -> tuple[str | int, ...]:
    """Return what the front end has said of a request; empty if nothing that it would say."""
    why = extra_args.get(WHY_KEY) if extra_args else None
    if not isinstance(why, list | tuple) or not why:
        return ()
    counts = {UNKNOWN: 0, SETTINGS: 0, DIFFERS: 3}
    reason, *numbers = why
    if counts.get(reason) != len(numbers) or any(type(number) is not int for number in numbers):
        return ()
    return (reason, *numbers)
