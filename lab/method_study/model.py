# SPDX-License-Identifier: Apache-2.0
"""A Transformers model whose cache can be looked at and cut: float32, one prompt at a time.

The model is Transformers' own (Llama, Qwen2, Gemma 3 and others of their kind); only its attention
function is replaced. Layers with a sliding window keep it and are not looked at: "layers" are those
with full attention, counted from the input side.

Shape legend: T tokens of the prompt, n tokens behind it, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM

from vllm_pyramid.step.rotary import Rotary

_NAME = "recorded"
_CHUNK = 1024  # queries of a sliding layer at a time
_FUTURE = 1024  # positions beyond the model's own that scorers may rotate to

Kept = list[list[torch.Tensor]]  # [layer][KV head] ascending places


@dataclass
class LayerCache:
    """A layer's tensors of a prompt, rotary embedding applied.

    Attributes:
        queries: `[T, H, D]`. keys, values: `[G, T, D]`.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def with_more(self, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
        """Return it with further tokens' keys and values, `[G, n, D]`."""
        both = torch.cat([self.keys, keys], dim=1), torch.cat([self.values, values], dim=1)
        return LayerCache(self.queries, *both)


@dataclass
class Recorded:
    """What a prompt left behind in all layers.

    Attributes:
        layers: of those with full attention. sliding: by the layer's number in the model, the
            tokens that the next one still sees.
    """

    layers: list[LayerCache]
    sliding: dict[int, LayerCache]

    @property
    def tokens(self) -> int:
        """T."""
        return self.layers[0].keys.shape[1]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return the attention of `[M, H, n, D]` queries to `[M, G, L, D]` keys and values."""
    if q.is_cuda:  # its kernel for float32 knows no groups; without it all logits are made at once
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=not q.is_cuda
    )


@dataclass(frozen=True)
class Step:
    """What one layer attends with: `[H, n, D]` queries, `[G, n, D]` keys and values, the scale."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float

    def over(
        self, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention `[H, n, D]` to old tokens `[G, L, D]` and causally to its own.

        Args:
            seen: `[..., n, L]` bool over the heads, which old tokens a query sees; None: all.
        """
        n, old = self.q.shape[1], keys.shape[1]
        own = torch.ones(n, n, dtype=torch.bool).tril()
        if seen is None:
            seen = torch.ones(n, old, dtype=torch.bool)
        mask = torch.cat([seen, own.expand(*seen.shape[:-2], n, n)], dim=-1)
        both = torch.cat([keys, self.k], dim=1), torch.cat([values, self.v], dim=1)
        return attention(self.q[None], *(x[None] for x in both), self.scale, mask)[0]


class Way(Protocol):
    """A way of attending to a recorded prompt."""

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        ...


class Whole:
    """Everything is kept."""

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        return step.over(cache.keys, cache.values)


class Evicted:
    """Each layer and KV head has its places alone."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def attend(self, step: Step, cache: LayerCache) -> torch.Tensor:
        """Return `[H, n, D]`."""
        places = self.kept[step.layer]
        if len({len(own) for own in places}) == 1:
            rows = torch.stack(places)
            heads = torch.arange(len(rows))[:, None]
            return step.over(cache.keys[heads, rows], cache.values[heads, rows])
        group = len(step.q) // len(places)
        found = []
        for head, own in enumerate(places):
            one = slice(head, head + 1)
            queries = step.q[head * group : (head + 1) * group]
            part = Step(step.layer, queries, step.k[one], step.v[one], step.scale)
            found.append(part.over(cache.keys[one, own], cache.values[one, own]))
        return torch.cat(found)


def way_of(kept: Kept | None) -> Way:
    """Return the way of what a method keeps; None keeps everything."""
    return Whole() if kept is None else Evicted(kept)


class Model:
    """The model of a Transformers folder, on PyTorch's default device.

    Attributes:
        layers: those with full attention. heads: H. kv_heads: G. size: D. scale: of the logits.
        rotary: the embedding of these layers.

    Raises:
        ValueError: its attention is of a kind that is not written here.
    """

    def __init__(self, folder: Path) -> None:
        AttentionInterface.register(_NAME, _attention)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, attn_implementation=_NAME, local_files_only=True
            )
        self.model = model.eval().to(torch.get_default_device())
        config = self.model.config
        own = [getattr(layer, "self_attn", None) for layer in self.model.model.layers]
        if None in own or getattr(config, "attn_logit_softcapping", None) is not None:
            raise ValueError(f"{folder}: a layer without attention, or with capped logits")
        self._step: Callable[..., torch.Tensor] | None = None
        for module in own:
            module.recording = self
        windows = [getattr(module, "sliding_window", None) for module in own]
        full = [index for index, window in enumerate(windows) if window is None]
        if not full:
            raise ValueError(f"{folder}: no layer has full attention")
        self._place = {index: layer for layer, index in enumerate(full)}
        self.layers = len(full)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.size = int(own[full[0]].head_dim)
        self.scale = float(own[full[0]].scaling)
        self.rotary = self._rotary(config)

    @torch.no_grad()
    def _rotary(self, config: Any) -> Rotary:
        positions = torch.arange(int(config.max_position_embeddings) + _FUTURE)[None]
        module = self.model.model.rotary_emb
        kind = ("full_attention",) if hasattr(module, "layer_types") else ()
        halves = [x[0, :, : x.shape[-1] // 2] for x in module(torch.zeros(1), positions, *kind)]
        return Rotary(torch.cat(halves, dim=-1))

    @torch.no_grad()
    def run(
        self, ids: torch.Tensor, first: int, step: Callable[..., torch.Tensor], keep: int = 0
    ) -> torch.Tensor:
        """Return logits of `ids` `[M, n]` at positions from `first` on; `keep` of the last ones."""
        self._step = step
        positions = torch.arange(first, first + ids.shape[1])[None].expand(len(ids), -1)
        try:
            return self.model(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep
            ).logits
        finally:
            self._step = None

    def prefill(self, ids: list[int]) -> tuple[Recorded, torch.Tensor]:
        """Return the cache of a prompt, and the logits of its last token `[vocabulary]`."""
        recorded = Recorded([], {})

        def step(
            index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Any
        ) -> torch.Tensor:
            if window is not None:
                last = slice(max(0, k.shape[2] - window + 1), None)
                recorded.sliding[index] = LayerCache(q[0, :, :0], k[0, :, last], v[0, :, last])
                return sliding(q, k, v, scale, window)
            recorded.layers.append(LayerCache(q[0].transpose(0, 1), k[0], v[0]))
            return attention(q, k, v, scale, is_causal=True)

        logits = self.run(torch.tensor([ids]), 0, step, keep=1)
        return recorded, logits[0, -1]

    def continued(
        self, recorded: Recorded, ids: list[int], ways: Sequence[Way] = (Whole(),)
    ) -> torch.Tensor:
        """Return the logits `[M, n, vocabulary]` of `ids` behind the prompt, in M ways."""

        def step(
            index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Any
        ) -> torch.Tensor:
            if window is not None:
                old = recorded.sliding[index]
                both = [
                    torch.cat([x.expand(len(q), *x.shape), y], dim=2)
                    for x, y in ((old.keys, k), (old.values, v))
                ]
                return sliding(q, both[0], both[1], scale, window)
            layer = self._place[index]
            own = (Step(layer, *each, scale) for each in zip(q, k, v, strict=True))
            pairs = zip(ways, own, strict=True)
            return torch.stack([way.attend(it, recorded.layers[layer]) for way, it in pairs])

        return self.run(torch.tensor([ids] * len(ways)), recorded.tokens, step)

    def greedy(self, recorded: Recorded, logits: torch.Tensor, count: int) -> list[int]:
        """Return the tokens that the model itself continues with over the whole cache."""
        found = [int(logits.argmax())]
        grown = Recorded(list(recorded.layers), dict(recorded.sliding))

        def step(
            index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Any
        ) -> torch.Tensor:
            if window is not None:
                cache = grown.sliding[index].with_more(k[0], v[0])
                last = slice(max(0, cache.keys.shape[1] - window), None)
                cache = LayerCache(cache.queries, cache.keys[:, last], cache.values[:, last])
                grown.sliding[index] = cache
            else:
                cache = grown.layers[self._place[index]].with_more(k[0], v[0])
                grown.layers[self._place[index]] = cache
            return attention(q, cache.keys[None], cache.values[None], scale)

        while len(found) < count:
            first = recorded.tokens + len(found) - 1
            found.append(int(self.run(torch.tensor([found[-1:]]), first, step)[0, -1].argmax()))
        return found


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the recording model's present step says: `[M, heads, n, D]` to `[M, n, H, D]`."""
    step = module.recording._step
    out = step(module.layer_idx, query, key, value, scaling, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def sliding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Return `[M, H, n, D]`: the last `n` of the keys are the queries' own; each sees `window`."""
    n, before = q.shape[2], k.shape[2] - q.shape[2]
    found = []
    for start in range(0, n, _CHUNK):
        end = min(start + _CHUNK, n)
        keys = slice(max(0, before + start - window + 1), before + end)
        gap = torch.arange(before + start, before + end)[:, None] - torch.arange(
            keys.start, keys.stop
        )
        seen = (gap >= 0) & (gap < window)
        found.append(attention(q[:, :, start:end], k[:, :, keys], v[:, :, keys], scale, seen))
    return torch.cat(found, dim=2)
