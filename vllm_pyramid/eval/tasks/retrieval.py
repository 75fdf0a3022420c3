# SPDX-License-Identifier: Apache-2.0
"""Facts hidden in real English text: the needle in a haystack and its relatives.

After RULER (https://arxiv.org/abs/2404.06654), section 3: single needle, multi-key and multi-value.
"""

from __future__ import annotations

import random
import re

from vllm_pyramid.eval import phrases
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import GeneratedTask, NumberTask, Result, Sample
from vllm_pyramid.eval.words import DIGITS, make_names, make_numbers

_CODE = phrases.FACTS["code"]
# A number can take a token a digit, and there are a space and a full stop around it.
_NUMBER_TOKENS = DIGITS + 4
# In ninths of the text; in this order, so that few samples too are spread over it.
_DEPTHS = (0, 9, 4, 7, 2, 5, 1, 8, 3, 6)


class Needle(NumberTask):
    """One fact in a text, at depths from the first sentence to the last."""

    name = "needle"
    title = "needle in a haystack"
    summary = "one fact hidden in English text, at ten depths"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        key = make_names(rng, 1, held_out=True)[0]
        value = make_numbers(rng, 1, held_out=True)[0]
        depth = _DEPTHS[index % len(_DEPTHS)] / 9
        prompt = tokens.hide(
            rng, [_CODE.state(key, value)], _CODE.question(key).prompt, length, [depth]
        )
        return Sample(prompt, (value,), _NUMBER_TOKENS, {"depth": round(depth, 2)})


class MultiKey(NumberTask):
    """Eight facts of eight names, of which one is asked for."""

    name = "multi-key"
    title = "multi-key retrieval"
    summary = "eight facts hidden in English text, one of them asked for"
    keys = 8

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, self.keys, held_out=True)
        values = make_numbers(rng, self.keys, held_out=True)
        asked = index % self.keys
        prompt = tokens.hide(
            rng,
            [_CODE.state(key, value) for key, value in zip(keys, values, strict=True)],
            _CODE.question(keys[asked]).prompt,
            length,
        )
        return Sample(prompt, (values[asked],), _NUMBER_TOKENS, {"asked": asked})


class MultiValue(GeneratedTask):
    """One name has four numbers in four places, beside another with four; all are asked for."""

    name = "multi-value"
    title = "multi-value retrieval"
    summary = "four facts about one name, all of them asked for"
    metric = "share found"
    values = 4

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, 2, held_out=True)
        numbers = make_numbers(rng, 2 * self.values, held_out=True)
        statements = [
            (keys[place % 2], _CODE.state(keys[place % 2], number))
            for place, number in enumerate(numbers)
        ]
        order = list(range(len(numbers)))
        rng.shuffle(order)
        prompt = tokens.hide(
            rng,
            [statements[place][1] for place in order],
            phrases.several_values(keys[0]).prompt,
            length,
        )
        wanted = tuple(numbers[place] for place in order if statements[place][0] == keys[0])
        return Sample(prompt, wanted, _NUMBER_TOKENS * self.values)

    def score(self, sample: Sample, result: Result) -> float:
        found = set(re.findall(r"\d+", result.text.split("\n")[0]))
        return len(found & set(sample.answers)) / len(sample.answers)


class TwoQuestions(NumberTask):
    """Eight facts and two questions, of which the eviction sees only the first being answered.

    The prompt ends with the beginning of the first answer, so the observation window holds the
    first name. The second answer is generated after the eviction: its fact survives only if the
    policy keeps what it was not asked for. That is the case where query-aware eviction hurts.
    """

    name = "two-questions"
    title = "second question after the eviction"
    summary = "two questions over one text; the second is scored"
    keys = 8

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        keys = make_names(rng, self.keys, held_out=True)
        values = make_numbers(rng, self.keys, held_out=True)
        first, second = rng.sample(range(self.keys), 2)
        prompt = tokens.hide(
            rng,
            [_CODE.state(key, value) for key, value in zip(keys, values, strict=True)],
            phrases.both(keys[first], keys[second]).prompt,
            length,
        )
        statement = _CODE.state(keys[second], values[second])
        return Sample(prompt, (values[second],), 2 * _NUMBER_TOKENS + 4 * len(statement) // 10)

    def given(self, text: str) -> str:
        """The second number."""
        numbers: list[str] = re.findall(r"\d+", text)
        return numbers[1] if len(numbers) > 1 else ""

    def score(self, sample: Sample, result: Result) -> float:
        return float(self.given(result.text) == sample.answers[0])
