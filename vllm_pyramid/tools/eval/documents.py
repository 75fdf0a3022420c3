# SPDX-License-Identifier: Apache-2.0
"""Tasks over real documents, as chats: questions, summaries, quotations.

The documents are those behind Python's `help()`. What is right is either in the text, or what the
model itself answers with its whole cache (`Agreement`).
"""

from __future__ import annotations

import random
from itertools import zip_longest
from statistics import fmean

from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result
from vllm_pyramid.tools.eval.task import AgreementTask, GeneratedTask, Sample

__all__ = ["EXPLAIN", "Explain", "Quote", "Summary", "about", "chat"]

# A quotation begins with so many words of a sentence, which has twice as many at least.
_GIVEN = 8
EXPLAIN = "Explain in your own words what the text above says about this: {}"


def chat(tokens: Tokens, text: str, *more: str) -> str:
    """A chat up to the model's reply: a user's question, then replies and further questions."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[i % 2], "content": content} for i, content in enumerate((text, *more))
    ]
    return tokens.chat(messages)


def about(sentence: str) -> str:
    """How a question names a place in a text: by the words with which a sentence begins."""
    return " ".join(sentence.split()[:12])


def _filled(tokens: Tokens, rng: random.Random, question: str, length: int) -> list[str]:
    """Sentences of documents that fill a chat of `length` tokens with the question."""
    room = length - tokens.count(chat(tokens, f"\n\n{question}")) - 8
    if room < 64:
        raise ValueError(f"{length} tokens leave no room for a document: ask for {length + 64}")
    return tokens.passage(rng, room)


class _Chat(AgreementTask):
    """A question about a whole document."""

    needs_chat = True

    def asked(self, tokens: Tokens, sentences: list[str], question: str) -> Sample:
        """The sentences, then the question."""
        prompt = chat(tokens, f"{' '.join(sentences)}\n\n{question}")
        return Sample(prompt, (), self.answer_tokens, follows_full=True)


class Explain(_Chat):
    """A question about a place in the text, in a user's words."""

    name = "explain"
    summary = "a question about a document, against the whole cache's own answer"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        sentences = _filled(tokens, rng, EXPLAIN + " word" * 24, length)
        return self.asked(tokens, sentences, EXPLAIN.format(about(rng.choice(sentences))))


class Summary(_Chat):
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
        given = " ".join(words[:_GIVEN])
        prompt = chat(tokens, f"{' '.join(sentences)}\n\n{question.format(given)}") + given
        answer = " ".join(words[_GIVEN : 2 * _GIVEN])
        return Sample(prompt, (answer,), tokens.count(answer) + 4)

    def score(self, sample: Sample, result: Result) -> float:
        wanted, found = sample.answers[0].split(), result.text.split()
        return fmean(a == b for a, b in zip_longest(wanted, found[: len(wanted)]))
