# SPDX-License-Identifier: Apache-2.0
"""Training sequences: English text with facts hidden in it, then questions about them.

A sequence is written as pieces of text, each with a weight of the loss, and tokenized as one
string, exactly as the served model will see it. Values are random, so where they are stated they
have no loss; where they are the answer they have the full one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap

import numpy as np
from demo_training.corpus import sentences
from tokenizers import Tokenizer

from vllm_pyramid.tools.eval import phrases
from vllm_pyramid.tools.eval.phrases import CODE, FactPhrase, Question, make_names, make_numbers

SILENT, READING, ANSWER = 0, 1, 2  # how a piece counts in the loss

FACTS = {
    "code": CODE,
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

Pieces = list[tuple[str, int]]


@dataclass
class Episode:
    """The pieces that must stand in the text, and the questions with their answers."""

    scattered: list[Pieces] = field(default_factory=list)
    ending: Pieces = field(default_factory=list)


def _split(statement: str, value: str) -> Pieces:
    """A statement with its (unpredictable) value taken out of the loss."""
    before, _, after = statement.partition(value)
    return [(before, SILENT), (value, SILENT), (after, READING)]


def _interleaved(rng: random.Random, groups: Sequence[Sequence[Pieces]]) -> list[Pieces]:
    """All statements in a random order that keeps the order within each group."""
    order = [index for index, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    left = [iter(group) for group in groups]
    return [next(left[index]) for index in order]


def _answered(question: Question, answer: str) -> Pieces:
    return [(question.prompt, SILENT), (f" {answer}.", ANSWER)]


def facts(rng: random.Random, count: int, asked: int, *, varied: bool) -> Episode:
    """`count` facts, each in one of the wordings, `asked` of them questioned."""
    keys = make_names(rng, count, held_out=False)
    values = make_numbers(rng, count, held_out=False)
    kinds = [rng.choice(list(FACTS)) if varied else "code" for _ in keys]
    episode = Episode()
    for key, value, kind in zip(keys, values, kinds, strict=True):
        statement = FACTS[kind].state(key, value)
        episode.scattered.append(_split(statement, value))
    for index in rng.sample(range(count), min(asked, count)):
        key, value, phrase = keys[index], values[index], FACTS[kinds[index]]
        if varied and rng.random() < 0.7:
            episode.ending += _answered(phrase.question(key), value)
        else:
            episode.ending.append(("\n\n" + phrase.question(key).begin, SILENT))
            episode.ending.append((f" {value}.", ANSWER))
    return episode


def several_values(rng: random.Random, count: int, asked: int) -> Episode:
    """Names with two to four numbers each; some of them are asked for all of theirs."""
    episode = Episode()
    groups = []
    for key in make_names(rng, max(2, count // 3), held_out=False):
        values = make_numbers(rng, rng.choice((2, 3, 4)), held_out=False)
        groups.append([_split(CODE.state(key, value), value) for value in values])
        if len(episode.ending) < 2 * max(1, asked // 2):
            episode.ending += _answered(
                Question(
                    f"What are all the secret codes of {key}?", f"The secret codes of {key} are"
                ),
                ", ".join(values),
            )
    episode.scattered = _interleaved(rng, groups)
    return episode


def both_questions(rng: random.Random, count: int, asked: int) -> Episode:
    episode = facts(rng, count, 0, varied=False)
    texts = ["".join(text for text, _ in pieces) for pieces in episode.scattered]
    for _ in range(max(1, asked // 2)):
        first, second = rng.sample(texts, 2)
        key = [
            text.split(" is ")[0].removeprefix("The secret code of ") for text in (first, second)
        ]
        value = first.split(" is ")[1].rstrip(".")
        episode.ending += _answered(phrases.both(*key), f"{value}. {second.rstrip('.')}")
    return episode


def _link(name: str, other: str) -> str:
    """Return one step of a chain of variables."""
    return f"Variable {name} equals {other}."


def chains(rng: random.Random, count: int, asked: int) -> Episode:
    """Chains of variables of two to four steps; some are asked for from their start."""
    episode = Episode()
    groups = []
    for _ in range(max(2, count // 3)):
        names = make_names(rng, rng.choice((3, 4, 5)), held_out=False)
        steps = pairwise(names)
        groups.append([[(_link(name, other), SILENT)] for name, other in steps])
        if len(episode.ending) < 2 * max(1, asked // 2):
            episode.ending += _answered(
                Question(
                    f"What does the variable {names[0]} equal?", f"Variable {names[0]} equals"
                ),
                " ".join([f"{names[1]}.", *starmap(_link, pairwise(names[1:]))]).removesuffix("."),
            )
    episode.scattered = _interleaved(rng, groups)
    return episode


@dataclass
class Writer:
    """Writes episodes of exactly `length` tokens over passages of the given pages."""

    tokenizer: Tokenizer
    pages: Sequence[Sequence[str]]
    rng: random.Random

    def __post_init__(self) -> None:
        self._begin = self.tokenizer.token_to_id("<|begin|>")
        self._special = {
            name: self.tokenizer.token_to_id(f"<|{name}|>") for name in ("user", "assistant", "end")
        }
        self._vocabulary = self.tokenizer.get_vocab_size()
        # Sentences with their numbers of tokens, page after page.
        self._pages: list[Pieces] = []
        for page in self.pages:
            pieces = [s for paragraph in page for s in sentences(paragraph)]
            encoded = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
            lengths = [len(e.ids) + 1 for e in encoded]
            self._pages.append(list(zip(pieces, lengths, strict=True)))
        self._page_weights = [sum(length for _, length in page) for page in self._pages]

    def passage(self, tokens: int) -> list[str]:
        """Consecutive sentences, from one page or several, of at most about `tokens` tokens."""
        chosen: list[str] = []
        while tokens > 0:
            page = self.rng.choices(self._pages, self._page_weights)[0]
            start = self.rng.randrange(len(page))
            for sentence, length in page[start:]:
                if length > tokens:
                    return chosen
                chosen.append(sentence)
                tokens -= length
        return chosen

    def repeats(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens of which later parts repeat earlier ones: teaches copying, every token."""
        ids = np.empty(0, dtype=np.int64)
        kinds = np.empty(0, dtype=np.int8)
        while len(ids) < length:
            if len(ids) > 16 and self.rng.random() < 0.65:
                size = self.rng.randint(6, 24)
                start = self.rng.randrange(max(1, len(ids) - size))
                piece = ids[start : start + size]
                kind = np.full(len(piece), ANSWER, dtype=np.int8)
                kind[:2] = SILENT  # nothing yet says what is being repeated
            else:
                size = self.rng.randint(8, 32)
                piece = np.array(
                    [self.rng.randrange(6, self._vocabulary) for _ in range(size)], dtype=np.int64
                )
                kind = np.full(size, SILENT, dtype=np.int8)
            ids, kinds = np.concatenate((ids, piece)), np.concatenate((kinds, kind))
        return ids[:length], kinds[:length]

    def key_values(self, length: int, asked: int) -> tuple[np.ndarray, np.ndarray]:
        """A key-value store of about `length` tokens and questions about some of its keys."""
        count = max(3, int((length - 26 * asked) / 13.5))
        keys = make_names(self.rng, count, held_out=False)
        values = make_numbers(self.rng, count, held_out=False)
        lines = "".join(f"- {key}: {value}\n" for key, value in zip(keys, values, strict=True))
        pieces: Pieces = [(lines.rstrip("\n"), SILENT)]
        for index in self.rng.sample(range(count), min(asked, count)):
            key = keys[index]
            question = Question(f"Which value is stored for {key}?", f"{key}:")
            pieces += _answered(question, values[index])
        return self._tokens(pieces, length)

    def classification(self, length: int, asked: int) -> tuple[np.ndarray, np.ndarray]:
        """Labelled examples whose subject decides the label; the later ones count."""
        subjects = make_names(self.rng, self.rng.randint(4, 8), held_out=False)
        labels = make_names(self.rng, self.rng.randint(2, 4), held_out=False)
        label_of = {s: labels[i % len(labels)] for i, s in enumerate(subjects)}
        seen: set[str] = set()
        pieces: Pieces = []
        total = 0
        while total < length:
            subject = self.rng.choice(subjects)
            words = " ".join(self.passage(60)[:1]).split()[: self.rng.randint(6, 16)]
            label = label_of[subject]
            text = phrases.example(subject, " ".join(words), label)
            before = text[: -len(f" {label}\n")]
            pieces.append((before, READING if seen else SILENT))
            pieces.append((f" {label}\n", ANSWER if subject in seen else SILENT))
            seen.add(subject)
            total += len(text) // 4 + 8
        return self._tokens(pieces, length)

    def hidden(
        self, make: Callable[[], Episode], length: int, *, chat: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The episode's statements scattered over English text, then its questions."""
        episode = make()
        needed = sum(len(text) for pieces in episode.scattered for text, _ in pieces)
        needed += sum(len(text) for text, _ in episode.ending)
        filler = self.passage(length - int(needed / 2.1) - 12)
        places = sorted(self.rng.randint(0, len(filler)) for _ in episode.scattered)
        pieces: Pieces = []
        taken = 0
        for place, statement in zip(places, episode.scattered, strict=True):
            pieces.append((" ".join(["", *filler[taken:place], ""]), READING))
            pieces += statement
            taken = place
        pieces.append((" ".join(["", *filler[taken:]]), READING))
        pieces[0] = (pieces[0][0].lstrip(), READING)
        ending = episode.ending
        if chat:
            pieces, ending = self._as_chat(pieces, ending)
        # What is left of the length is another text.
        rest = " ".join(self.passage(length))
        return self._tokens([*pieces, *ending, ("\n\n" + rest, READING)], length)

    def _as_chat(self, pieces: Pieces, ending: Pieces) -> tuple[Pieces, Pieces]:
        """The same as turns of a conversation: the first question follows the text."""
        turns: Pieces = []
        opening = "<|user|>\n"
        for (prompt, _), (answer, _) in zip(ending[::2], ending[1::2], strict=True):
            if "Question: " not in prompt:
                return pieces, ending
            ask, _, begin = prompt.removeprefix("\n\nQuestion: ").partition("\nAnswer: ")
            turns.append((f"{opening}{ask}<|end|>\n<|assistant|>\n{begin}", SILENT))
            turns.append((f"{answer}<|end|>", ANSWER))
            opening = "\n<|user|>\n"
        pieces = [("<|user|>\n", SILENT), *pieces]
        turns[0] = ("\n\n" + turns[0][0].removeprefix("<|user|>\n"), SILENT)
        return pieces, turns

    def _tokens(
        self, pieces: Sequence[tuple[str, int]], length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and kinds of the joined pieces, cut to `length` after the beginning-of-text token."""
        text = "".join(piece for piece, _ in pieces)
        ends = np.cumsum([len(piece) for piece, _ in pieces])
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        ids = np.array([self._begin, *encoded.ids], dtype=np.int64)[:length]
        last = np.array([end - 1 for _, end in encoded.offsets], dtype=np.int64)
        piece_of = np.searchsorted(ends, last, side="right")
        kinds = np.array([kind for _, kind in pieces], dtype=np.int8)[piece_of]
        kinds = np.concatenate((np.zeros(1, dtype=np.int8), kinds))[:length]
        if len(ids) < length:
            padding = length - len(ids)
            ids = np.concatenate((ids, np.full(padding, self._special["end"], dtype=np.int64)))
            kinds = np.concatenate((kinds, np.zeros(padding, dtype=np.int8)))
        return ids, kinds


def batch_row(
    writer: Writer, kind: str, length: int, counts: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [length] and kinds [length] of one sequence of the named kind.

    The longer the sequence, the more questions it ends with: each is a lesson from the same text.
    """
    rng = writer.rng
    count = rng.randint(*counts)
    asked = max(2, min(count, length // 100))
    if kind == "repeats":
        return writer.repeats(length)
    if kind == "key_values":
        return writer.key_values(length, asked)
    if kind == "classification":
        return writer.classification(length, asked)
    make: Callable[[], Episode] = {
        "facts": lambda: facts(rng, count, asked, varied=False),
        "varied": lambda: facts(rng, count, asked, varied=True),
        "several_values": lambda: several_values(rng, max(4, count), asked),
        "both_questions": lambda: both_questions(rng, max(3, count), asked),
        "chains": lambda: chains(rng, max(4, count), asked),
    }[kind]
    return writer.hidden(make, length, chat=rng.random() < 0.15)
