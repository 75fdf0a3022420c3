# SPDX-License-Identifier: Apache-2.0
"""Tasks that count: the most frequent words of a prompt that is full of them.

RULER's aggregation (https://arxiv.org/abs/2404.06654, section 3.3). Its words are English nouns and
made-up codes; here they are names such as `quiet-harbor`.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from math import isqrt

from vllm_pyramid.tools.eval import phrases
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result
from vllm_pyramid.tools.eval.task import GeneratedTask, Sample
from vllm_pyramid.tools.eval.words import make_names

__all__ = ["CommonWords", "FrequentWords"]

_NAME_TOKENS = 12  # a made-up name can take a token for every one or two letters
_MOST_NAMES = 3000  # of the about 5,000 that are held out, and of the words of a text


class _Counting(GeneratedTask):
    """Names in a random order, some more often than the others; these are asked for.

    Attributes:
        wanted: how many are asked for.
    """

    metric = "share found"
    wanted: int

    @abstractmethod
    def counts(self, size: int) -> Sequence[int]:
        """How often each name comes, the wanted ones first and most often; grows with `size`."""

    @abstractmethod
    def text(self, words: Sequence[str]) -> str:
        """The words as a prompt's text, the question left out."""

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        question = phrases.most_frequent(self.wanted).prompt
        sizes = range(1, min(_MOST_NAMES, length // 2))
        names = make_names(rng, len(self.counts(sizes[-1])), held_out=True)
        order = rng.random()

        def prompt(size: int) -> str:
            pairs = zip(names, self.counts(size), strict=False)
            words = [name for name, times in pairs for _ in range(times)]
            random.Random(order).shuffle(words)
            return self.text(words) + question

        fitting = bisect_right(sizes, length, key=lambda size: tokens.count(prompt(size)))
        if not fitting:
            raise ValueError(f"{length} tokens are too few for the task {self.name!r}")
        text = prompt(sizes[fitting - 1])
        return Sample(text, tuple(names[: self.wanted]), _NAME_TOKENS * self.wanted)

    def score(self, sample: Sample, result: Result) -> float:
        # In quotes, numbered or with commas; not as parts of longer words.
        found = set(re.findall(r"(?<![\w-])\w+-\w+(?![\w-])", result.text))
        return len(found & set(sample.answers)) / len(sample.answers)


class CommonWords(_Counting):
    """RULER's common words: ten that come six times in a numbered list, others once."""

    name = "common-words"
    summary = "a list of words, of which ten come six times; these are asked for"
    wanted = 10
    times = 6

    def counts(self, size: int) -> Sequence[int]:
        return [self.times] * self.wanted + [1] * size

    def text(self, words: Sequence[str]) -> str:
        return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


class FrequentWords(_Counting):
    """RULER's frequent words: word k comes in proportion to 1 / k²; three are asked for."""

    name = "frequent-words"
    summary = "a text of words with falling frequencies, the three most frequent asked for"
    wanted = 3

    def counts(self, size: int) -> Sequence[int]:
        ranks = range(1, self.wanted + max(1, isqrt(size)))
        return [max(1, size // rank**2) + (rank <= self.wanted) for rank in ranks]

    def text(self, words: Sequence[str]) -> str:
        return " ".join(words)
