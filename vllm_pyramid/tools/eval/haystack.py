# SPDX-License-Identifier: Apache-2.0
"""Real English text of a wanted number of tokens, with statements hidden at wanted depths."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_pyramid.tools.eval.topics import topics

__all__ = ["Tokens", "load_tokens"]

# Tokens that may be missing at the end of a passage: few sentences are shorter.
_SHORT = 16


class Tokens:
    """Counts tokens as the served model will, and cuts text to a number of them.

    Args:
        tokenizer: of the model, from Hugging Face; its special tokens are added, as vLLM does.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids, special tokens included; the first one once if the text begins with it."""
        first = self._tokenizer.bos_token
        has_first = first is not None and text.startswith(first)
        return list(self._tokenizer.encode(text, add_special_tokens=not has_first))

    def count(self, text: str) -> int:
        return len(self.encode(text))

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: list[dict[str, str]]) -> str:
        """The messages in the model's chat template, up to the reply.

        Raises:
            ValueError: the model has no chat template.
        """
        if not self.can_chat:
            raise ValueError("this model's tokenizer has no chat template")
        apply = self._tokenizer.apply_chat_template
        return str(apply(messages, tokenize=False, add_generation_prompt=True))

    def first(self, text: str, length: int) -> str:
        """The beginning of `text` that takes at most `length` tokens, to a word's end.

        Raises:
            ValueError: the text is shorter.
        """
        low, high = 0, len(text)
        if self.count(text) < length:
            raise ValueError(f"a text of {self.count(text)} tokens cannot be cut to {length}")
        while low < high:  # the longest beginning of at most `length` tokens that ends a word
            middle = (low + high + 1) // 2
            if self.count(text[:middle]) <= length:
                low = middle
            else:
                high = middle - 1
        space = text.rfind(" ", 0, low + 1)
        return text[: space if space > 0 else low]

    @cached_property
    def _sentences(self) -> list[list[tuple[str, int]]]:
        """The sentences of each topic of Python's own documentation, with their tokens."""
        empty = self.count("")
        pages = []
        for text in topics().values():
            page = [(sentence, self.count(" " + sentence) - empty) for sentence in _sentences(text)]
            if page:
                pages.append(page)
        if not pages:
            raise ValueError("Python's own documentation (pydoc_data) holds no text")
        return pages

    def passage(self, rng: random.Random, tokens: int) -> list[str]:
        """Sentences of at most `tokens` tokens, close to it, from topics in a random order.

        Each topic begins at a random sentence; what stands before these follows when all topics
        are through. No sentence comes twice before every one has been taken (topics share some).
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
        """English text with `statements` in it, then `ending`: at most `length` tokens together.

        Args:
            depths: where each statement stands, 0 (first) to 1 (just before the ending), in
                ascending order; None for random places in the given order.

        Raises:
            ValueError: `length` leaves no room for text around the statements.
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
            # Tokens are counted sentence by sentence above; their sum can be a little too small.
            room -= excess


def _joined(filler: Sequence[str], statements: Sequence[str], depths: Sequence[float]) -> str:
    parts: list[str] = []
    taken = 0
    for statement, depth in zip(statements, depths, strict=True):
        place = round(depth * len(filler))
        parts += [*filler[taken:place], statement]
        taken = place
    return " ".join([*parts, *filler[taken:]])


def _sentences(text: str) -> list[str]:
    """The sentences of a topic's running text: no headings, tables or code."""
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
    """The tokenizer of a model folder or Hugging Face name, without PyTorch.

    Raises:
        ValueError: there is no tokenizer to be found.
    """
    from transformers import AutoTokenizer

    try:
        return Tokens(AutoTokenizer.from_pretrained(str(model)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot read the tokenizer of {str(model)!r}: {reason}") from error
