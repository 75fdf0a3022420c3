# SPDX-License-Identifier: Apache-2.0
"""The real text that facts are hidden in, and the names and numbers of facts."""

from __future__ import annotations

import math
import random
import re

import pytest

from vllm_pyramid.tools.eval.compare import made_up_prompts
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.phrases import DIGITS, is_held_out, make_names, make_numbers


class WordTokenizer:
    """A token for every word and mark, and one in front."""

    bos_token = "<s>"

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens
        pieces = re.findall(r"\w+|[^\w\s]", text)
        self.words = pieces
        return [0, *(1 + hash(piece) % 1000 for piece in pieces)]


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(WordTokenizer())


def test_no_sentence_comes_twice_while_the_documents_have_more(tokens: Tokens) -> None:
    """Topics share sentences; a text that is longer than all of them repeats."""
    for seed in range(3):
        long = tokens.passage(random.Random(seed), 20_000)
        assert len(set(long)) == len(long) > 500
        assert tokens.passage(random.Random(seed), 20_000) == long
        assert tokens.passage(random.Random(seed), 500)[:10] == long[:10]
    everything = tokens.passage(random.Random(0), 100_000)
    assert len(everything) > len(set(everything)) > 1500


def test_words_are_split_and_different() -> None:
    rng = random.Random(0)
    for held_out in (False, True):
        words = make_names(rng, 200, held_out=held_out) + make_numbers(rng, 200, held_out=held_out)
        assert len(set(words)) == 400
        assert all(is_held_out(word) == held_out for word in words)
    assert all(len(number) == DIGITS for number in make_numbers(rng, 50, held_out=True))
    share = sum(is_held_out(str(n)) for n in range(10_000, 20_000)) / 10_000
    assert math.isclose(share, 0.2, abs_tol=0.02)


def test_a_prompt_states_the_fact_that_it_asks_for() -> None:
    tokenizer = WordTokenizer()
    first, second = made_up_prompts(Tokens(tokenizer), 2, 400)
    assert first != second and all(360 < len(ids) <= 400 for ids in (first, second))
    text = " ".join(tokenizer.words)  # of the last prompt that was encoded
    (name,) = re.findall(r"secret code of (\w+ - \w+) is$", text)
    assert re.search(rf"secret code of {name} is \d{{{DIGITS}}} \.", text)
    with pytest.raises(ValueError, match="leave no room for a text"):
        made_up_prompts(Tokens(tokenizer), 1, 20)
