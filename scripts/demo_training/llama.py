# SPDX-License-Identifier: Apache-2.0
"""The built-in model as a plain PyTorch module, with the parameter names of `LlamaForCausalLM`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    num_layers: int = 8
    hidden_size: int = 192
    head_size: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 512
    vocab_size: int = 4096
    trained_length: int = 4096
    max_length: int = 8192
    rope_theta: float = 1e6  # slow pairs compare tokens over the whole context
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split form; x is [batch, heads, tokens, head_size]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, size = shape.hidden_size, shape.head_size
        self.q_proj = nn.Linear(hidden, shape.num_heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * size, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        size, group = self.shape.head_size, self.shape.num_heads // self.shape.num_kv_heads

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, tokens, -1, size).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin).repeat_interleave(group, dim=1)
        v = heads(self.v_proj(x)).repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """Tied embeddings; `forward` gives the final hidden states, `loss` the weighted loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Model(shape)
        half = shape.head_size // 2
        self.inverse_frequencies = shape.rope_theta ** (-torch.arange(half).float() / half)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.num_layers) ** -0.5 if residual else 1.0
                std = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std * scale)

    def rope(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [tokens, head_size / 2]."""
        angles = torch.outer(torch.arange(tokens).float(), self.inverse_frequencies)
        return angles.cos(), angles.sin()

    def forward(
        self, token_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[batch, tokens] token ids to [batch, tokens, hidden_size] after the last norm."""
        x = self.model.embed_tokens(token_ids).to(torch.bfloat16)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in the compute dtype for hidden states of any leading shape."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))
