# SPDX-License-Identifier: Apache-2.0
"""Tasks of several turns: what is left of a conversation for its later questions.

Replies to earlier questions are the right ones, given as if the model had said them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from vllm_pyramid.tools.eval import phrases
from vllm_pyramid.tools.eval.documents import EXPLAIN, about, chat
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.task import AgreementTask, GeneratedTask, NumberTask, Sample
from vllm_pyramid.tools.eval.words import DIGITS, make_names, make_numbers

__all__ = ["Conversation", "ConversationReply", "SecondTurn", "ThirdTurn"]

_CODE = phrases.FACTS["code"]
_ANSWER_TOKENS = DIGITS + 4


def _check_grows(prompts: Sequence[str]) -> None:
    """Raise ValueError if a turn's prompt does not begin with that of the turn before."""
    if not all(later.startswith(before) for before, later in pairwise(prompts)):
        raise ValueError("this model's chat template changes what was said before")


class _LaterTurn(NumberTask):
    """Facts in a text, asked for one after the other over the cache that the first one evicted.

    The first question is the one that the eviction sees. Right answers and further questions are
    given (`Sample.lead`), as if the chat had gone on over the kept cache.
    """

    needs_chat = True
    keys = 3
    asked: int

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, self.keys, held_out=True)
        values = make_numbers(rng, self.keys, held_out=True)
        places = rng.sample(range(self.keys), self.asked)
        questions = [_CODE.question(keys[place]) for place in places]
        frame = tokens.count(chat(tokens, "")) + 4
        text = tokens.hide(
            rng, list(map(_CODE.state, keys, values)), f"\n\n{questions[0].ask}", length - frame
        )
        said: list[str] = []
        for place, (before, after) in zip(places, pairwise(questions), strict=False):
            said += [f"{before.begin} {values[place]}.", after.ask]
        prompt, whole = chat(tokens, text), chat(tokens, text, *said)
        _check_grows((prompt, whole))
        lead = whole[len(prompt) :] + questions[-1].begin
        return Sample(prompt, (values[places[-1]],), _ANSWER_TOKENS, lead=lead)


class SecondTurn(_LaterTurn):
    """A chat's second question."""

    name = "second-turn"
    summary = "a chat's second question, asked when the first one has evicted the cache"
    asked = 2


class ThirdTurn(_LaterTurn):
    """A chat's third question."""

    name = "third-turn"
    summary = "a chat's third question, asked when the first one has evicted the cache"
    asked = 3


class _Talk(GeneratedTask):
    """Three turns, each of which brings a third of a text; the third asks about the first.

    The first third holds two facts, the second one; the first two questions ask for one of each.
    Variants with `turns` say where the first two turns ended, which evicts there too
    (`kv_turns`); without, the whole chat is evicted once, at its end.
    """

    needs_chat = True

    def talk(
        self, tokens: Tokens, length: int, rng: random.Random
    ) -> tuple[list[str], list[str], tuple[str, str]]:
        """The messages but for the last question; the first third; its fact that nobody asked for.

        Raises:
            ValueError: no room for three texts.
        """
        keys = make_names(rng, 3, held_out=True)
        values = make_numbers(rng, 3, held_out=True)
        facts = [list(map(_CODE.state, keys[:2], values[:2])), [_CODE.state(keys[2], values[2])]]
        asked = [(keys[0], values[0]), (keys[2], values[2])]
        replies = [f"{_CODE.question(key).begin} {value}." for key, value in asked]

        def messages(thirds: Sequence[Sequence[str]]) -> list[str]:
            first, second, third = (" ".join(sentences) for sentences in thirds)
            ask = [_CODE.question(key).ask for key, _ in asked]
            return [
                f"{first}\n\n{ask[0]}", replies[0], f"{second}\n\n{ask[1]}", replies[1], third
            ]  # fmt: skip

        ending = EXPLAIN.format(" word" * 24)  # the longer one of the last questions
        *said, _ = messages([*facts, []])
        fixed = tokens.count(chat(tokens, *said, f"\n\n{ending}")) + _ANSWER_TOKENS
        room = length - fixed
        while True:
            sentences = tokens.passage(rng, max(room, 0))
            cut = len(sentences) // 3
            if room < 96 or not cut:
                raise ValueError(
                    f"{length} tokens leave no room for three texts: ask for at least "
                    f"{max(fixed + 96, length + 32)}"
                )
            thirds = [sentences[:cut], sentences[cut : 2 * cut], sentences[2 * cut :]]
            original = list(thirds[0])
            for third, statements in zip(thirds, facts, strict=False):
                for statement in statements:
                    third.insert(rng.randint(0, len(third)), statement)
            made = messages(thirds)
            excess = tokens.count(chat(tokens, *made[:-1], f"{made[-1]}\n\n{ending}")) - length
            if excess <= 0:
                return made, original, (keys[1], values[1])
            room -= excess

    def ask(self, tokens: Tokens, said: list[str], question: str) -> tuple[str, tuple[int, ...]]:
        """The prompt, and how many of its characters each earlier turn's prompt had."""
        messages = [*said[:-1], f"{said[-1]}\n\n{question}"]
        prompts = [chat(tokens, *messages[: 2 * turn + 1]) for turn in range(3)]
        _check_grows(prompts)
        return prompts[-1], tuple(map(len, prompts[:-1]))


class Conversation(_Talk, NumberTask):
    """The third question asks for the fact of the first turn that nobody has asked for."""

    name = "conversation"
    summary = "three turns with a text each; the third asks for a fact of the first"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        said, _, (key, value) = self.talk(tokens, length, rng)
        question = _CODE.question(key)
        prompt, turns = self.ask(tokens, said, question.ask)
        return Sample(prompt, (value,), _ANSWER_TOKENS, lead=question.begin, turns=turns)


class ConversationReply(_Talk, AgreementTask):
    """The third question asks to explain a place in the text of the first turn."""

    name = "conversation-reply"
    summary = "the same, to explain a place of the first, against the whole cache's own answer"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        said, first, _ = self.talk(tokens, length, rng)
        prompt, turns = self.ask(tokens, said, EXPLAIN.format(about(rng.choice(first))))
        return Sample(prompt, (), self.answer_tokens, follows_full=True, turns=turns)
