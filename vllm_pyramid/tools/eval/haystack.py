# SPDX-License-Identifier: Apache-2.0
"""Real English text of a wanted number of tokens, with statements hidden at wanted depths.

The text is the documentation behind Python's `help()`, half a megabyte in `pydoc_data.topics`
(under the PSF licence), read where Python has installed it. Its wording differs a little between
Python versions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

# Tokens that may be missing at the end of a passage: few sentences are shorter.
_SHORT = 16


@cache
def topics() -> dict[str, str]:
    """Return the documentation's texts by topic, sorted; RuntimeError without `pydoc_data`."""
    try:
        from pydoc_data.topics import topics as raw
    except ImportError as error:
        raise RuntimeError(
            "this Python has no 'pydoc_data.topics' (the text behind help()), from which the "
            "prompts are made: install the distribution's full standard library, for "
            "example the package 'libpython3-stdlib'"
        ) from error
    return {name: raw[name] for name in sorted(raw)}


class Tokens:
    """Count tokens as the served model will, and make text of a number of them.

    `tokenizer` is the model's, from Hugging Face; its special tokens are added, as vLLM does.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids with special tokens; the first once, also if the text begins with it."""
        first = self._tokenizer.bos_token
        has_first = first is not None and text.startswith(first)
        return list(self._tokenizer.encode(text, add_special_tokens=not has_first))

    def count(self, text: str) -> int:
        """Return how many ids `encode` gives."""
        return len(self.encode(text))

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Return messages in the model's chat template, up to the reply; ValueError: none."""
        if not self.can_chat:
            raise ValueError("this model's tokenizer has no chat template")
        apply = self._tokenizer.apply_chat_template
        return str(apply(messages, tokenize=False, add_generation_prompt=True))

    def first(self, text: str, length: int) -> str:
        """Return at most `length` tokens of `text`, to a word's end; ValueError: it is shorter."""
        if self.count(text) < length:
            raise ValueError(f"a text of {self.count(text)} tokens cannot be cut to {length}")
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(text[:middle]) <= length:
                low = middle
            else:
                high = middle - 1
        space = text.rfind(" ", 0, low + 1)
        return text[: space if space > 0 else low]

    @cached_property
    def _sentences(self) -> list[list[tuple[str, int]]]:
        """Return the sentences of each topic, with their tokens."""
        empty = self.count("")
        pages = [
            [(sentence, self.count(" " + sentence) - empty) for sentence in _sentences(text)]
            for text in topics().values()
        ]
        return [page for page in pages if page]

    def passage(self, rng: random.Random, tokens: int) -> list[str]:
        """Return sentences of at most `tokens` tokens, close to it, from topics in a random order.

        Each topic begins at a random sentence; what stands before these follows when all topics are
        through. No sentence comes twice before every one has been taken (topics share some).
        """
        order = list(range(len(self._sentences)))
        rng.shuffle(order)
        chosen: list[str] = []
        starts: dict[int, int] = {}
        while True:
            taken: set[str] = set()
            too_long = False
            for rest in (False, True):
                for index in order:
                    page = self._sentences[index]
                    if index not in starts:
                        starts[index] = rng.randrange(len(page))
                    begin = starts[index]
                    for sentence, length in page[:begin] if rest else page[begin:]:
                        if sentence in taken:
                            continue
                        if length > tokens:
                            too_long = True
                            break  # another topic may have a shorter one
                        chosen.append(sentence)
                        taken.add(sentence)
                        tokens -= length
                    if tokens < _SHORT:
                        return chosen
            if too_long:
                return chosen

    def hide(
        self,
        rng: random.Random,
        statements: Sequence[str],
        ending: str,
        length: int,
        depths: Sequence[float] | None = None,
    ) -> str:
        """Return English text with `statements` in it, then `ending`, of at most `length` tokens.

        `depths` say where each stands, ascending from 0 (first) to 1 (just before the ending); None
        for random places in the given order. ValueError: no room for text around the statements.
        """
        fixed = self.count(" ".join(statements) + ending) + 2 * len(statements)
        if length - fixed < 32:
            raise ValueError(
                f"{length} tokens leave no room for a text around {len(statements)} statements "
                f"and the question, which take {fixed}: ask for a length of at least {fixed + 32}"
            )
        if depths is None:
            depths = sorted(rng.random() for _ in statements)
        assert len(depths) == len(statements) and list(depths) == sorted(depths)
        room = length - fixed
        while True:
            filler = self.passage(rng, room)
            text = _joined(filler, statements, depths) + ending
            excess = self.count(text) - length
            if excess <= 0:
                return text
            room -= excess  # the sum of the sentences' tokens can be a little too small


def _joined(filler: Sequence[str], statements: Sequence[str], depths: Sequence[float]) -> str:
    parts: list[str] = []
    taken = 0
    for statement, depth in zip(statements, depths, strict=True):
        place = round(depth * len(filler))
        parts += [*filler[taken:place], statement]
        taken = place
    return " ".join([*parts, *filler[taken:]])


def _sentences(text: str) -> list[str]:
    """Return the sentences of a topic's running text: no headings, tables or code."""
    found = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        words = " ".join(paragraph.split())
        if len(words) < 60 or any(line.startswith(("     ", "   |", "+-")) for line in lines):
            continue
        words = words.replace("*", "").replace("“", '"').replace("”", '"')
        if words[-1] not in ".:;":
            continue
        found += re.split(r"(?<=[.!?]) (?=[A-Z])", words)
    return found


def load_tokens(model: str | Path) -> Tokens:
    """Load the tokenizer of a folder or name, without PyTorch; ValueError: there is none."""
    from transformers import AutoTokenizer

    try:
        return Tokens(AutoTokenizer.from_pretrained(str(model)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot read the tokenizer of {str(model)!r}: {reason}") from error


def encoded(model: str, prompts: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Return prompts of a file as tokens; the tokenizer is loaded if one of them is a text."""
    tokens: Tokens | None = None
    found = []
    for prompt in prompts:
        if (ids := prompt.get("prompt_token_ids")) is None:
            tokens = tokens or load_tokens(model)
            ids = tokens.encode(prompt["prompt"])
        found.append(ids)
    return found
