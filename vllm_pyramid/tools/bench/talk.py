# SPDX-License-Identifier: Apache-2.0
"""Conversations whose turns are sent one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Talk:
    """A conversation.

    Attributes:
        prompt: its latest. turns: what the user adds after that. ends: tokens of earlier prompts.
        forks: what is said in other branches, `[branches][turns]`. They begin where as many turns
            are left.
    """

    prompt: list[int]
    turns: list[list[int]]
    forks: list[list[list[int]]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def go_on(self, answer: Sequence[int], turns: list[list[int]]) -> Talk:
        """Return the conversation behind an answer, whose next turn is the first of `turns`."""
        ends = [*self.ends, len(self.prompt)]
        return Talk([*self.prompt, *answer, *turns[0]], turns[1:], [], ends)
