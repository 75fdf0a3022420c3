# SPDX-License-Identifier: Apache-2.0
"""A Transformers model whose KV heads can be probed, and some of which can be made to stream.

Only the model's attention function is replaced, by PyTorch's own attention; a streaming head sees
the first tokens and the most recent ones, at each position of the prompt, as in DuoAttention.

Shape legend: L layers, T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from vllm_pyramid.tools.head_probe import Repeated, of_kv_heads
from vllm_pyramid.tools.heads.scores import HeadScores

_NAME = "vllm_pyramid_heads"
_CHUNK = 1024  # queries of streaming heads at a time
_OTHER = ("sliding_window", "softcap", "s_aux")  # what Transformers hands to attention functions
_PLAIN = (
    "heads are probed in models whose layers all have full attention with KV heads, without "
    "sliding windows, capped logits, learned sinks or latent vectors; this model has others"
)
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

    Attributes:
        layers: L. kv_heads: G. vocabulary: number of token ids. longest: positions of the model.

    Raises:
        ValueError: it cannot be loaded, or its layers do not all have plain attention. Some kinds
            show when the model runs first.
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
        self._model: Any = model.to("cuda" if on_gpu else "cpu").eval()
        own = [
            module for module in self._model.modules() if hasattr(module, "num_key_value_groups")
        ]
        config = self._model.config
        latent = getattr(config, "kv_lora_rank", None) is not None
        if len(own) != getattr(config, "num_hidden_layers", None) or latent:
            raise ValueError(_PLAIN)
        for module in own:
            module.heads = self
        self._attend: Attend | None = None
        self.layers = len(own)
        self.kv_heads = int(config.num_key_value_heads)
        self.vocabulary = int(config.vocab_size)
        self.longest = int(config.max_position_embeddings)

    def ordinary_ids(self) -> range:
        """Return the middle half of the vocabulary; special tokens stand at either end."""
        return range(self.vocabulary // 4, self.vocabulary * 3 // 4)

    def probe(self, probe: Repeated) -> torch.Tensor:
        """Return the larger share of echo and induction of each KV head, `[L, G]` float64."""
        found = torch.zeros(self.layers, self.kv_heads, dtype=torch.float64)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            shares = probe.echo_and_induction(q[0].transpose(0, 1).cpu(), k[0].cpu(), scale)
            found[layer] = of_kv_heads(torch.maximum(*shares), self.kv_heads)
            return whole_attention(q, k, v, scale)

        self._run(probe.tokens(self.ordinary_ids()), attend, 1)
        return found

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

        return self._run(ids, attend, last)

    @torch.inference_mode()
    def _run(self, ids: Sequence[int], attend: Attend, last: int) -> torch.Tensor:
        tokens = torch.tensor([list(ids)], device=self._model.device)
        self._attend = attend
        try:
            output = self._model(input_ids=tokens, use_cache=False, logits_to_keep=last)
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
