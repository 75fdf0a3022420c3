# SPDX-License-Identifier: Apache-2.0
"""Tasks over structured prompts: chains of variables, key-value stores, labelled examples."""

from __future__ import annotations

import random
import re
from itertools import pairwise

from vllm_pyramid.eval import phrases
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import GeneratedTask, NumberTask, Result, Sample
from vllm_pyramid.eval.words import DIGITS, make_names, make_numbers

_MOST_NAMES = 3000  # of the about 5,000 that are held out: more would be slow to find
_NAME_TOKENS = 12  # a made-up name can take a token for every one or two letters


class VariableTracing(GeneratedTask):
    """Two chains of equal variables hidden in English text; one is to be followed from its start.

    RULER's variable tracking (https://arxiv.org/abs/2404.06654, section 3.2) with names for values.
    """

    name = "variable-tracing"
    title = "variable tracing"
    summary = "a chain of three equal variables, followed from its start"
    metric = "share of the chain"
    steps = 3

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        names = make_names(rng, 2 * (self.steps + 1), held_out=True)
        chains = (names[: self.steps + 1], names[self.steps + 1 :])
        links = [iter([phrases.link(a, b) for a, b in pairwise(chain)]) for chain in chains]
        turns = [0] * self.steps + [1] * self.steps
        rng.shuffle(turns)
        prompt = tokens.hide(
            rng,
            [next(links[turn]) for turn in turns],
            phrases.trace(chains[0][0]).prompt,
            length,
        )
        expected = tokens.count(phrases.traced(chains[0][1:]))
        return Sample(prompt, tuple(chains[0][1:]), expected + 4)

    def score(self, sample: Sample, result: Result) -> float:
        """The share of the chain that is right before the first mistake."""
        first = result.text.split("\n")[0]
        found = re.findall(r"(?:^|equals) ?([\w-]+)\.", first)
        right = 0
        for name, wanted in zip(found, sample.answers, strict=False):
            if name != wanted:
                break
            right += 1
        return right / len(sample.answers)


class KeyValue(NumberTask):
    """A store of names and numbers that fills the prompt; one name is looked up."""

    name = "key-value"
    title = "key-value lookup"
    summary = "a prompt full of names with numbers, one looked up"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        entries: list[tuple[str, str]] = []
        text = ""
        known: set[str] = set()
        batch = max(1, (length - 48) // 16)
        while batch:
            if len(known) + batch > _MOST_NAMES:
                raise ValueError(
                    f"the task {self.name!r} has names for {_MOST_NAMES} entries, too few for "
                    f"{length} tokens"
                )
            names = make_names(rng, batch, held_out=True)
            numbers = make_numbers(rng, batch, held_out=True)
            more = [e for e in zip(names, numbers, strict=True) if e[0] not in known]
            longer = text + "".join(phrases.entry(*entry) for entry in more)
            if tokens.count(longer) > length - 48:
                batch //= 2
                continue
            entries, text = entries + more, longer
            known.update(name for name, _ in more)
        if len(entries) < 2:
            raise ValueError(f"{length} tokens are too few for the task {self.name!r}")
        key, value = entries[rng.randrange(len(entries))]
        prompt = text.rstrip("\n") + phrases.look_up(key).prompt
        return Sample(prompt, (value,), DIGITS + 4, {"entries": len(entries)})


class FewShot(GeneratedTask):
    """Labelled examples in which a subject decides the label; the last one is to be labelled."""

    name = "few-shot"
    title = "few-shot classification"
    summary = "a prompt full of labelled examples, one more to label"
    subjects = 8
    labels = 4

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        subjects = make_names(rng, self.subjects, held_out=True)
        labels = make_names(rng, self.labels, held_out=True)
        label_of = {name: labels[i % self.labels] for i, name in enumerate(subjects)}

        def words() -> str:
            while True:
                for sentence in tokens.passage(rng, 60):
                    some = sentence.split()[: rng.randint(6, 16)]
                    if len(some) >= 6:
                        return " ".join(some)

        asked = subjects[index % self.subjects]
        ending = phrases.classify(asked, words())
        # Every subject comes once first, so that the asked one has been seen.
        first = [phrases.example(name, words(), label_of[name]) for name in subjects]
        rng.shuffle(first)
        text = "".join(first)
        if tokens.count(text + ending) > length:
            raise ValueError(
                f"{length} tokens are too few for the task {self.name!r}: its first examples "
                f"take {tokens.count(text + ending)}"
            )
        while True:
            subject = rng.choice(subjects)
            longer = phrases.example(subject, words(), label_of[subject]) + text
            if tokens.count(longer + ending) > length:
                break
            text = longer
        return Sample(text + ending, (label_of[asked],), _NAME_TOKENS)
