# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt a method keeps, from the prompt's recorded queries, keys and values.

A method is written as a policy with arguments, as `python -m lab.eval --policies` has it, and
scored by the project's own parts in PyTorch. The argument `"heads": 0.2` is AdaKV, which the
engine does not have: a layer's heads share its tokens by their scores, 0.2 of them equally.
The policy `kvpress` with {"press": "snapkv_press.SnapKVPress", ...} is a press of kvpress with its
own code and defaults (`presses.py`). Further arguments that the engine does not have:

- "ends": 0.1 keeps that share of each layer's tokens at either end of the prompt;
- "floor": 32 keeps that many of each message of a chat, the best by their scores;
- "spans": true keeps the system prompt and the template's tokens within the budget
  (`--kv-keep template` keeps them beside it);
- "match": {...} fits biases and values to queries (`matching.py`), "ridge": 1.0 values alone
  (`gates_ridge.py`);
- "static": "echo" lets some heads keep everything and the others stream (`static_heads.py`).

Where a policy selects pages (`attend`), the budget is what is read, and "keep" what is kept;
"asks": true lets later questions attend to everything, as prompts do.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from gates_ridge import Ridged
from matching import Match, Matched, References, references
from model import Kept, Model, Recorded, Way, way_of
from selected import Selected
from static_heads import PROBES, HeadProbes

from vllm_pyramid.methods.pages import SelectPages
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.scorer_inputs import ScorerInputs

BLOCK = 16
# Arguments of the study alone.
OWN = ("heads", "press", "keep", "static", "ends", "floor", "spans", "asks", "match", "ridge")


@dataclass
class Prompt:
    """A prompt and what was recorded of it; scores are computed once.

    Attributes:
        messages: where the messages of a chat begin; none of a plain text.
        asked: tokens behind it that lead to the answer, a later question's among them.
        template: places of a chat's system prompt, and of what its template writes.
    """

    model: Model
    ids: list[int]
    recorded: Recorded
    probes: HeadProbes
    messages: list[int]
    asked: int
    template: list[int] = field(default_factory=list)
    _memory: dict[Any, list[torch.Tensor]] = field(default_factory=dict)
    _references: dict[str, list[References]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.ids)

    def view(self, layer: int, policy: Policy) -> ScorerInputs:
        """Return what a scorer of the project gets."""
        cache = self.recorded.layers[layer]
        return ScorerInputs.of_tensors(
            cache.queries[-max(policy.window, 1) :],
            cache.keys,
            cache.values,
            window=policy.window,
            sinks=policy.sinks,
            layer=layer,
            num_layers=self.model.layers,
            scale=self.model.scale,
            rotary=self.model.rotary,
            knows_rotary=True,
            asks_ranks=policy.scorer.asks_ranks,
        )

    def references(self, match: Match) -> list[References]:
        """Return the queries that biases and values are fitted to, of every layer."""
        if match.queries not in self._references:
            found = references(self.model, self.ids, self.recorded, match)
            self._references[match.queries] = found
        return self._references[match.queries]

    def scores(self, policy: Policy) -> list[torch.Tensor]:
        """Return `[G, T]` of every layer."""
        key = (policy.scorer, policy.window, policy.sinks)
        if key not in self._memory:
            layers = range(self.model.layers)
            self._memory[key] = [policy.scorer.score(self.view(i, policy)) for i in layers]
        return self._memory[key]


@dataclass(frozen=True, eq=False)
class Method:
    """A policy, and what of it only the study has; equal to itself alone."""

    label: str
    preset: str
    args: dict[str, Any]
    heads: float | None = None
    press: str | None = None
    keep: str | None = None
    static: str | None = None
    ends: float | None = None
    floor: int | None = None
    spans: bool | None = None
    asks: bool | None = None
    match: Match | None = None
    ridge: float | None = None

    @classmethod
    def parse(cls, label: str, preset: str, args: dict[str, Any]) -> Method:
        """Take the study's own keys out of the arguments."""
        own = {key: args[key] for key in OWN if key in args}
        rest = {key: value for key, value in args.items() if key not in own}
        if "match" in own:
            own["match"] = Match(**own["match"])
        if preset == "kvpress" and "press" not in own:
            raise ValueError(f"the method {label!r} names no press of kvpress")
        if own.get("static") not in (None, *PROBES):
            raise ValueError(f"the method {label!r} names no probe: one of {', '.join(PROBES)}")
        return cls(label, preset, rest, **own)

    @property
    def evicts(self) -> bool:
        """Return whether budgets mean anything."""
        if self.press is not None or self.static is not None:
            return True
        return self.policy.evicts or self.selects

    @property
    def selects(self) -> bool:
        """Return whether answers read some pages of what is kept."""
        return self.press is None and self.policy.attend.selects

    @cached_property
    def policy(self) -> Policy:
        """Return the policy, whose budget is not the one that is measured."""
        return load_policy(self.preset, self.keep, self.args)

    @property
    def definition(self) -> str:
        """Return a short name for all that decides what is kept, but for the budget."""
        what = f"{self.press}{self.args}" if self.press else self.policy.as_data()
        names = ("static", "ends", "floor", "spans", "asks", "match", "ridge")
        own = {key: getattr(self, key) for key in names}
        more = "".join(f"{key}{value}" for key, value in own.items() if value is not None)
        return f"{zlib.crc32(f'{what}{self.heads}None{more}'.encode()):08x}"

    def way(self, prompt: Prompt, budget: str) -> Way:
        """Return how the tokens behind a prompt attend at a budget."""
        if not self.selects:
            kept = self.kept(prompt, budget)
            if self.match is not None and kept is not None:
                found = prompt.references(self.match)
                window = self.policy.window
                return Matched(kept, self.match, found, prompt.recorded.layers, window)
            if self.ridge is not None and kept is not None:
                return Ridged(kept, self.policy.window, self.ridge)
            return way_of(kept)
        policy = load_policy(self.preset, self.keep, {**self.args, "attend.budget": budget})
        assert isinstance(policy.attend, SelectPages)
        pages = policy.attend.pages(prompt.tokens, prompt.model.layers, BLOCK)
        kept = self._places(policy, prompt) if policy.evicts else None
        return Selected(policy.attend, pages, kept, prompt.asked if self.asks else 0)

    def kept(self, prompt: Prompt, budget: str) -> Kept | None:
        """Return what stays at a budget; None for everything."""
        if not self.evicts:
            return None
        if self.press is None and self.static is None:
            return self._places(load_policy(self.preset, budget, self.args), prompt)
        # As many tokens as a policy with equal layers holds, its last block filled.
        plan = load_policy("snapkv", budget).plan(prompt.tokens, prompt.model.layers, BLOCK)
        keep = prompt.tokens - int(plan.end.skip[0])
        if self.static is not None:
            return prompt.probes.kept(self.static, prompt.ids, keep)
        from presses import kept_by

        assert self.press is not None
        return kept_by(self.press, self.args, self.heads, prompt.model, prompt.recorded, keep)

    def _places(self, policy: Policy, prompt: Prompt) -> Kept:
        """Return what a policy keeps, by the scores of its scorer."""
        window, sinks, tokens = policy.window, policy.sinks, prompt.tokens
        scores = [layer.clone() for layer in prompt.scores(policy)]
        plan = policy.plan(tokens, prompt.model.layers, BLOCK)
        if plan.is_deferred:
            context = torch.stack(scores)[:, None, :, : tokens - window]
            evidence = torch.stack(list(map(policy.allocator.evidence, context)))[:, 0]
            measured = policy.allocator.measures(
                evidence, plan.mean, plan.capacity, sinks, plan.min_mean
            )
            lengths = policy.allocator.allocate(
                measured.double().cpu().numpy(), plan.mean, plan.capacity
            )
            plan = plan.resolved((plan.floor + lengths).tolist())
        held = tokens - plan.end.skip
        for layer, keep in zip(scores, held, strict=True):
            end = 0 if self.ends is None else round(self.ends * int(keep))
            layer[:, : max(sinks, end)] = layer[:, tokens - max(window, end) :] = torch.inf
            if self.floor is not None:
                _raise_floor(layer, prompt.messages, self.floor)
            if self.spans:
                layer[:, prompt.template] = torch.inf
                if (stay := int(layer[0].isposinf().sum())) > keep:
                    raise ValueError(f"{self.label}: {stay} tokens stay, and a layer keeps {keep}")
        if self.heads is None:
            return [
                list(layer.topk(int(keep)).indices.sort().values)
                for layer, keep in zip(scores, held, strict=True)
            ]
        return [
            _by_heads(layer, int(keep), max(int(keep * self.heads), window + sinks))
            for layer, keep in zip(scores, held, strict=True)
        ]


def _raise_floor(scores: torch.Tensor, messages: list[int], floor: int) -> None:
    """Make the best `floor` tokens of each message stay in any case."""
    for begin, end in pairwise([*messages, scores.shape[1]]):
        own = scores[:, begin:end]
        own.scatter_(1, own.topk(min(floor, end - begin)).indices, torch.inf)


def load_methods(path: Path) -> dict[str, Method]:
    """Return all methods of a YAML file, `label: [policy, {arguments}]`, by their labels.

    A policy that is a file is named from the folder of the YAML file.

    Raises:
        ValueError: a policy or an argument is wrong.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    methods = {
        label: Method.parse(
            label, str(path.parent / preset) if preset.endswith(".yaml") else preset, args
        )
        for label, (preset, args) in raw.items()
    }
    for method in methods.values():
        _ = method.evicts
    return methods


def _by_heads(scores: torch.Tensor, keep: int, least: int) -> list[torch.Tensor]:
    """Return AdaKV's choice: the best `keep` per head over all heads, each its `least` first."""
    heads = len(scores)
    safe = scores.scatter(1, scores.topk(least).indices, torch.inf)
    best = safe.flatten().topk(keep * heads).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[best] = True
    return [row.nonzero()[:, 0] for row in mask.unflatten(0, scores.shape)]
