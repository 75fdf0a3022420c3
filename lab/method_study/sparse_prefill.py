#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a sparse prefill computes and what it costs: gate (f) of lab/results/gates.md.

    .venv/bin/python lab/method_study/sparse_prefill.py --model smollm2 --lengths 4000 7900

A prompt is prefilled twice: with its whole attention, and with the tiles that XAttention chooses.
The lowest two layers and the prompt's last tiles stay dense, as the design has it. Printed are the
share of the causal tiles that the sparse layers compute (mean and range of the layers), and the
divergence of the next-token distributions at the prompt's last 64 positions (KL in nats) with the
share of the tokens that stay the most likely.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for `lab`
from gates_tiles import TILE, chosen_tiles, density_of
from model import Model, sliding
from own_tasks import load_task

from lab.eval.task import GeneratedTask
from lab.models.folders import model_folder
from vllm_pyramid.tools.eval.haystack import load_tokens

DENSE_LAYERS, LAST = 2, 64


class SparsePrefill:
    """Attends to chosen tiles; `densities` has those of each layer that is sparse."""

    def __init__(self, top_p: float, *, together: bool = False) -> None:
        self.densities: list[float] = []
        self._together = together
        self._top_p, self._layer = top_p, 0

    def step(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: Any,
    ) -> torch.Tensor:
        """Return the attention of a layer, as `Model.prefill` has it but for the tiles."""
        if window is not None:
            return sliding(q, k, v, scale, window)
        self._layer += 1
        tokens = q.shape[2]
        if self._layer <= DENSE_LAYERS or self._top_p >= 1:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        taken = chosen_tiles(q[0], k[0], scale, self._top_p, together=self._together)
        self.densities.append(density_of(taken))
        out = torch.empty_like(q)
        dense = (tokens - LAST) // TILE  # the row of tiles from which all are computed
        repeat = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            key, value = k[0, head // repeat], v[0, head // repeat]
            for row in range(-(-tokens // TILE)):
                rows = slice(row * TILE, min(tokens, (row + 1) * TILE))
                whole = torch.arange(rows.stop)
                if row < dense:
                    tiles = taken[head, row].nonzero()[:, 0]
                    whole = (tiles[:, None] * TILE + torch.arange(TILE)).flatten()
                seen = whole[None] <= torch.arange(rows.start, rows.stop)[:, None]
                out[0, head, rows] = F.scaled_dot_product_attention(
                    q[0, head, rows], key[whole], value[whole], attn_mask=seen, scale=scale
                )
        return out


def last_logits(
    model: Model, ids: list[int], top_p: float, *, together: bool = False
) -> tuple[torch.Tensor, list[float]]:
    """Return log probabilities `[LAST, vocabulary]` at the prompt's end, and the densities."""
    prefill = SparsePrefill(top_p, together=together)
    logits = model.run(torch.tensor([ids]), 0, prefill.step, keep=LAST)[0]
    return logits.log_softmax(dim=-1), prefill.densities


def main() -> None:
    """Print a line for each prompt and top-p."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4000, 7900])
    parser.add_argument("--tasks", nargs="+", default=["code", "needle"])
    parser.add_argument("--top-p", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--choice", nargs="+", default=["head", "kv-head"])
    parser.add_argument("--seed", type=int, default=38)
    args = parser.parse_args()
    folder = model_folder(args.model)
    model, tokens = Model(folder), load_tokens(folder)
    for length in args.lengths:
        for name in args.tasks:
            task = load_task(name)
            assert isinstance(task, GeneratedTask)
            ids = tokens.encode(task.numbered(tokens, length, 0, args.seed).prompt)
            full, _ = last_logits(model, ids, 1.0)
            ways = [(top_p, choice) for top_p in args.top_p for choice in args.choice]
            for top_p, choice in ways:
                its, found = last_logits(model, ids, top_p, together=choice == "kv-head")
                nats = float((full.exp() * (full - its)).sum(-1).mean())
                same = float((full.argmax(-1) == its.argmax(-1)).float().mean())
                mean = sum(found) / len(found)
                print(
                    f"{args.model} {name} {len(ids)} tokens, top-p {top_p} a {choice}: density "
                    f"{mean:.2f} ({min(found):.2f} to {max(found):.2f}), divergence {nats:.3f}, "
                    f"agreement {same:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
