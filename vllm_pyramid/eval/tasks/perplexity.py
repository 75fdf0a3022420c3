# SPDX-License-Identifier: Apache-2.0
"""How well a text is continued after the eviction of its beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import Result, Sample, Task, seed_of


class Perplexity(Task):
    """English text whose continuation is given: each of its tokens is decoded over the kept cache.

    The first of them is left out: its probability comes from the prefill, before the eviction.
    The score of a sample is the others' mean negative log probability; tables show exp of the mean.
    """

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "perplexity of a continuation"
    summary: ClassVar[str] = "64 tokens of English text behind the evicted prompt"
    metric: ClassVar[str] = "nats per token"
    lower_is_better: ClassVar[bool] = True
    continuation: ClassVar[int] = 64

    def samples(self, tokens: Tokens, length: int, count: int, seed: int) -> Sequence[Sample]:
        made = []
        for index in range(count):
            rng = random.Random(seed_of(self.name, length, seed, index))
            sentences = tokens.passage(rng, length + 4 * self.continuation)
            text = " ".join(sentences)
            prompt = tokens.first(text, length)
            both = tokens.first(text, length + self.continuation)
            made.append(Sample(prompt, (both[len(prompt) :],), 0))
        return made

    def score(self, sample: Sample, result: Result) -> float:
        assert result.nats is not None
        return result.nats
