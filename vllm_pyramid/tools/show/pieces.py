# SPDX-License-Identifier: Apache-2.0
"""Divide a text into the pieces that its tokens stand for."""

from __future__ import annotations


def pieces(text: str, offsets: list[tuple[int, int]], tokens: list[str]) -> list[str]:
    """Return the part of the text that each token, with these offsets, stands for.

    Joined, they are the text. A token that the tokenizer added has none, and stands as itself in
    angle brackets. Of tokens that share one character (bytes of it), the first has it.
    """
    found, reached = [], 0
    for (start, end), token in zip(offsets, tokens, strict=True):
        if start == end:
            found.append(f"⟨{token.strip('<>|')}⟩")
            continue
        found.append(text[reached:end])
        reached = max(reached, end)
    return found
