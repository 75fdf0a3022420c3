# SPDX-License-Identifier: Apache-2.0
"""How well a text is continued after the eviction of its beginning."""

from __future__ import annotations

import random

from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import GeneratedTask, Result, Sample


class Perplexity(GeneratedTask):
    """English text whose continuation is given: each of its tokens is decoded over the kept cache.

    The first of them is left out: its probability comes from the prefill, before the eviction.
    The score of a sample is the others' mean negative log probability; tables show exp of the mean.
    """

    name = "perplexity"
    title = "perplexity of a continuation"
    summary = "64 tokens of English text behind the evicted prompt"
    metric = "nats per token"
    lower_is_better = True
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
