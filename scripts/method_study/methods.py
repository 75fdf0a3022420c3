# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt a method keeps, from the prompt's recorded queries, keys and values.

A method is written as a policy with arguments, as `vllm-pyramid eval --policies` has it, and scored
by the project's own parts in PyTorch. Further keys of the arguments are for what the engine does
not have:

    "heads": 0.2     AdaKV: a layer's heads share its tokens by their scores, 0.2 of them equally
    "score": "all"   in place of the policy's scorer: "reconstruction" (KVzip), "all" (H2O)

The policy `kvpress` with {"press": "snapkv_press.SnapKVPress", ...} is a press of kvpress with its
own code and defaults (`presses.py`).
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
from llama import LayerCache, Llama

from vllm_pyramid.kernels.recall import WindowStatistics, window_statistics
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.scorer_inputs import ScorerInputs

BLOCK = 16
Kept = list[list[torch.Tensor]]  # [layer][KV head] ascending places


@dataclass
class Prompt:
    """A prompt and all that was recorded of it; scores are worked out once."""

    model: Llama
    ids: list[int]
    caches: list[LayerCache]
    repeat: list[int] = field(default_factory=list)
    _memory: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.ids)

    def view(self, layer: int, policy: Policy) -> ScorerInputs:
        """What a scorer of the project sees."""
        cache, blocks = self.caches[layer], -(-self.tokens // BLOCK)
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
            scale=self.model.size**-0.5,
            soft_cap=0.0,
            queries=cache.queries[-max(policy.window, 1) :],
            key_cache=pages[0],
            value_cache=pages[1],
            block_row=torch.arange(blocks, dtype=torch.int32),
            last_position=self.tokens - 1,
            prompt_len=self.tokens,
            rotary=self.model.rotary,
            knows_rotary=True,
        )

    def scores(self, method: Method) -> list[torch.Tensor]:
        """`[G, T]` of every layer."""
        policy = method.policy
        key = method.score or (policy.scorer, policy.window, policy.sinks)
        if key not in self._memory:
            layers = range(self.model.layers)
            if method.score == "reconstruction":
                made = self._reconstruction()
            elif method.score == "all":
                made = [self._all_attention(layer) for layer in layers]
            else:
                made = [policy.scorer.score(self.view(layer, policy)) for layer in layers]
            self._memory[key] = made
        return self._memory[key]

    def statistics(self, layer: int, policy: Policy) -> WindowStatistics | None:
        """Of the window's attention, for allocators that ask for them."""
        if not policy.allocator.needs_statistics:
            return None
        cache, window = self.caches[layer], policy.window
        queries = cache.queries[-window:].unflatten(1, (self.model.kv_heads, -1))
        logits = torch.einsum("wgqd,gtd->gqwt", queries, cache.keys) * self.model.size**-0.5
        own = torch.arange(self.tokens - window, self.tokens)[:, None]
        logits.masked_fill_(torch.arange(self.tokens) > own, -torch.inf)
        mass = logits.softmax(dim=-1).mean(dim=1).sum(dim=1)[None, :, : self.tokens - window]
        return window_statistics(mass, torch.tensor([self.tokens]), window=window)

    def _all_attention(self, layer: int) -> torch.Tensor:
        """H2O: the attention of all of the prompt's queries to a key, summed over the group."""
        cache = self.caches[layer]
        total = torch.zeros_like(cache.keys[..., 0])
        for start in range(0, self.tokens, 256):
            queries = cache.queries[start : start + 256].unflatten(1, (self.model.kv_heads, -1))
            logits = torch.einsum("wgqd,gtd->gqwt", queries, cache.keys) * self.model.size**-0.5
            own = torch.arange(start, start + queries.shape[0])[:, None]
            logits.masked_fill_(torch.arange(self.tokens) > own, -torch.inf)
            total += logits.softmax(dim=-1).mean(dim=1).sum(dim=1)
        return total

    def _reconstruction(self) -> list[torch.Tensor]:
        """KVzip: the most attention that any query pays a key while the prompt is repeated."""
        found = [torch.zeros_like(cache.keys[..., 0]) for cache in self.caches]
        for start in range(0, self.tokens, 2048):
            said = [*self.repeat, *self.ids[start : start + 2048]]
            queries: list[torch.Tensor] = []
            own_keys: list[torch.Tensor] = []
            self.model.continued(self.caches, said, queries=queries, keys=own_keys)
            causal = torch.ones(len(said), len(said), dtype=torch.bool).tril()
            for layer, cache in enumerate(self.caches):
                grouped = queries[layer].unflatten(1, (self.model.kv_heads, -1))
                for first in range(0, len(said), 512):
                    part = grouped[first : first + 512]
                    scale = self.model.size**-0.5
                    old = torch.einsum("wgqd,gtd->gqwt", part, cache.keys) * scale
                    new = torch.einsum("wgqd,gtd->gqwt", part, own_keys[layer]) * scale
                    new.masked_fill_(~causal[first : first + 512], -torch.inf)
                    weights = old.exp_().div_(
                        old.sum(-1, keepdim=True) + new.exp_().sum(-1, keepdim=True)
                    )
                    found[layer] = found[layer].maximum(weights.amax(dim=(1, 2)))
        return found


@dataclass(frozen=True, eq=False)
class Method:
    """A policy, and what of it only the study has; itself alone is equal."""

    label: str
    preset: str
    args: dict[str, Any]
    heads: float | None = None
    score: str | None = None
    press: str | None = None

    @classmethod
    def parse(cls, label: str, preset: str, args: dict[str, Any]) -> Method:
        """Take the study's own keys out of the arguments."""
        own = {key: args[key] for key in ("heads", "score", "press") if key in args}
        rest = {key: value for key, value in args.items() if key not in own}
        if preset == "kvpress" and "press" not in own:
            raise ValueError(f"the method {label!r} names no press of kvpress")
        return cls(label, preset, rest, **own)

    @property
    def evicts(self) -> bool:
        """Whether budgets mean anything."""
        return self.press is not None or self.policy.evicts

    @cached_property
    def policy(self) -> Policy:
        """At any budget."""
        return load_policy(self.preset, None, self.args)

    @property
    def definition(self) -> str:
        """Short for all that decides what is kept, but for the budget."""
        what = f"{self.press}{self.args}" if self.press else self.policy.as_data()
        return f"{zlib.crc32(f'{what}{self.heads}{self.score}'.encode()):08x}"

    def kept(self, prompt: Prompt, budget: str) -> Kept | None:
        """What stays at a budget; None: everything."""
        if not self.evicts:
            return None
        if self.press is not None:
            from presses import kept_by

            # As many tokens as a policy with equal layers holds, its last block filled.
            plan = load_policy("snapkv", budget).plan(prompt.tokens, prompt.model.layers, BLOCK)
            keep = prompt.tokens - int(plan.end.skip[0])
            return kept_by(self.press, self.args, self.heads, prompt.model, prompt.caches, keep)
        policy = load_policy(self.preset, budget, self.args)
        window, sinks, tokens = policy.window, policy.sinks, prompt.tokens
        scores = [layer.clone() for layer in prompt.scores(self)]
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
    """All methods of a YAML file, `label: [policy, {arguments}]`, by their labels.

    Raises:
        ValueError: a policy or an argument is wrong.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    methods = {label: Method.parse(label, *entry) for label, entry in raw.items()}
    for method in methods.values():
        _ = method.evicts
    return methods


def _by_heads(scores: torch.Tensor, keep: int, least: int) -> list[torch.Tensor]:
    """AdaKV: the best `keep` tokens a head of all heads together, each its best `least` first."""
    heads = len(scores)
    safe = scores.scatter(1, scores.topk(least).indices, torch.inf)
    best = safe.flatten().topk(keep * heads).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[best] = True
    return [row.nonzero()[:, 0] for row in mask.unflatten(0, scores.shape)]
