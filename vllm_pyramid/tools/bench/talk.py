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


@dataclass(frozen=True)
class Turn:
    """A turn of a recorded agent, which is a list of these.

    Attributes:
        number: of its path from the agent's beginning, from 1.
        before: the turn, of the agent's list, behind whose answer it is sent; None for a first one.
        shared: tokens that its prompt has in common with the prompt of that turn.
        rest: tokens behind those; with the engine's own answers, behind the answer to that prompt.
        prompt_len: tokens of its prompt; with the engine's own answers, at most.
        max_tokens: of its answer.
        wait: seconds between the answer before it and the moment it is sent.
        fixed: tokens before the first message, if the agent has tools: a server keeps them.
    """

    number: int
    before: int | None
    shared: int
    rest: list[int]
    prompt_len: int
    max_tokens: int
    wait: float
    fixed: int = 0
