# SPDX-License-Identifier: Apache-2.0
"""The contract of a task: prompts made from a seed, and what the answers to them are worth.

A task knows nothing of policies, budgets or engines. It makes samples of about a given length, the
same for every policy, and scores the text that came back.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.phrases import begins_with
from vllm_pyramid.tools.eval.result import Result

DIGITS_METRIC = "digits right at their place"
_INTERVAL = (0.025, 0.975)
_NORMAL = NormalDist().inv_cdf(_INTERVAL[1])


@dataclass(frozen=True)
class Sample:
    """One prompt and what is expected of its continuation.

    Attributes:
        prompt: the text given to the model, the beginning of the answer included.
        answers: accepted or expected continuations; the task says how they count.
        max_tokens: tokens to generate; 0 to measure the probability of `answers[0]` instead, which
            is then decoded token by token behind the evicted prompt.
        facts: what pictures and tasks need to know, such as `{"depth": 0.5}`.
        stop: texts at which the answer ends, for the task to cut it there.
        may_be_cut: whether a prompt that is too long for the model loses its middle, in place of
            an error.
        lead: text that is decoded behind the prompt in any case; the answer follows it.
        follows_full: whether the continuation to measure is what the whole cache generates in
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
        """Return whether the continuation is given and its probability is measured."""
        return self.max_tokens == 0


@dataclass(frozen=True)
class Figure:
    """One figure over the samples, with its 95 % interval; None where there is none.

    `lower_is_better` is None where neither is.
    """

    metric: str
    score: float
    low: float | None = None
    high: float | None = None
    lower_is_better: bool | None = False

    @classmethod
    def share(cls, metric: str, right: int, count: int) -> Figure:
        """Return a share of the prompts with Wilson's interval, which is never empty."""
        square = _NORMAL**2 / count
        score = right / count
        centre = (score + square / 2) / (1 + square)
        spread = math.sqrt(square * (score * (1 - score) + square / 4)) / (1 + square)
        return cls(metric, score, centre - spread, centre + spread)

    @classmethod
    def of(
        cls,
        metric: str,
        values: Iterable[float],
        *,
        exponential: bool = False,
        lower_is_better: bool | None = False,
    ) -> Figure:
        """Return the mean of one number per prompt, or its exponential, with a bootstrap interval.

        Prompts are drawn again 2,000 times, from the same seed in every figure, so that policies
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
        name: for `--tasks`. summary: one line for `python -m lab.eval --list`.
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
        """Return `count` samples whose prompts have at most `length` tokens, close to it.

        Equal arguments give equal samples.

        Raises:
            ValueError: the length is too small for the task.
        """

    def lengths(self, requested: Sequence[int]) -> Sequence[int]:
        """Return the lengths to measure: the requested ones, unless the task has its own."""
        return requested

    def seeds(self, requested: Sequence[int]) -> Sequence[int]:
        """Return the seeds to measure: all, unless the task's samples depend on none."""
        return requested

    def score(self, sample: Sample, result: Result) -> float:
        """Return what the result is worth: by default 1 if the text begins with the answer."""
        return float(begins_with(result.text, sample.answers[0]))

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        """Return the figures over all samples: by default the mean score."""
        return [Figure.of(self.metric, map(self.score, samples, results))]


class GeneratedTask(Task):
    """A task whose samples are made one by one, each from a seed of its own."""

    def samples(self, tokens: Tokens, length: int, count: int, seed: int) -> Sequence[Sample]:
        return [self.numbered(tokens, length, index, seed) for index in range(count)]

    def numbered(self, tokens: Tokens, length: int, index: int, seed: int) -> Sample:
        """Return sample number `index` of `samples`, without those before it."""
        rng = random.Random(seed_of(self.name, length, seed, index))
        return self.sample(tokens, length, index, rng)

    @abstractmethod
    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        """Return sample number `index`; all that is random in it comes from `rng`.

        Raises:
            ValueError: the length is too small for the task.
        """


class NumberTask(GeneratedTask):
    """A task whose answer is one number: its digits count one by one too.

    Exact match does not tell a lost number from one whose last digit is lost, as happens where
    every digit is a token of its own.
    """

    def number_in(self, text: str) -> str:
        """Return the number at a text's beginning, which is its answer; empty if there is none."""
        match = re.match(r"\s*(\d*)", text)
        assert match is not None
        return match[1]

    def digits(self, sample: Sample, result: Result) -> float:
        """Return the share of digits right at their place, of the longer of the two numbers."""
        found, number = self.number_in(result.text), sample.answers[0]
        same = sum(a == b for a, b in zip(found, number, strict=False))
        return same / max(len(found), len(number))

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        digits = Figure.of(DIGITS_METRIC, map(self.digits, samples, results))
        return [*super().figures(samples, results), digits]


class AgreementTask(GeneratedTask):
    """A task without a right answer: it asks whether eviction changes what the model says.

    The continuation is what the whole cache generates greedily. Along it, but for its first token,
    which comes from the prefill: the share of tokens that would have been the greedy choice over
    the kept cache too, and the divergence KL(full || policy) of the next token's distributions, in
    nats.
    """

    metric = "greedy tokens as of the whole cache"
    answer_tokens = 64

    def score(self, sample: Sample, result: Result) -> float:
        """Return the share that agrees."""
        assert result.agreement is not None
        return result.agreement

    def figures(self, samples: Sequence[Sample], results: Sequence[Result]) -> list[Figure]:
        """Return agreement and divergence."""
        nats = [result.divergence for result in results if result.divergence is not None]
        assert len(nats) == len(results)
        metric = "divergence from the whole cache, nats"
        divergence = Figure.of(metric, nats, lower_is_better=True)
        return [*super().figures(samples, results), divergence]


def seed_of(*parts: object) -> int:
    """Return a number for `random.Random` that depends on the parts alone, not on the process."""
    return zlib.crc32("\x1f".join(map(str, parts)).encode())
