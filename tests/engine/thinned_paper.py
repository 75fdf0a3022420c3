# SPDX-License-Identifier: Apache-2.0
"""PyramidInfer once more, from its formulas and sharing no code with the package.

The weights and modules are Transformers' in float32; the loop over the layers, the attention, the
cache and the choice of tokens are written here. A prompt is processed piece by piece, each layer
computing the tokens that the one below has kept, and generation goes on over what the layers hold.

Shape legend: T tokens that a layer computes, C tokens in its cache, H query heads, G KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Settings:
    """The method's parameters, and the block size where whole blocks are given up (else 1)."""

    decay_ratio: float
    interval: int
    min_context: int
    recent_ratio: float
    piece_tokens: int
    distance_weight: float = 1.2
    sinks: int = 4
    linear: bool = False
    unit: int = 1
    gen_window: int = 64
    gen_interval: int = 0  # 0: what is generated stays
    gen_compress_ratio: float = 0.9
    gen_decay_ratio: float = 0.1

    def generated_share(self, layer: int, layers: int) -> float:
        """Of the generated tokens that have left the window, what a layer keeps."""
        falling = (math.cos(math.pi * layer / layers) + 1) / 2
        decay = self.gen_decay_ratio + (1 - self.gen_decay_ratio) * falling
        return self.gen_compress_ratio * decay

    def kept(self, tokens: int, layers: int) -> list[int]:
        """Tokens that each layer holds of a piece."""
        recent = max(1, int(tokens * self.recent_ratio))
        context = tokens - recent
        held = []
        for layer in range(layers):
            ratio = (math.cos(math.pi * layer / layers) + 1) / 2
            if self.linear:
                ratio = 1 - layer / layers
            ratio = (1 - self.decay_ratio) * ratio + self.decay_ratio
            if layer % self.interval == 0 and context > self.min_context:
                context = max(self.min_context, int(context * ratio))
            given = (tokens - recent - context) // self.unit * self.unit
            held.append(tokens - given)
        return held


@dataclass
class Run:
    """What came of a prompt.

    Attributes:
        kept: a layer, the positions it holds of the prompt. rows: a layer, the tokens it computed.
        thinned: by tokens computed, the same at evictions during generation.
        closest: the smallest relative distance of a score that stayed from one that did not there.
        tokens: generated. logprobs: of each generated token. ties: positions decided by near ties.
    """

    kept: list[list[int]]
    rows: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ties: int = 0
    thinned: dict[int, list[list[int]]] = field(default_factory=dict)
    closest: float = math.inf


class Generated:
    """What a layer holds of the generated tokens, and how its groups are thinned."""

    def __init__(self, settings: Settings, layer: int, layers: int) -> None:
        self.settings, self.share = settings, settings.generated_share(layer, layers)
        self.count = 0  # generated so far
        self.held: list[int] = []  # numbers of generated tokens, 0 the first
        self.given: list[dict[int, float]] = []  # by each query, to each of them
        self.losers: list[int] = []  # still held

    def add(self, probs: torch.Tensor) -> None:
        """One more token, whose query has paid `probs`, `[H, C + 1]`, itself included."""
        self.held.append(self.count)
        self.count += 1
        mean = probs[:, probs.shape[1] - len(self.held) :].double().mean(dim=0).tolist()
        self.given.append(dict(zip(self.held, mean, strict=True)))

    def thin(self, run: Run) -> list[int]:
        """The places in `held`, as they were, of those that stay."""
        size, window = self.settings.gen_interval, self.settings.gen_window
        left = self.count - window
        stays = list(range(len(self.held)))
        if self.count % size or left <= 0:
            return stays
        score = {
            token: sum(given[token] for given in self.given[-window:]) / window
            for token in range(left - size, left)
        }
        number = int(left * self.share) - int((left - size) * self.share)
        ranked = sorted(score, key=lambda token: -score[token])
        if 0 < number < size:
            best, next_best = score[ranked[number - 1]], score[ranked[number]]
            run.closest = min(run.closest, (best - next_best) / best)
        self.losers += sorted(ranked[number:])
        # Whole blocks leave, the latest of the losers first.
        spare = len(self.losers) % self.settings.unit
        gone, self.losers = set(self.losers[spare:]), self.losers[:spare]
        stays = [place for place, token in enumerate(self.held) if token not in gone]
        self.held = [self.held[place] for place in stays]
        return stays


class ThinnedModel:
    """A model of Transformers in float32, with PyramidInfer's forward pass."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.layers = self.model.model.layers
        self.head_size = self.layers[0].self_attn.head_dim

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        settings: Settings | None,
        theirs: Sequence[torch.Tensor] | None = None,
        near_tie: float = 2e-5,
    ) -> Run:
        """Greedy generation.

        Args:
            settings: None for the whole prompt in every layer.
            theirs: a layer, the positions that another implementation holds. Where it differs from
                this one by scores that are equal up to `near_tie` of their size, this one follows.
        """
        count = len(self.layers)
        run = Run([[] for _ in range(count)], [0] * count)
        caches: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * count
        step = len(prompt) if settings is None else settings.piece_tokens
        for start in range(0, len(prompt), step):
            piece = list(prompt[start : start + step])
            positions = torch.arange(start, start + len(piece))
            hidden = self._forward(piece, positions, caches, run, settings, theirs, near_tie)
        generated = [Generated(settings, i, count) for i in range(count)] if settings else []
        for position in range(len(prompt), len(prompt) + max_tokens):
            logprobs = self.model.lm_head(self.model.model.norm(hidden[-1])).log_softmax(-1)
            token = int(logprobs.argmax())
            run.tokens.append(token)
            run.logprobs.append(float(logprobs[token]))
            hidden = self._forward(
                [token], torch.tensor([position]), caches, run, None, None, 0.0, generated
            )
            if settings is not None and settings.gen_interval:
                self._thin_generated(len(prompt), position + 1, generated, caches, run)
        return run

    @staticmethod
    def _thin_generated(
        n: int, computed: int, generated: list[Generated], caches: list[Any], run: Run
    ) -> None:
        """Drop what leaves the caches once `computed` tokens are in them."""
        for index, of_layer in enumerate(generated):
            before = len(of_layer.held)
            stays = of_layer.thin(run)
            keys, values = caches[index]
            front = keys.shape[1] - before
            places = [*range(front), *(front + place for place in stays)]
            caches[index] = (keys[:, places], values[:, places])
        if (computed - n) % generated[0].settings.gen_interval == 0:
            run.thinned[computed] = [
                kept + [n + token for token in of_layer.held]
                for kept, of_layer in zip(run.kept, generated, strict=True)
            ]

    def _forward(
        self,
        tokens: list[int],
        positions: torch.Tensor,
        caches: list[Any],
        run: Run,
        settings: Settings | None,
        theirs: Sequence[torch.Tensor] | None,
        near_tie: float,
        generated: Sequence[Generated] = (),
    ) -> torch.Tensor:
        hidden = self.model.model.embed_tokens(torch.tensor(tokens))
        held = settings.kept(len(tokens), len(self.layers)) if settings else None
        recent = max(1, int(len(tokens) * settings.recent_ratio)) if settings else 0
        first, last = int(positions[0]), int(positions[-1])
        for index, layer in enumerate(self.layers):
            run.rows[index] += len(hidden)
            out, probs, k, v = self._attend(layer, hidden, positions, caches[index])
            if generated:
                generated[index].add(probs[:, 0])
            hidden = hidden + out
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            stay = torch.arange(len(hidden))
            if held is not None and settings is not None and held[index] < len(hidden):
                context = len(hidden) - recent
                weights = torch.linspace(1.0, settings.distance_weight, recent).double()
                old = probs.shape[2] - len(hidden)
                score = probs[:, context:, old : old + context].double().mean(dim=0)
                score = (weights[:, None] * score).sum(dim=0) / weights.sum()
                if first == 0:
                    score[: settings.sinks] = math.inf
                best = set(score.topk(held[index] - recent).indices.tolist())
                if theirs is not None:
                    best = self._follow(
                        best, theirs[index], positions[:context], score, run, near_tie
                    )
                stay = torch.tensor([*sorted(best), *range(context, len(hidden))])
            elif theirs is not None and settings is not None:
                inside = theirs[index][(theirs[index] >= first) & (theirs[index] <= last)]
                assert inside.tolist() == positions.tolist()
            old_k, old_v = caches[index] if caches[index] is not None else (k[:, :0], v[:, :0])
            caches[index] = (
                torch.cat([old_k, k[:, stay]], dim=1),
                torch.cat([old_v, v[:, stay]], dim=1),
            )
            hidden, positions = hidden[stay], positions[stay]
            if not run.tokens:
                run.kept[index] += positions.tolist()
        return hidden

    @staticmethod
    def _follow(
        best: set[int],
        theirs: torch.Tensor,
        context: torch.Tensor,
        score: torch.Tensor,
        run: Run,
        near_tie: float,
    ) -> set[int]:
        """Their set, once every difference is known to be a near tie."""
        found = set(torch.isin(context, theirs).nonzero()[:, 0].tolist())
        assert len(found) == len(best), (len(found), len(best))
        for mine in best - found:
            for other in found - best:
                gap = float(score[mine] - score[other])
                assert gap <= near_tie * float(score[mine]), (
                    f"keeps row {other} (score {float(score[other])}) instead of {mine} "
                    f"({float(score[mine])})"
                )
        run.ties += len(best - found)
        return found

    def _attend(
        self, layer: Any, hidden: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output `[T, hidden]`, probabilities `[H, T, C + T]`, new K and V `[G, T, D]`."""
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        q, k, v = (
            projection(x).unflatten(1, (-1, self.head_size))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = self.model.model.rotary_emb(x, positions[None])
        q, k = (self._rotate(x.transpose(0, 1), cos[0], sin[0]) for x in (q, k))
        v = v.transpose(0, 1)
        old = 0 if cache is None else cache[0].shape[1]
        keys = k if cache is None else torch.cat([cache[0], k], dim=1)
        values = v if cache is None else torch.cat([cache[1], v], dim=1)
        group = q.shape[0] // k.shape[0]
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        logits = q @ keys.transpose(1, 2) / math.sqrt(self.head_size)
        hidden_keys = torch.ones(logits.shape[1:], dtype=torch.bool).triu(old + 1)
        probs = logits.masked_fill(hidden_keys, -math.inf).softmax(dim=-1)
        out = (probs @ values).transpose(0, 1).flatten(1)
        return attention.o_proj(out), probs, k, v

    @staticmethod
    def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin
