# SPDX-License-Identifier: Apache-2.0
"""Generated tasks as chats: questions over a document, quotations, and later turns.

What is right is either in the text, or what the model itself answers with its whole cache
(`AgreementTask`). Replies to earlier questions are the right ones, given as if the model had said
them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from statistics import fmean

from lab.eval.task import AgreementTask, GeneratedTask, NumberTask, Sample
from lab.eval.text_tasks import NUMBER_TOKENS
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.phrases import CODE, held_out_facts
from vllm_pyramid.tools.eval.result import Result

_GIVEN = 8  # words that begin a quotation, of a sentence with twice as many at least
_EXPLAIN = "Explain in your own words what the text above says about this: {}"


def _chat(tokens: Tokens, *contents: str) -> str:
    """Return a chat up to the model's reply: a user's question, then replies and questions."""
    roles = ("user", "assistant")
    return tokens.chat(
        [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    )


def _explain(rng: random.Random, sentences: Sequence[str]) -> str:
    """Return the question about a random sentence, named by the words with which it begins."""
    return _EXPLAIN.format(" ".join(rng.choice(sentences).split()[:12]))


def _filled(tokens: Tokens, rng: random.Random, question: str, length: int) -> list[str]:
    """Return sentences of documents that fill a chat of `length` tokens with the question."""
    room = length - tokens.count(_chat(tokens, f"\n\n{question}")) - 8
    if room < 64:
        raise ValueError(f"{length} tokens leave no room for a document: ask for {length + 64}")
    return tokens.passage(rng, room)


class _DocumentQuestion(AgreementTask):
    """A question about a whole document."""

    needs_chat = True

    def asked(self, tokens: Tokens, sentences: list[str], question: str) -> Sample:
        """Return a sample of the sentences, then the question."""
        prompt = _chat(tokens, f"{' '.join(sentences)}\n\n{question}")
        return Sample(prompt, (), self.answer_tokens, follows_full=True)


class Explain(_DocumentQuestion):
    """A question about a place in the text, in a user's words."""

    name = "explain"
    summary = "a question about a document, against the whole cache's own answer"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        sentences = _filled(tokens, rng, _EXPLAIN + " word" * 24, length)
        return self.asked(tokens, sentences, _explain(rng, sentences))


class Summary(_DocumentQuestion):
    """A summary of the text."""

    name = "summary"
    summary = "a summary of a document, against the whole cache's own"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        question = "Summarise the text above in a few sentences."
        return self.asked(tokens, _filled(tokens, rng, question, length), question)


class Quote(GeneratedTask):
    """A sentence of the text whose beginning is given; the next eight words are to be quoted."""

    name = "quote"
    needs_chat = True
    summary = "a sentence of a document, to be quoted from its beginning"
    metric = "words right at their place"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        question = "Quote the sentence of the text above that begins with: {}"
        sentences = _filled(tokens, rng, question + " word" * (4 * _GIVEN), length)
        long = [s for s in sentences if len(s.split()) >= 2 * _GIVEN]
        if not long:
            raise ValueError(f"{length} tokens are too few for the task {self.name!r}")
        words = rng.choice(long).split()
        given, answer = " ".join(words[:_GIVEN]), " ".join(words[_GIVEN : 2 * _GIVEN])
        prompt = _chat(tokens, f"{' '.join(sentences)}\n\n{question.format(given)}") + given
        return Sample(prompt, (answer,), tokens.count(answer) + 4)

    def score(self, sample: Sample, result: Result) -> float:
        wanted, found = sample.answers[0].split(), result.text.split()
        return fmean(a == b for a, b in zip_longest(wanted, found[: len(wanted)]))


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
    asked: int

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys, values, facts = held_out_facts(rng, 3)
        places = rng.sample(range(3), self.asked)
        questions = [CODE.question(keys[place]) for place in places]
        frame = tokens.count(_chat(tokens, "")) + 4
        text = tokens.hide(rng, facts, f"\n\n{questions[0].ask}", length - frame)
        said: list[str] = []
        for place, (before, after) in zip(places, pairwise(questions), strict=False):
            said += [f"{before.begin} {values[place]}.", after.ask]
        prompt, whole = _chat(tokens, text), _chat(tokens, text, *said)
        _check_grows((prompt, whole))
        lead = whole[len(prompt) :] + questions[-1].begin
        return Sample(prompt, (values[places[-1]],), NUMBER_TOKENS, lead=lead)


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
        """Return the messages but for the last question, the first third, and its open fact.

        Raises:
            ValueError: no room for three texts.
        """
        keys, values, stated = held_out_facts(rng, 3)
        facts = [stated[:2], stated[2:]]
        asks = [CODE.question(key) for key in (keys[0], keys[2])]
        replies = [f"{asks[0].begin} {values[0]}.", f"{asks[1].begin} {values[2]}."]

        def messages(thirds: Sequence[Sequence[str]]) -> list[str]:
            first, second, third = (" ".join(sentences) for sentences in thirds)
            said = [f"{first}\n\n{asks[0].ask}", replies[0], f"{second}\n\n{asks[1].ask}"]
            return [*said, replies[1], third]

        ending = _EXPLAIN.format(" word" * 24)  # the longer one of the last questions
        *said, _ = messages([*facts, []])
        fixed = tokens.count(_chat(tokens, *said, f"\n\n{ending}")) + NUMBER_TOKENS
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
            excess = tokens.count(_chat(tokens, *made[:-1], f"{made[-1]}\n\n{ending}")) - length
            if excess <= 0:
                return made, original, (keys[1], values[1])
            room -= excess

    def ask(self, tokens: Tokens, said: list[str], question: str) -> tuple[str, tuple[int, ...]]:
        """Return the prompt, and how many of its characters each earlier turn's prompt had."""
        messages = [*said[:-1], f"{said[-1]}\n\n{question}"]
        prompts = [_chat(tokens, *messages[: 2 * turn + 1]) for turn in range(3)]
        _check_grows(prompts)
        return prompts[-1], tuple(map(len, prompts[:-1]))


class Conversation(_Talk, NumberTask):
    """The third question asks for the fact of the first turn that no question asked for."""

    name = "conversation"
    summary = "three turns with a text each; the third asks for a fact of the first"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        said, _, (key, value) = self.talk(tokens, length, rng)
        question = CODE.question(key)
        prompt, turns = self.ask(tokens, said, question.ask)
        return Sample(prompt, (value,), NUMBER_TOKENS, lead=question.begin, turns=turns)


class ConversationReply(_Talk, AgreementTask):
    """The third question asks to explain a place in the text of the first turn."""

    name = "conversation-reply"
    summary = "the same, to explain a place of the first, against the whole cache's own answer"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        said, first, _ = self.talk(tokens, length, rng)
        prompt, turns = self.ask(tokens, said, _explain(rng, first))
        return Sample(prompt, (), self.answer_tokens, follows_full=True, turns=turns)


TASKS = (Explain, Summary, Quote, SecondTurn, ThirdTurn, Conversation, ConversationReply)
