# SPDX-License-Identifier: Apache-2.0
"""The generated tasks, by name.

Facts hidden in real English text, after RULER (https://arxiv.org/abs/2404.06654, section 3); chains
of variables, stores and labelled examples; the perplexity of a continuation; attention recall.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

from vllm_pyramid.tools.eval import phrases
from vllm_pyramid.tools.eval.conversations import (
    Conversation,
    ConversationReply,
    SecondTurn,
    ThirdTurn,
)
from vllm_pyramid.tools.eval.counting import CommonWords, FrequentWords
from vllm_pyramid.tools.eval.documents import Explain, Quote, Summary
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result
from vllm_pyramid.tools.eval.task import Figure, GeneratedTask, NumberTask, Sample, Task
from vllm_pyramid.tools.eval.words import DIGITS, make_names, make_numbers

__all__ = ["GENERATED", "load_task"]

_CODE = phrases.FACTS["code"]
# A number can take a token a digit, and there are a space and a full stop around it.
_NUMBER_TOKENS = DIGITS + 4
_MOST_NAMES = 3000  # of the about 5,000 that are held out: more would be slow to find
_NAME_TOKENS = 12  # a made-up name can take a token for every one or two letters
# In ninths of the text; in this order, so that few samples too are spread over it.
_DEPTHS = (0, 9, 4, 7, 2, 5, 1, 8, 3, 6)


class Needle(NumberTask):
    """One fact in a text, at depths from the first sentence to the last."""

    name = "needle"
    summary = "one fact hidden in English text, at ten depths"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        key = make_names(rng, 1, held_out=True)[0]
        value = make_numbers(rng, 1, held_out=True)[0]
        depth = _DEPTHS[index % len(_DEPTHS)] / 9
        question = _CODE.question(key).prompt
        prompt = tokens.hide(rng, [_CODE.state(key, value)], question, length, [depth])
        return Sample(prompt, (value,), _NUMBER_TOKENS, {"depth": round(depth, 2)})


class MultiKey(NumberTask):
    """Eight facts of eight names, of which one is asked for."""

    name = "multi-key"
    summary = "eight facts hidden in English text, one of them asked for"
    keys = 8

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, self.keys, held_out=True)
        values = make_numbers(rng, self.keys, held_out=True)
        wanted = index % self.keys
        question = _CODE.question(keys[wanted]).prompt
        prompt = tokens.hide(rng, list(map(_CODE.state, keys, values)), question, length)
        return Sample(prompt, (values[wanted],), _NUMBER_TOKENS)


class MultiValue(GeneratedTask):
    """One name has four numbers in four places, beside another with four; all are asked for."""

    name = "multi-value"
    summary = "four facts about one name, all of them asked for"
    metric = "share found"
    values = 4

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, 2, held_out=True)
        numbers = make_numbers(rng, 2 * self.values, held_out=True)
        facts = [(keys[place % 2], number) for place, number in enumerate(numbers)]
        rng.shuffle(facts)
        question = phrases.several_values(keys[0]).prompt
        prompt = tokens.hide(rng, [_CODE.state(*fact) for fact in facts], question, length)
        wanted = tuple(number for key, number in facts if key == keys[0])
        return Sample(prompt, wanted, _NUMBER_TOKENS * self.values)

    def score(self, sample: Sample, result: Result) -> float:
        found = set(re.findall(r"\d+", result.text.split("\n")[0]))
        return len(found & set(sample.answers)) / len(sample.answers)


class MultiQuery(MultiValue):
    """Eight facts of eight names, four of which are asked for at once."""

    name = "multi-query"
    summary = "eight facts hidden in English text, four of them asked for at once"
    keys = 8

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, self.keys, held_out=True)
        facts = dict(zip(keys, make_numbers(rng, self.keys, held_out=True), strict=True))
        asked = rng.sample(keys, self.values)
        question = phrases.several_keys(asked).prompt
        statements = [_CODE.state(*fact) for fact in facts.items()]
        prompt = tokens.hide(rng, statements, question, length)
        return Sample(prompt, tuple(facts[k] for k in asked), _NUMBER_TOKENS * self.values)


class TwoQuestions(NumberTask):
    """Eight facts and two questions, of which the eviction sees only the first being answered.

    The prompt ends with the beginning of the first answer, so the observation window holds the
    first name. The second answer is generated after the eviction: its fact survives only if the
    policy keeps what it was not asked for. That is the case where query-aware eviction hurts.
    """

    name = "two-questions"
    summary = "two questions over one text; the second is scored"
    keys = 8

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, self.keys, held_out=True)
        values = make_numbers(rng, self.keys, held_out=True)
        first, second = rng.sample(range(self.keys), 2)
        questions = phrases.both(keys[first], keys[second]).prompt
        prompt = tokens.hide(rng, list(map(_CODE.state, keys, values)), questions, length)
        statement = _CODE.state(keys[second], values[second])
        return Sample(prompt, (values[second],), 2 * _NUMBER_TOKENS + 4 * len(statement) // 10)

    def number_in(self, text: str) -> str:
        """The second number."""
        numbers: list[str] = re.findall(r"\d+", text)
        return numbers[1] if len(numbers) > 1 else ""

    def score(self, sample: Sample, result: Result) -> float:
        return float(self.number_in(result.text) == sample.answers[0])


class VariableTracing(GeneratedTask):
    """Two chains of equal variables hidden in English text; one is to be followed from its start.

    RULER's variable tracking (https://arxiv.org/abs/2404.06654, section 3.2) with names for values.
    """

    name = "variable-tracing"
    summary = "a chain of three equal variables, followed from its start"
    metric = "share of the chain"
    steps = 3

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        names = make_names(rng, 2 * (self.steps + 1), held_out=True)
        chains = (names[: self.steps + 1], names[self.steps + 1 :])
        links = [iter([phrases.link(a, b) for a, b in pairwise(chain)]) for chain in chains]
        turns = [0] * self.steps + [1] * self.steps
        rng.shuffle(turns)
        question = phrases.trace(chains[0][0]).prompt
        prompt = tokens.hide(rng, [next(links[turn]) for turn in turns], question, length)
        expected = tokens.count(phrases.traced(chains[0][1:]))
        return Sample(prompt, tuple(chains[0][1:]), expected + 4)

    def score(self, sample: Sample, result: Result) -> float:
        """The share of the chain that is right before the first mistake."""
        first = result.text.split("\n")[0]
        found = re.findall(r"(?:^|equals) ?([\w-]+)\.", first)
        same = [name == wanted for name, wanted in zip(found, sample.answers, strict=False)]
        return [*same, False].index(False) / len(sample.answers)


class KeyValue(NumberTask):
    """A store of names and numbers that fills the prompt; one name is looked up."""

    name = "key-value"
    summary = "a prompt full of names with numbers, one looked up"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        entries: list[tuple[str, str]] = []
        text = ""
        known: set[str] = set()
        batch = max(1, (length - 48) // 16)
        while batch:
            if len(known) + batch > _MOST_NAMES:
                raise ValueError(
                    f"the task {self.name!r} has names for {_MOST_NAMES} entries, too few for "
                    f"{length} tokens"
                )
            names = make_names(rng, batch, held_out=True)
            numbers = make_numbers(rng, batch, held_out=True)
            more = [e for e in zip(names, numbers, strict=True) if e[0] not in known]
            longer = text + "".join(phrases.entry(*entry) for entry in more)
            if tokens.count(longer) > length - 48:
                batch //= 2
                continue
            entries, text = entries + more, longer
            known.update(name for name, _ in more)
        if len(entries) < 2:
            raise ValueError(f"{length} tokens are too few for the task {self.name!r}")
        key, value = entries[rng.randrange(len(entries))]
        prompt = text.rstrip("\n") + phrases.look_up(key).prompt
        return Sample(prompt, (value,), DIGITS + 4, {"entries": len(entries)})


def _fragments(tokens: Tokens, rng: random.Random, length: int) -> Iterator[str]:
    """6 to 16 words that begin a sentence; no sentence twice before all texts are through."""
    while True:
        sentences = tokens.passage(rng, 3 * length)
        rng.shuffle(sentences)
        for sentence in sentences:
            words = sentence.split()[: rng.randint(6, 16)]
            if len(words) >= 6:
                yield " ".join(words)


class FewShot(GeneratedTask):
    """Labelled examples in which a subject decides the label; the last one is to be labelled."""

    name = "few-shot"
    summary = "a prompt full of labelled examples, one more to label"
    subjects = 8
    labels = 4

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        subjects = make_names(rng, self.subjects, held_out=True)
        labels = make_names(rng, self.labels, held_out=True)
        label_of = {name: labels[i % self.labels] for i, name in enumerate(subjects)}

        words = _fragments(tokens, rng, length)
        wanted = subjects[index % self.subjects]
        ending = phrases.classify(wanted, next(words))
        # Every subject comes once first, so that the wanted one has been seen.
        first = [phrases.example(name, next(words), label_of[name]) for name in subjects]
        rng.shuffle(first)
        text = "".join(first)
        if tokens.count(text + ending) > length:
            raise ValueError(
                f"{length} tokens are too few for the task {self.name!r}: its first examples "
                f"take {tokens.count(text + ending)}"
            )
        while True:
            subject = rng.choice(subjects)
            longer = phrases.example(subject, next(words), label_of[subject]) + text
            if tokens.count(longer + ending) > length:
                break
            text = longer
        return Sample(text + ending, (label_of[wanted],), _NAME_TOKENS)


class Perplexity(GeneratedTask):
    """English text whose continuation is given: each of its tokens is decoded over the kept cache.

    The first of them is left out: its probability comes from the prefill, before the eviction.
    The score of a sample is the others' mean negative log probability; tables show exp of the mean.
    """

    name = "perplexity"
    summary = "64 tokens of English text behind the evicted prompt"
    metric = "perplexity"
    continuation = 64

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        sentences = tokens.passage(rng, length + 4 * self.continuation)
        text = " ".join(sentences)
        prompt = tokens.first(text, length)
        both = tokens.first(text, length + self.continuation)
        return Sample(prompt, (both[len(prompt) :],), 0)

    def score(self, sample: Sample, result: Result) -> float:
        assert result.nats is not None
        return result.nats

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        nats = map(self.score, samples, results)
        return [Figure.of(self.metric, nats, exponential=True, lower_is_better=True)]


class AttentionRecall(GeneratedTask):
    """The share of the window's attention to the text that falls on tokens that are kept.

    PyramidKV's Figure 8 and XKV's retention R, measured in the engine at the moment of eviction:
    the mean over layers and KV heads. The observation window is in neither sum. Prompts as in
    `multi-key`.
    """

    name = "attention-recall"
    summary = "the share of the attention that the kept tokens hold"
    metric = "share of attention"
    needs_recall = True

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        return MultiKey().sample(tokens, length, index, rng)

    def score(self, sample: Sample, result: Result) -> float:
        assert result.recall is not None
        return fmean(fmean(heads) for heads in result.recall)


_IN_ORDER_OF_TABLES: tuple[type[Task], ...] = (
    *(Needle, MultiKey, MultiValue, MultiQuery, TwoQuestions),
    *(CommonWords, FrequentWords, VariableTracing, KeyValue, FewShot, Perplexity, AttentionRecall),
    *(Explain, Summary, Quote, SecondTurn, ThirdTurn, Conversation, ConversationReply),
)
GENERATED = {task.name: task for task in _IN_ORDER_OF_TABLES}


def load_task(name: str) -> Task:
    """The generated task of that name.

    Raises:
        ValueError: there is none; the message lists all.
    """
    if name not in GENERATED:
        close = difflib.get_close_matches(name, GENERATED, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown task {name!r}{hint}; there are: {', '.join(GENERATED)}")
    return GENERATED[name]()
