# SPDX-License-Identifier: Apache-2.0
"""The contract of a task: prompts made from a seed, and what the answers to them are worth.

A task knows nothing of policies, budgets or engines. It makes samples of about a given length, the
same for every policy, and scores the text that came back.
"""

from __future__ import annotations

import random
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result

__all__ = [
    "AgreementTask",
    "Figure",
    "GeneratedTask",
    "NumberTask",
    "Sample",
    "Task",
    "begins_with",
    "right_digits",
    "seed_of",
]


DIGITS_METRIC = "digits right at their place"
_INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Sample:
    """One prompt and what is expected of its continuation.

    Attributes:
        prompt: the text given to the model, the beginning of the answer included.
        answers: accepted or expected continuations; how they count is for the task to say.
        max_tokens: tokens to generate; 0 to measure the probability of `answers[0]` instead, which
            is then decoded token by token behind the evicted prompt.
        facts: what pictures and tasks need to know, such as `{"depth": 0.5}`.
        stop: texts at which the answer ends, for the task to cut it there.
        may_be_cut: a prompt that is too long for the model loses its middle instead of being an
            error.
        lead: text that is decoded behind the prompt whatever the model would say; the answer
            follows it.
        follows_full: the continuation to measure is what the whole cache generates in
            `max_tokens`.
        turns: characters that the prompts of the conversation's earlier turns had.
    """

    prompt: str
    answers: tuple[str, ...]
    max_tokens: int
    facts: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    may_be_cut: bool = False
    lead: str = ""
    follows_full: bool = False
    turns: tuple[int, ...] = ()

    @property
    def forced(self) -> bool:
        """Whether the continuation is given and its probability is what is measured."""
        return self.max_tokens == 0


@dataclass(frozen=True)
class Figure:
    """One figure over the samples, with its 95 % interval; None where there is none."""

    metric: str
    score: float
    low: float | None = None
    high: float | None = None
    lower_is_better: bool = False

    @classmethod
    def of(
        cls,
        metric: str,
        values: Iterable[float],
        *,
        exponential: bool = False,
        lower_is_better: bool = False,
    ) -> Figure:
        """The mean of a number a prompt, or its exponential; the interval by bootstrap.

        Prompts are drawn again 2,000 times, with the same chance in every figure, so that policies
        are compared on the same draws.
        """
        numbers = np.array(list(values), np.float64)
        drawn = np.random.default_rng(0).integers(0, len(numbers), (2000, len(numbers)))
        means = np.array([numbers.mean(), *np.quantile(numbers[drawn].mean(axis=1), _INTERVAL)])
        score, low, high = (np.exp(means) if exponential else means).tolist()
        return cls(metric, score, low, high, lower_is_better)


class Task(ABC):
    """One kind of question.

    Attributes:
        name: for `--tasks`. summary: one line for `vllm-pyramid eval --list`.
        metric: what `score` returns.
        needs_recall: whether results must hold the attention recall.
        needs_chat: whether prompts are chats, for models with a chat template.
    """

    name: str
    summary: str = ""
    metric: str = "exact match"
    needs_recall: bool = False
    needs_chat: bool = False

    @abstractmethod
    def samples(self, tokens: Tokens, length: int, count: int, seed: int) -> Sequence[Sample]:
        """`count` samples whose prompts have at most `length` tokens, close to it.

        Equal arguments give equal samples, whatever was made before.

        Raises:
            ValueError: the length is too small for the task.
        """

    def lengths(self, requested: Sequence[int]) -> Sequence[int]:
        """The lengths this task is measured at: all requested ones, unless it has its own."""
        return requested

    def seeds(self, requested: Sequence[int]) -> Sequence[int]:
        """The seeds this task is measured with: all, unless its samples depend on none."""
        return requested

    def score(self, sample: Sample, result: Result) -> float:
        """What the result is worth. By default 1 if the text begins with the answer, else 0."""
        return float(begins_with(result.text, sample.answers[0]))

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        """The figures over all samples: by default the mean score."""
        return [Figure.of(self.metric, map(self.score, samples, results))]


class GeneratedTask(Task):
    """A task whose samples are made one by one, each from a seed of its own."""

    def samples(self, tokens: Tokens, length: int, count: int, seed: int) -> Sequence[Sample]:
        return [self.numbered(tokens, length, index, seed) for index in range(count)]

    def numbered(self, tokens: Tokens, length: int, index: int, seed: int) -> Sample:
        """Sample number `index` of `samples`, without those before it."""
        chance = random.Random(seed_of(self.name, length, seed, index))
        return self.sample(tokens, length, index, chance)

    @abstractmethod
    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        """Sample number `index`, all of its chance from `rng`.

        Raises:
            ValueError: the length is too small for the task.
        """


class NumberTask(GeneratedTask):
    """A task whose answer is one number: its digits count one by one too.

    Exact match does not tell a lost number from one whose last digit is lost, as happens where
    every digit is a token of its own.
    """

    def number_in(self, text: str) -> str:
        """The number that a text gives as its answer, empty if none: that at its beginning."""
        match = re.match(r"\s*(\d*)", text)
        assert match is not None
        return match[1]

    def digits(self, sample: Sample, result: Result) -> float:
        """The share of the answer's digits that are right at their place."""
        return right_digits(self.number_in(result.text), sample.answers[0])

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        digits = Figure.of(DIGITS_METRIC, map(self.digits, samples, results))
        return [*super().figures(samples, results), digits]


class AgreementTask(GeneratedTask):
    """A task without a right answer: what is asked is whether eviction changes what is said.

    The continuation is what the whole cache generates greedily. Along it, but for its first token,
    which comes from the prefill: the share of tokens that would have been the greedy choice over
    the kept cache too, and the divergence KL(full || policy) of the next token's distributions, in
    nats.
    """

    metric = "greedy tokens as of the whole cache"
    answer_tokens = 64

    def score(self, sample: Sample, result: Result) -> float:
        """The share that agrees."""
        assert result.agreement is not None
        return result.agreement

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        """Agreement, and divergence."""
        nats = [result.divergence for result in results if result.divergence is not None]
        assert len(nats) == len(results)
        return [
            *super().figures(samples, results),
            Figure.of("divergence from the whole cache, nats", nats, lower_is_better=True),
        ]


def begins_with(text: str, answer: str) -> bool:
    """Whether the answer stands at the beginning, as a word of its own."""
    text = text.lstrip()
    behind = text[len(answer) : len(answer) + 1]
    return text.startswith(answer) and not behind.isalnum()


def right_digits(found: str, number: str) -> float:
    """The share of the digits that agree place by place, of the longer of the two; 1 if equal."""
    same = sum(a == b for a, b in zip(found, number, strict=False))
    return same / max(len(found), len(number))


def seed_of(*parts: object) -> int:
    """A number that depends on the parts alone, not on the process: for `random.Random`."""
    return zlib.crc32("\x1f".join(map(str, parts)).encode())
