# SPDX-License-Identifier: Apache-2.0
"""Measure many methods on the same prompts: one prefill, then each method's kept tokens.

An engine computes a prompt again for every policy; here its queries, keys and values are recorded
once, and a continuation is put over what each method keeps of them, in float32. What the answers
are worth is read off the logits: an answer counts as right if each of its tokens is the greedy
choice. It is for finding out what is worth building; `python -m lab.eval` measures the engine.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TextIO

import torch
from gates import Gates
from methods import Method, Prompt
from model import Model, Recorded
from own_tasks import load_task
from static_heads import HeadProbes

from lab.eval.task import GeneratedTask, Sample
from vllm_pyramid.tools.eval.haystack import Tokens

# What a row is about: one with all of these equal is not measured again.
KEY = ("model", "seed", "task", "length", "index", "method", "definition", "budget")
FIGURES = ("right", "nats", "agreement", "divergence")
ROWS = 512  # that go through the model's matrices together: methods times tokens
WHOLE = "100%"  # the budget of a method that evicts nothing


@dataclass(frozen=True, order=True)
class Place:
    """The place of a prompt: sample `index` of a task's, at one length and seed."""

    index: int
    seed: int
    length: int
    task: str


@dataclass
class Study:
    """A model, and the methods and budgets that are wanted of each prompt."""

    model: Model
    tokens: Tokens
    name: str
    known: set[tuple[str, ...]] = field(default_factory=set)
    gates: Gates | None = None

    def read(self, path: Path) -> None:
        """Leave out what a file of rows has. A last line that was cut off is removed from it.

        Raises:
            ValueError: it has other columns, or rows of another model.
        """
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1] or f"{','.join((*KEY, *FIGURES))}\n".encode()
        reader = csv.DictReader(whole.decode().splitlines())
        if tuple(reader.fieldnames or ()) != (*KEY, *FIGURES):
            raise ValueError(f"{path} has the columns {reader.fieldnames}, not {[*KEY, *FIGURES]}")
        rows = list(reader)
        if others := {row["model"] for row in rows} - {self.name}:
            raise ValueError(f"{path} has rows of {sorted(others)}: take a folder for each model")
        if whole != data:
            path.write_bytes(whole)
        self.known |= {tuple(row[key] for key in KEY) for row in rows}

    @cached_property
    def probes(self) -> HeadProbes:
        """Return what decides on the heads of static masks."""
        return HeadProbes(self.model, self.tokens)

    def _messages(self, ids: list[int]) -> list[int]:
        """Return where a chat's messages begin, if the template is that of ChatML."""
        begin = self.tokens.encode("<|im_start|>")
        return [place for place, token in enumerate(ids) if begin == [token]]

    def _template(self, ids: list[int], messages: list[int]) -> list[int]:
        """Return the places of the system prompt and of all that ChatML's template writes.

        They are what `--kv-keep template` keeps of such a chat.
        """
        if not messages:
            return []
        head = len(self.tokens.encode("<|im_start|>user\n"))
        (end,) = self.tokens.encode("<|im_end|>")
        places = {place + i for place in messages for i in range(head)}
        places |= {place + i for place, token in enumerate(ids) if token == end for i in range(2)}
        system = self.tokens.encode("<|im_start|>system\n")
        if ids[messages[0] :][: len(system)] == system:
            places |= set(range(messages[0], messages[1]))
        return sorted(places)

    def _key(self, place: Place, method: Method, budget: str) -> tuple[str, ...]:
        return (*self._about(place), method.label, method.definition, budget)

    def _about(self, place: Place) -> tuple[str, ...]:
        about = (self.name, place.seed, place.task, place.length, place.index)
        return tuple(map(str, about))

    def misses_gates(self, place: Place) -> bool:
        """Return whether the gates of a prompt are wanted and not known."""
        return self.gates is not None and self._about(place) not in self.gates.known

    def missing(
        self, place: Place, methods: Iterable[Method], budgets: Iterable[str]
    ) -> Iterator[tuple[Method, str]]:
        """Yield what is not known of a prompt."""
        for method in methods:
            for budget in budgets if method.evicts else (WHOLE,):
                if self._key(place, method, budget) not in self.known:
                    yield method, budget

    def measure(
        self, place: Place, wanted: Iterable[tuple[Method, str]], out: TextIO, gates: bool = False
    ) -> None:
        """Append a row for each method and budget; and the gates', if they are wanted."""
        rows = csv.writer(out, lineterminator="\n")
        task = load_task(place.task)
        assert isinstance(task, GeneratedTask)
        sample = task.numbered(self.tokens, place.length, place.index, place.seed)
        ids = self.tokens.encode(sample.prompt)
        recorded, logits = self.model.prefill(ids)
        following, asked = self._continuation(sample, ids, recorded, logits)
        skip = asked or 1  # the first token comes from the prefill
        messages = self._messages(ids)
        template = self._template(ids, messages)
        prompt = Prompt(self.model, ids, recorded, self.probes, messages, asked, template)
        (full,) = self.model.continued(recorded, following)
        left = iter(wanted)
        while some := list(islice(left, max(1, ROWS // len(following)))):
            ways = [method.way(prompt, budget) for method, budget in some]
            got = self.model.continued(recorded, following, ways)
            for (method, budget), its in zip(some, got, strict=True):
                key = self._key(place, method, budget)
                rows.writerow([*key, *measured(full, its, following, skip)])
                out.flush()
                self.known.add(key)
        if gates and self.gates is not None:
            self.gates.measure(self._about(place), prompt, following, skip, full)

    def _continuation(
        self, sample: Sample, prompt: list[int], recorded: Recorded, logits: torch.Tensor
    ) -> tuple[list[int], int]:
        """Return the tokens that follow the prompt, and how many of them lead to the answer."""
        if sample.follows_full:
            return self.model.greedy(recorded, logits, sample.max_tokens), 0
        before = sample.prompt + sample.lead
        space = "" if sample.forced or before.endswith((" ", "\n")) else " "
        ids = self.tokens.encode(before + space + sample.answers[0])
        begun = self.tokens.encode(before)
        assert ids[: len(begun)] == begun and begun[: len(prompt)] == prompt, before[-50:]
        return ids[len(prompt) :], len(begun) - len(prompt)


def measured(full: torch.Tensor, logits: torch.Tensor, ids: list[int], skip: int) -> list[float]:
    """Return `FIGURES` of a method's logits `[n, V]`, given those of the whole cache.

    Row i says what follows `ids[i]`.
    """
    wanted = torch.tensor(ids[skip:])
    mine, theirs = (x[skip - 1 : -1].log_softmax(dim=-1) for x in (logits, full))
    figures = (
        (mine.argmax(-1) == wanted).float().prod(),
        -mine.gather(1, wanted[:, None]).mean(),
        (mine.argmax(-1) == theirs.argmax(-1)).float().mean(),
        (theirs.exp() * (theirs - mine)).sum(-1).mean(),
    )
    return [round(float(value), 5) for value in figures]
