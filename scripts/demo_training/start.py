# SPDX-License-Identifier: Apache-2.0
"""Initial weights that already hold induction heads, so that training need not wait for them.

From random weights, recall sits on a plateau until three parts exist together: a head that looks at
the previous token, one that compares it with the current token, and a path that copies what the
second head finds (Olsson et al., "In-context Learning and Induction Heads",
https://arxiv.org/abs/2209.11895). Each is a few matrices, so they are written down here; training
is free to change or drop them. The residual stream is divided into orthogonal parts Q_0, Q_1 ...,
each as wide as a head:

- one feature of every embedding is constant; in the first layer two heads turn it into queries and
  keys whose rotary angles agree at a distance of one and of two tokens. They write the part Q_0 of
  what they find into Q_1 and into Q_2;
- in the following layers one head has the queries Q_0 x and the keys Q_1 x: it finds the places
  whose previous token is the current one. Another has the queries Q_1 x and the keys Q_2 x: it
  finds the places whose last token but one is the current one's previous. Only the rotary pairs
  that hardly turn over the whole context take part;
- these heads copy what they find, each another part, so that together they copy all of it.
"""

from __future__ import annotations

import torch
from demo_training.llama import Llama

EMBEDDING_STD = 0.1
PREVIOUS = 0.2  # how strongly the previous token is written, beside embeddings of 0.1
COPY = 0.15
BACKGROUND = 0.3  # factor on everything that is random in the first layers
INDUCTION_LAYERS = 3
POSITION_LOGIT = 24.0  # logit of the wanted distance in the first layer's positional heads
MATCH_LOGIT = 8.0
FAST = 6  # rotary frequencies that tell distances of one token apart
SLOW_TURN = 1.5  # radians over the whole context, at most, of the frequencies that compare tokens


@torch.no_grad()
def start_with_copying_heads(model: Llama, seed: int) -> None:
    shape = model.shape
    generator = torch.Generator().manual_seed(seed)
    hidden, size = shape.hidden_size, shape.head_size
    half, group = size // 2, shape.num_heads // shape.num_kv_heads
    frequencies = model.inverse_frequencies

    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, EMBEDDING_STD, generator=generator)
    constant = 0.5 * EMBEDDING_STD * hidden**0.5
    embedding[:, 0] = constant
    model.model.norm.weight.fill_(0.25)  # the tied output starts with small logits

    # Rows of `parts[i]` are orthonormal and orthogonal to the constant feature and the other parts.
    basis = torch.randn(hidden, hidden, generator=generator)
    basis[:, 0] = torch.eye(hidden)[0]
    rows = torch.linalg.qr(basis).Q.T[1:]
    parts = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]

    layers = list(model.model.layers)
    for layer in layers[: 1 + INDUCTION_LAYERS]:
        layer.self_attn.o_proj.weight *= BACKGROUND
        layer.mlp.down_proj.weight *= BACKGROUND

    # The first layer: the constant feature after the norm, and angles that agree at a distance.
    first = layers[0].self_attn
    normed = constant / (EMBEDDING_STD**2 + constant**2 / hidden) ** 0.5
    amplitude = (POSITION_LOGIT / FAST * size**0.5) ** 0.5 / normed
    angles = frequencies[:FAST]
    key = first.k_proj.weight[:size]
    key *= 0.1
    key[:FAST, 0] = amplitude * angles.cos()
    key[half : half + FAST, 0] = amplitude * angles.sin()
    first.v_proj.weight[:size] = parts[0]
    for head, turn in ((0, 0.0), (1, -1.0)):
        span = slice(head * size, (head + 1) * size)
        query = first.q_proj.weight[span]
        query *= 0.1
        query[:FAST, 0] = amplitude * (turn * angles).cos()
        query[half : half + FAST, 0] = amplitude * (turn * angles).sin()
        first.o_proj.weight[:, span] = PREVIOUS * parts[1 + head].T

    slow = torch.nonzero(frequencies * shape.trained_length <= SLOW_TURN).flatten()
    slow = torch.cat((slow, slow + half))
    gain = (MATCH_LOGIT * size**0.5 / len(slow)) ** 0.5
    copied = 0
    for layer in layers[1 : 1 + INDUCTION_LAYERS]:
        attention = layer.self_attn
        for kv_head in range(shape.num_kv_heads):
            head = kv_head * group
            query = attention.q_proj.weight[head * size : (head + 1) * size]
            key = attention.k_proj.weight[kv_head * size : (kv_head + 1) * size]
            query *= 0.1
            key *= 0.1
            back = kv_head % 2
            query[slow] = gain * (1 if back else 2) * parts[back][slow]
            key[slow] = gain * parts[back + 1][slow]
            part = parts[copied % len(parts)]
            copied += 1
            attention.v_proj.weight[kv_head * size : (kv_head + 1) * size] = part
            attention.o_proj.weight[:, head * size : (head + 1) * size] = COPY * part.T
