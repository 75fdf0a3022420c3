# SPDX-License-Identifier: Apache-2.0
"""A Transformers model whose KV heads can be probed.

Only the model's attention function is replaced, by PyTorch's own attention.

Shape legend: L layers, T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from vllm_pyramid.tools.heads.probe import Repeated, of_kv_heads

_NAME = "vllm_pyramid_heads"
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


class HeadModel:
    """A causal language model of Transformers, on a GPU if there is one, else in float32.

    ValueError: it cannot be loaded, or its layers do not all have plain attention. Some kinds show
    when the model runs first.

    Attributes:
        model: as Transformers loads it. attentions: its attention modules, `[L]`.
        layers: L. kv_heads: G. heads: H. vocabulary: number of token ids.
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
