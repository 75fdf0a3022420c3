# SPDX-License-Identifier: Apache-2.0
"""A Llama in plain PyTorch whose cache can be looked at and cut: float32, one prompt at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from vllm_pyramid.step.rotary import Rotary


@dataclass
class LayerCache:
    """A layer's tensors of a prompt of T tokens, rotary embedding applied.

    Attributes:
        queries: `[T, H, D]`. keys, values: `[G, T, D]`.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def of_heads(self, kept: list[torch.Tensor] | None) -> tuple[list[torch.Tensor], ...]:
        """Return keys and values of each KV head; `kept` has each head's places, None for all."""
        if kept is None:
            return list(self.keys), list(self.values)
        return tuple(
            [rows[places] for rows, places in zip(cache, kept, strict=True)]
            for cache in (self.keys, self.values)
        )


class Llama:
    """The model of a Transformers folder: `LlamaForCausalLM` without biases."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config["num_key_value_heads"])
        self.size = int(config.get("head_dim") or config["hidden_size"] // self.heads)
        self.epsilon = float(config["rms_norm_eps"])
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        longest = int(config["max_position_embeddings"])
        frequencies = float(theta) ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(2 * longest)[:, None] * frequencies
        self.rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1))
        self.weights = {
            name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()
        }
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"model.{name}.weight"], self.epsilon)

    def _projected(self, x: torch.Tensor, layer: int, *names: str) -> list[torch.Tensor]:
        return [F.linear(x, self.weights[f"model.layers.{layer}.{n}.weight"]) for n in names]

    def _rotated(
        self, x: torch.Tensor, layer: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `[n, H, D]`, keys and values `[G, n, D]` at `positions` `[n]`."""
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        q, k, v = (y.unflatten(1, (-1, self.size)) for y in self._projected(x, layer, *names))
        cos, sin = self.rotary.at(positions)
        q, k = (self.rotary.turn(y, cos[:, None], sin[:, None]) for y in (q, k))
        return q, k.transpose(0, 1), v.transpose(0, 1)

    def _finished(self, x: torch.Tensor, attended: torch.Tensor, layer: int) -> torch.Tensor:
        """Compute the rest of a layer behind its attention, `attended` `[n, H, D]`."""
        (out,) = self._projected(attended.flatten(1), layer, "self_attn.o_proj")
        x = x + out
        y = self._norm(x, f"layers.{layer}.post_attention_layernorm")
        gate, up = self._projected(y, layer, "mlp.gate_proj", "mlp.up_proj")
        (down,) = self._projected(F.silu(gate) * up, layer, "mlp.down_proj")
        return x + down

    def prefill(self, ids: list[int]) -> tuple[list[LayerCache], torch.Tensor]:
        """Return the cache of a prompt, and the logits of its last token `[vocabulary]`."""
        x, places = self.embedding[torch.tensor(ids)], torch.arange(len(ids))
        caches = []
        for layer in range(self.layers):
            y = self._norm(x, f"layers.{layer}.input_layernorm")
            q, k, v = self._rotated(y, layer, places)
            caches.append(LayerCache(q, k, v))
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            x = self._finished(x, attended, layer)
        return caches, F.linear(self._norm(x[-1], "norm"), self.head)

    def continued(
        self,
        caches: list[LayerCache],
        ids: list[int],
        ways: Sequence[list[list[torch.Tensor]] | None] = (None,),
    ) -> torch.Tensor:
        """Return the logits `[M, n, vocabulary]` of `ids` behind the prompt, over what is kept.

        Args:
            ways: M times the places that each layer and KV head keeps; None for all.
        """
        n, first = len(ids), caches[0].keys.shape[1]
        x = self.embedding[torch.tensor(ids)].repeat(len(ways), 1)
        positions = torch.arange(first, first + n).repeat(len(ways))
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        for layer, cache in enumerate(caches):
            y = self._norm(x, f"layers.{layer}.input_layernorm")
            q, k, v = self._rotated(y, layer, positions)
            attended = []
            for way, kept in enumerate(ways):
                own = slice(way * n, (way + 1) * n)
                grouped = q[own].transpose(0, 1).unflatten(0, (self.kv_heads, -1))
                old = cache.of_heads(None if kept is None else kept[layer])
                heads = []
                for head, (group, old_keys, old_values) in enumerate(
                    zip(grouped, *old, strict=True)
                ):
                    seen = torch.ones(n, len(old_keys), dtype=torch.bool)
                    both = ((old_keys, k[head, own]), (old_values, v[head, own]))
                    rows = (torch.cat(pair).expand(len(group), -1, -1) for pair in both)
                    mask = torch.cat([seen, causal], dim=1)
                    heads.append(F.scaled_dot_product_attention(group, *rows, attn_mask=mask))
                attended.append(torch.cat(heads).transpose(0, 1))
            x = self._finished(x, torch.cat(attended), layer)
        return F.linear(self._norm(x, "norm"), self.head).unflatten(0, (len(ways), n))

    def greedy(self, caches: list[LayerCache], logits: torch.Tensor, count: int) -> list[int]:
        """Return the tokens that the model itself continues with over the whole cache."""
        found = [int(logits.argmax())]
        caches = list(caches)
        while len(found) < count:
            x = self.embedding[torch.tensor(found[-1:])]
            place = torch.tensor([caches[0].keys.shape[1]])
            for layer, cache in enumerate(caches):
                y = self._norm(x, f"layers.{layer}.input_layernorm")
                q, k, v = self._rotated(y, layer, place)
                cache = LayerCache(
                    cache.queries,
                    torch.cat([cache.keys, k], dim=1),
                    torch.cat([cache.values, v], dim=1),
                )
                caches[layer] = cache
                attended = F.scaled_dot_product_attention(
                    q.transpose(0, 1)[None], cache.keys[None], cache.values[None], enable_gqa=True
                )[0].transpose(0, 1)
                x = self._finished(x, attended, layer)
            found.append(int(F.linear(self._norm(x[-1], "norm"), self.head).argmax()))
        return found
