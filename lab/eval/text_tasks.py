# SPDX-License-Identifier: Apache-2.0
"""Generated tasks over plain text: hidden facts, labels, perplexity, attention recall.

Facts are hidden in real English text after RULER (https://arxiv.org/abs/2404.06654, section 3).
RULER's own tasks come from its files (`lm_eval_tasks.ruler_tasks`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from statistics import fmean

from lab.eval.recall import Measured
from lab.eval.task import Figure, GeneratedTask, NumberTask, Sample
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.phrases import CODE, DIGITS, Question, held_out_facts, make_names
from vllm_pyramid.tools.eval.result import Result

# A number can take a token a digit, and there are a space and a full stop around it.
NUMBER_TOKENS = DIGITS + 4
_SEAM = 2  # tokens that two texts may have more as one than apart; no tokenizer seen has any
_NAME_TOKENS = 12  # a made-up name can take a token for every one or two letters
# In ninths of the text; in this order, so that few samples too are spread over it.
_DEPTHS = (0, 9, 4, 7, 2, 5, 1, 8, 3, 6)
_KEYS = 8  # names with a fact each


def _both(first: str, second: str) -> Question:
    """Return two questions, of which the prompt begins to answer only the first."""
    asked, then = CODE.question(first), CODE.question(second)
    return Question(f"{asked.ask} {then.ask}", asked.begin)


def _example(subject: str, words: str, label: str) -> str:
    """Return an example of a classification: the subject decides the label, the words do not."""
    return f"Text: {words}\nLabel of {subject}: {label}\n"


def _classify(subject: str, words: str) -> str:
    """Return the prompt's last, unlabelled example."""
    return f"Text: {words}\nLabel of {subject}:"


class Needle(NumberTask):
    """One fact in a text, at depths from the first sentence to the last."""

    name = "needle"
    summary = "one fact hidden in English text, at ten depths"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys, values, facts = held_out_facts(rng, 1)
        depth = _DEPTHS[index % len(_DEPTHS)] / 9
        prompt = tokens.hide(rng, facts, CODE.question(*keys).prompt, length, [depth])
        return Sample(prompt, tuple(values), NUMBER_TOKENS, {"depth": round(depth, 2)})


class MultiKey(NumberTask):
    """Eight facts of eight names, of which one is asked for."""

    name = "multi-key"
    summary = "eight facts hidden in English text, one of them asked for"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys, values, facts = held_out_facts(rng, _KEYS)
        wanted = index % _KEYS
        prompt = tokens.hide(rng, facts, CODE.question(keys[wanted]).prompt, length)
        return Sample(prompt, (values[wanted],), NUMBER_TOKENS)


class TwoQuestions(NumberTask):
    """Eight facts and two questions, of which the eviction sees only the first being answered.

    The prompt ends with the beginning of the first answer, so the observation window holds the
    first name. The second answer is generated after the eviction: its fact survives only if the
    policy keeps what it was not asked for. That is the case where query-aware eviction hurts.
    """

    name = "two-questions"
    summary = "two questions over one text; the second is scored"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys, values, facts = held_out_facts(rng, _KEYS)
        first, second = rng.sample(range(_KEYS), 2)
        questions = _both(keys[first], keys[second]).prompt
        prompt = tokens.hide(rng, facts, questions, length)
        return Sample(prompt, (values[second],), 2 * NUMBER_TOKENS + 4 * len(facts[second]) // 10)

    def number_in(self, text: str) -> str:
        """Return the second number."""
        numbers: list[str] = re.findall(r"\d+", text)
        return numbers[1] if len(numbers) > 1 else ""

    def score(self, sample: Sample, result: Result) -> float:
        return float(self.number_in(result.text) == sample.answers[0])


class FewShot(GeneratedTask):
    """Labelled examples in which a subject decides the label; the last one is to be labelled."""

    name = "few-shot"
    summary = "a prompt full of labelled examples, one more to label"
    labels = 4

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        subjects = make_names(rng, _KEYS, held_out=True)
        labels = make_names(rng, self.labels, held_out=True)
        label_of = {name: labels[i % self.labels] for i, name in enumerate(subjects)}

        words = _fragments(tokens, rng, length)
        wanted = subjects[index % _KEYS]
        ending = _classify(wanted, next(words))
        # Every subject comes once first, so that the wanted one has been seen.
        first = [_example(name, next(words), label_of[name]) for name in subjects]
        rng.shuffle(first)
        text = "".join(first)
        if (least := tokens.count(text + ending)) > length:
            raise ValueError(
                f"{length} tokens are too few for the task {self.name!r}: its first examples "
                f"take {least}"
            )
        most = least  # tokens of `text + ending` at most: counted anew where they might be too many
        while True:
            subject = rng.choice(subjects)
            more = _example(subject, next(words), label_of[subject])
            most += tokens.count(more) + _SEAM
            if most > length and (most := tokens.count(more + text + ending)) > length:
                return Sample(text + ending, (label_of[wanted],), _NAME_TOKENS)
            text = more + text


def _fragments(tokens: Tokens, rng: random.Random, length: int) -> Iterator[str]:
    """Yield 6 to 16 words that begin a sentence; no sentence twice before all texts are used."""
    while True:
        sentences = tokens.passage(rng, 3 * length)
        rng.shuffle(sentences)
        for sentence in sentences:
            words = sentence.split()[: rng.randint(6, 16)]
            if len(words) >= 6:
                yield " ".join(words)


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
        text = " ".join(tokens.passage(rng, length + 4 * self.continuation))
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
        assert isinstance(result, Measured) and result.recall is not None
        return fmean(fmean(heads) for heads in result.recall)


TASKS = (Needle, MultiKey, TwoQuestions, FewShot, Perplexity, AttentionRecall)
