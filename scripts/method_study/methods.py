# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt a method keeps, from the prompt's recorded queries, keys and values.

A method is written as a policy with arguments, as `vllm-pyramid eval --policies` has it, and scored
by the project's own parts in PyTorch. The argument `"heads": 0.2` is AdaKV, which the engine does
not have: a layer's heads share its tokens by their scores, 0.2 of them equally. The policy
`kvpress` with {"press": "snapkv_press.SnapKVPress", ...} is a press of kvpress with its own code
and defaults (`presses.py`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from model import Kept, Model, Recorded

from vllm_pyramid.kernels.recall import WindowStatistics, window_statistics
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.scorer_inputs import ScorerInputs

BLOCK = 16


@dataclass
class Prompt:
    """A prompt and what was recorded of it; scores are computed once."""

    model: Model
    ids: list[int]
    recorded: Recorded
    _memory: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.ids)

    def view(self, layer: int, policy: Policy) -> ScorerInputs:
        """Return what a scorer of the project gets."""
        cache, blocks = self.recorded.layers[layer], -(-self.tokens // BLOCK)
        padded = F.pad(
            torch.stack([cache.keys, cache.values]), (0, 0, 0, blocks * BLOCK - self.tokens)
        )
        pages = padded.unflatten(2, (blocks, BLOCK)).transpose(1, 2)
        return ScorerInputs(
            num_tokens=self.tokens,
            window=policy.window,
            sinks=policy.sinks,
            num_query_heads=self.model.heads,
            num_kv_heads=self.model.kv_heads,
            head_size=self.model.size,
            first_kv_head=0,
            layer=layer,
            num_layers=self.model.layers,
            scale=self.model.scale,
            soft_cap=0.0,
            queries=cache.queries[-max(policy.window, 1) :],
            key_cache=pages[0],
            value_cache=pages[1],
            block_row=torch.arange(blocks, dtype=torch.int32),
            last_position=self.tokens - 1,
            prompt_len=self.tokens,
            rotary=self.model.rotary,
            knows_rotary=True,
            asks_ranks=policy.scorer.asks_ranks,
        )

    def scores(self, policy: Policy) -> list[torch.Tensor]:
        """Return `[G, T]` of every layer."""
        key = (policy.scorer, policy.window, policy.sinks)
        if key not in self._memory:
            layers = range(self.model.layers)
            self._memory[key] = [policy.scorer.score(self.view(i, policy)) for i in layers]
        return self._memory[key]

    def statistics(self, layer: int, policy: Policy) -> WindowStatistics | None:
        """Return those of the window's attention, for allocators that need them."""
        if not policy.allocator.needs_statistics:
            return None
        cache, window = self.recorded.layers[layer], policy.window
        queries = cache.queries[-window:].unflatten(1, (self.model.kv_heads, -1))
        logits = torch.einsum("wgqd,gtd->gqwt", queries, cache.keys) * self.model.scale
        own = torch.arange(self.tokens - window, self.tokens)[:, None]
        logits.masked_fill_(torch.arange(self.tokens) > own, -torch.inf)
        mass = logits.softmax(dim=-1).mean(dim=1).sum(dim=1)[None, :, : self.tokens - window]
        return window_statistics(mass, torch.tensor([self.tokens]), window=window)


@dataclass(frozen=True, eq=False)
class Method:
    """A policy, and what of it only the study has; equal to itself alone."""

    label: str
    preset: str
    args: dict[str, Any]
    heads: float | None = None
    press: str | None = None

    @classmethod
    def parse(cls, label: str, preset: str, args: dict[str, Any]) -> Method:
        """Take the study's own keys out of the arguments."""
        own = {key: args[key] for key in ("heads", "press") if key in args}
        rest = {key: value for key, value in args.items() if key not in own}
        if preset == "kvpress" and "press" not in own:
            raise ValueError(f"the method {label!r} names no press of kvpress")
        return cls(label, preset, rest, **own)

    @property
    def evicts(self) -> bool:
        """Return whether budgets mean anything."""
        return self.press is not None or self.policy.evicts

    @cached_property
    def policy(self) -> Policy:
        """Return the policy, whose budget is not the one that is measured."""
        return load_policy(self.preset, None, self.args)

    @property
    def definition(self) -> str:
        """Return a short name for all that decides what is kept, but for the budget."""
        what = f"{self.press}{self.args}" if self.press else self.policy.as_data()
        return f"{zlib.crc32(f'{what}{self.heads}None'.encode()):08x}"

    def kept(self, prompt: Prompt, budget: str) -> Kept | None:
        """Return what stays at a budget; None for everything."""
        if not self.evicts:
            return None
        if self.press is not None:
            from presses import kept_by

            # As many tokens as a policy with equal layers holds, its last block filled.
            plan = load_policy("snapkv", budget).plan(prompt.tokens, prompt.model.layers, BLOCK)
            keep = prompt.tokens - int(plan.end.skip[0])
            return kept_by(self.press, self.args, self.heads, prompt.model, prompt.recorded, keep)
        policy = load_policy(self.preset, budget, self.args)
        window, sinks, tokens = policy.window, policy.sinks, prompt.tokens
        scores = [layer.clone() for layer in prompt.scores(policy)]
        plan = policy.plan(tokens, prompt.model.layers, BLOCK)
        if plan.is_deferred:
            context = torch.stack(scores)[:, None, :, : tokens - window]
            statistics = [prompt.statistics(layer, policy) for layer in range(len(context))]
            evidence = torch.stack(list(map(policy.allocator.evidence, context, statistics)))[:, 0]
            measured = policy.allocator.measures(
                evidence, plan.mean, plan.capacity, sinks, plan.min_mean
            )
            lengths = policy.allocator.allocate(measured.double().numpy(), plan.mean, plan.capacity)
            plan = plan.resolved((plan.floor + lengths).tolist())
        held = tokens - plan.end.skip
        for layer in scores:
            layer[:, :sinks] = layer[:, tokens - window :] = torch.inf
        if self.heads is None:
            return [
                list(layer.topk(int(keep)).indices.sort().values)
                for layer, keep in zip(scores, held, strict=True)
            ]
        return [
            _by_heads(layer, int(keep), max(int(keep * self.heads), window + sinks))
            for layer, keep in zip(scores, held, strict=True)
        ]


def load_methods(path: Path) -> dict[str, Method]:
    """Return all methods of a YAML file, `label: [policy, {arguments}]`, by their labels.

    Raises:
        ValueError: a policy or an argument is wrong.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    methods = {label: Method.parse(label, *entry) for label, entry in raw.items()}
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
