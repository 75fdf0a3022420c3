# SPDX-License-Identifier: Apache-2.0
"""The wording of the generated tasks: facts hidden in a text, and the questions about them.

A question ends with the beginning of its answer, as in RULER (https://arxiv.org/abs/2404.06654):
the model continues with the words that are scored. The built-in model was trained on the same
wording, on other names, numbers and texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["FACTS", "FactPhrase", "Question"]


@dataclass(frozen=True)
class Question:
    """What is asked, and the beginning of the answer that is given to the model."""

    ask: str
    begin: str

    @property
    def prompt(self) -> str:
        """The text that follows the document; the answer follows it with a space."""
        return f"\n\nQuestion: {self.ask}\nAnswer: {self.begin}"


@dataclass(frozen=True)
class FactPhrase:
    """A fact that gives a name its number, in one wording; `{key}` and `{value}` are filled in."""

    fact: str
    ask: str
    begin: str

    def state(self, key: str, value: str) -> str:
        return self.fact.format(key=key, value=value)

    def question(self, key: str) -> Question:
        return Question(self.ask.format(key=key), self.begin.format(key=key))


FACTS: dict[str, FactPhrase] = {
    "code": FactPhrase(
        "The secret code of {key} is {value}.",
        "What is the secret code of {key}?",
        "The secret code of {key} is",
    ),
    "number": FactPhrase(
        "Remember that the number for {key} is {value}.",
        "What is the number for {key}?",
        "The number for {key} is",
    ),
    "magic": FactPhrase(
        "One of the special magic numbers for {key} is: {value}.",
        "What is the special magic number for {key} mentioned in the text?",
        "The special magic number for {key} is:",
    ),
    "password": FactPhrase(
        "To open the door of {key}, type {value}.",
        "Which number opens the door of {key}?",
        "To open the door of {key}, type",
    ),
    "ticket": FactPhrase(
        "{key} travels with ticket {value}.",
        "Which ticket does {key} have?",
        "{key} travels with ticket",
    ),
}


def several_values(key: str) -> Question:
    """All numbers of one name, in the order of the text, separated by commas."""
    return Question(f"What are all the secret codes of {key}?", f"The secret codes of {key} are")


def several_keys(keys: Sequence[str]) -> Question:
    """The numbers of several names, in the order of the question, separated by commas."""
    names = listed(keys)
    return Question(f"What are the secret codes of {names}?", f"The secret codes of {names} are")


def most_frequent(count: int) -> Question:
    """The words of the text above that come most often, separated by commas."""
    return Question(
        f"What are the {count} words that come most often in the text above?",
        f"The {count} words that come most often are",
    )


def both(first: str, second: str) -> Question:
    """Two questions, of which the prompt begins to answer only the first."""
    code = FACTS["code"]
    ask = f"{code.ask.format(key=first)} {code.ask.format(key=second)}"
    return Question(ask, code.begin.format(key=first))


def link(name: str, other: str) -> str:
    """One step of a chain of variables."""
    return f"Variable {name} equals {other}."


def trace(name: str) -> Question:
    """The chain that starts at a variable; the answer goes on link by link."""
    return Question(f"What does the variable {name} equal?", f"Variable {name} equals")


def traced(names: Sequence[str]) -> str:
    """The answer to `trace`: the names that follow, each in its link."""
    links = [link(name, other) for name, other in pairwise(names)]
    return " ".join([f"{names[0]}.", *links]).removesuffix(".")


def entry(key: str, value: str) -> str:
    """One line of a key-value store."""
    return f"- {key}: {value}\n"


def look_up(key: str) -> Question:
    return Question(f"Which value is stored for {key}?", f"{key}:")


def example(subject: str, words: str, label: str) -> str:
    """One example of a classification: the subject decides the label, the words do not."""
    return f"Text: {words}\nLabel of {subject}: {label}\n"


def classify(subject: str, words: str) -> str:
    """The prompt's last, unlabelled example."""
    return f"Text: {words}\nLabel of {subject}:"


def listed(items: Sequence[str]) -> str:
    return ", ".join(items)
