# SPDX-License-Identifier: Apache-2.0
"""A Transformers model whose KV heads can be probed, and made to stream as in DuoAttention.

Only the model's attention function is replaced, by PyTorch's own attention.

Shape legend: L layers, T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from lab.heads.probe import LENGTH, Repeated, mean_attention, of_kv_heads
from lab.heads.scores import HeadScores
from vllm_pyramid.step.rotary import Rotary

_NAME = "vllm_pyramid_heads"
_OTHER = ("sliding_window", "softcap", "s_aux")  # what Transformers hands to attention functions
_PLAIN = (
    "heads are probed in models whose layers all have full attention with KV heads, without "
    "sliding windows, capped logits, learned sinks or latent vectors; this model has others"
)
_NO_ROTARY = (
    "queries are measured without rotary embedding, and this model's layers do not all have the "
    "same one that can be undone (python -m lab.heads: take --probe echo)"
)
_CHUNK = 1024  # queries of streaming heads at a time
_NEAR = 1e-3  # relative distance of two equal queries after their rotary embedding is undone
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def whole_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return causal attention `[1, H, T, D]` of `[1, H, T, D]` queries to `[1, G, T, D]` keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def streaming_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: int, recent: int
) -> torch.Tensor:
    """Return `[1, H, T, D]`: a query sees the first `sinks` keys, and `recent` up to its own.

    Shapes are those of `whole_attention`.
    """
    found, total = [], q.shape[2]
    for start in range(0, total, _CHUNK):
        places = torch.arange(start, min(start + _CHUNK, total), device=q.device)
        end = start + len(places)
        first = torch.arange(min(sinks, end), device=q.device)
        near = torch.arange(max(len(first), start - recent + 1), end, device=q.device)
        keys = torch.cat([first, near])
        gap = places[:, None] - keys
        seen = (gap >= 0) & ((keys < sinks) | (gap < recent))
        part = q[:, :, start:end], k[:, :, keys], v[:, :, keys]
        found.append(F.scaled_dot_product_attention(*part, seen, scale=scale, enable_gqa=True))
    return torch.cat(found, dim=2)


class HeadModel:
    """A causal language model of Transformers, on a GPU if there is one, else in float32.

    ValueError: it cannot be loaded, or its layers do not all have plain attention. Some kinds show
    when the model runs first.

    Attributes:
        attentions: its attention modules, `[L]`.
        longest: positions of the model.
    """

    def __init__(self, name: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(_NAME, _attention)
        on_gpu = torch.cuda.is_available()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                name,
                dtype="auto" if on_gpu else torch.float32,  # many CPUs are slow at 16 bits
                attn_implementation=_NAME,
            )
        except (OSError, ValueError) as error:
            line = str(error).strip().splitlines()[0]
            raise ValueError(f"Transformers cannot load the model {name}: {line}") from error
        self.model: Any = model.to("cuda" if on_gpu else "cpu").eval()
        own = [module for module in self.model.modules() if hasattr(module, "num_key_value_groups")]
        config = self.model.config
        latent = getattr(config, "kv_lora_rank", None) is not None
        if len(own) != getattr(config, "num_hidden_layers", None) or latent:
            raise ValueError(_PLAIN)
        for module in own:
            module.heads = self
        self._attend: Attend | None = None
        self.attentions = own
        self.layers = len(own)
        self.kv_heads, self.heads = int(config.num_key_value_heads), int(config.num_attention_heads)
        self.vocabulary = int(config.vocab_size)
        self.longest = int(config.max_position_embeddings)

    def ordinary_ids(self) -> range:
        """Return the middle half of the vocabulary; special tokens stand at either end."""
        return range(self.vocabulary // 4, self.vocabulary * 3 // 4)

    def check_room(self, probe: Repeated) -> None:
        """Raise ValueError if the model cannot read the repeated tokens."""
        tokens = probe.period * probe.copies
        if tokens > self.longest or probe.period > len(self.ordinary_ids()):
            raise ValueError(
                f"the probe's {probe.copies} copies of {probe.period} tokens do not fit into the "
                f"model's {self.longest} positions and {self.vocabulary} token ids"
            )

    def probe(self, probe: Repeated) -> torch.Tensor:
        """Return the larger share of echo and induction of each KV head, `[L, G]` float64."""
        found = torch.zeros(self.layers, self.kv_heads, dtype=torch.float64)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            shares = probe.echo_and_induction(q[0].transpose(0, 1).cpu(), k[0].cpu(), scale)
            found[layer] = of_kv_heads(torch.maximum(*shares), self.kv_heads)
            return whole_attention(q, k, v, scale)

        self.run(probe.tokens(self.ordinary_ids()), attend, 1)
        return found

    def mean_attention(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return how far back the mean query looks in each KV head, `[L, G]` float64.

        The mean over texts, and over the query heads of a KV head as in kvpress.

        Raises:
            ValueError: the model's rotary embedding cannot be undone.
        """
        found = torch.zeros(self.layers, self.kv_heads, dtype=torch.float64)
        rotary = self.rotary(max(LENGTH, *map(len, texts)))

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            areas = mean_attention(q[0].transpose(0, 1).cpu(), k[0].cpu(), rotary, scale)
            found[layer] += areas.unflatten(0, (self.kv_heads, -1)).mean(dim=1)
            return whole_attention(q, k, v, scale)

        for ids in texts:
            self.run(ids, attend, 1)
        return found / len(texts)

    def queries(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the queries of tokens without rotary embedding: `[L, T, H, D]` float32.

        Raises:
            ValueError: the rotary embedding cannot be undone.
        """
        return self._unrotated(ids, self.rotary(len(ids)))

    def _unrotated(self, ids: Sequence[int], rotary: Rotary) -> torch.Tensor:
        found, positions = list[torch.Tensor](), torch.arange(len(ids))

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            found.append(rotary.turn_back(q[0].transpose(0, 1).float().cpu(), positions))
            return whole_attention(q, k, v, scale)

        self.run(ids, attend, 1)
        return torch.stack(found)

    def rotary(self, positions: int) -> Rotary:
        """Return the rotary embedding of all layers, on the CPU; ValueError: they share none."""
        return self._rotary(positions, *self._pairs)

    def _rotary(self, positions: int, halves: bool, spread: bool) -> Rotary:
        modules = self.model.named_modules()
        found = [module for place, module in modules if place.endswith("rotary_emb")]
        if len(found) != 1:
            raise ValueError(_NO_ROTARY)
        device = self.model.device
        here = torch.arange(positions, device=device)[None]
        with torch.inference_mode():
            cos, sin = found[0](torch.zeros(1, dtype=torch.float32, device=device), here)
        # Each angle stands there twice: next to each other, or in either half.
        kept = slice(0, None, 2) if spread else slice(0, cos.shape[-1] // 2)
        table = torch.cat([cos[0, :, kept], sin[0, :, kept]], dim=-1)
        return Rotary(table.float().cpu(), halves)

    @cached_property
    def _pairs(self) -> tuple[bool, bool]:
        """Whether channels of two halves are pairs, and whether equal angles are neighbours.

        A repeated token has the same queries at all positions when the embedding is undone.
        """
        ids = [self.ordinary_ids()[0]] * 16
        for halves, spread in product((True, False), repeat=2):
            queries = self._unrotated(ids, self._rotary(len(ids), halves, spread))
            apart = (queries - queries[:, :1]).norm(dim=-1) / queries.norm(dim=-1)
            if float(apart.max()) < _NEAR:
                return halves, spread
        raise ValueError(_NO_ROTARY)

    def logits(
        self, ids: Sequence[int], last: int, mask: torch.Tensor | None, scores: HeadScores
    ) -> torch.Tensor:
        """Return the logits of the last tokens, `[last, vocabulary]` float32.

        Args:
            mask: `[L, G]` bool, which heads see everything; the others stream. None: all do.
            scores: how many tokens a streaming head sees.
        """

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            if mask is None:
                return whole_attention(q, k, v, scale)
            whole = mask[layer].to(q.device)
            grouped = q.unflatten(1, (self.kv_heads, -1))
            out = torch.empty_like(grouped)
            for heads, is_whole in ((whole, True), (~whole, False)):
                if not heads.any():
                    continue
                part = grouped[:, heads].flatten(1, 2), k[:, heads], v[:, heads], scale
                if is_whole:
                    got = whole_attention(*part)
                else:
                    got = streaming_attention(*part, scores.sinks, scores.recent)
                out[:, heads] = got.unflatten(1, (int(heads.sum()), -1))
            return out.flatten(1, 2)

        return self.run(ids, attend, last)

    @torch.inference_mode()
    def run(self, ids: Sequence[int], attend: Attend, last: int) -> torch.Tensor:
        """Run the model with `attend` in all layers; return `[last, vocabulary]` float32 logits."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        self._attend = attend
        try:
            output = self.model(input_ids=tokens, use_cache=False, logits_to_keep=last)
        finally:
            self._attend = None
        logits: torch.Tensor = output.logits[0].float().cpu()
        return logits


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the probed model's present run says: `[1, H or G, T, D]` to `[1, T, H, D]`."""
    if any(more.get(name) is not None for name in _OTHER):
        raise ValueError(_PLAIN)
    attend: Attend = module.heads._attend
    out = attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None
