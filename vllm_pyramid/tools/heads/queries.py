# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid calibrate --queries`: where the queries of a model's heads lie on average.

The model reads your prompts, by Transformers, without an engine. The file keeps, for each layer and
query head, the mean of the queries without their rotary embedding, and the mean length of each
rotated pair of channels: what the policy `triattention` scores by (docs/methods/triattention.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_pyramid.methods.triattention import Centres
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.tools.command_parts import check_writable
from vllm_pyramid.tools.heads.model import HeadModel, whole_attention

_NEAR = 1e-3  # relative distance of two equal queries after their rotary embedding is undone


class QueryModel:
    """A model of Transformers whose queries are shown without their rotary embedding.

    ValueError: it cannot be loaded, or its rotary embedding cannot be undone.
    """

    def __init__(self, name: str) -> None:
        self.model = HeadModel(name)
        modules = self.model.model.named_modules()
        found = [module for place, module in modules if place.endswith("rotary_emb")]
        if len(found) != 1:
            raise ValueError(
                f"the model has {len(found)} rotary embeddings, and queries are measured where all "
                "layers share one"
            )
        self._rotary: Any = found[0]
        self._halves = self._pairs_halves()

    def rotary(self, tokens: int) -> Rotary:
        """Return the model's rotary embedding of as many positions."""
        device, dtype = self.model.model.device, torch.float32
        positions = torch.arange(tokens, device=device)[None]
        cos, sin = self._rotary(torch.zeros(1, dtype=dtype, device=device), positions)
        if self._halves:
            half = cos.shape[-1] // 2
            cos, sin = cos[0, :, :half], sin[0, :, :half]
        else:
            cos, sin = cos[0, :, ::2], sin[0, :, ::2]
        return Rotary(torch.cat([cos, sin], dim=-1).float(), self._halves)

    def _pairs_halves(self) -> bool:
        """Find out which channels are pairs: a token's first queries are the same everywhere."""
        ids = [self.model.ordinary_ids()[0]] * 16
        for halves in (True, False):
            self._halves = halves
            first = self.queries(ids)[0]
            apart = (first - first[:1]).norm(dim=-1) / first.norm(dim=-1)
            if float(apart.max()) < _NEAR:
                return halves
        raise ValueError(
            "the same token has other queries at other positions when the rotary embedding is "
            "undone: this model's embedding is not known"
        )

    def queries(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the queries of tokens without rotary embedding: `[L, T, H, D]` float32.

        ValueError: the tokens do not fit into the model's positions.
        """
        if len(ids) > self.model.longest:
            raise ValueError(
                f"a prompt has {len(ids)} tokens, and the model {self.model.longest} positions: "
                "leave it out, or cut it"
            )
        rotary, found = self.rotary(len(ids)), list[torch.Tensor]()
        positions = torch.arange(len(ids), device=rotary.cos_sin.device)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            found.append(rotary.turn_back(q[0].transpose(0, 1).float(), positions).cpu())
            return whole_attention(q, k, v, scale)

        self.model.run(ids, attend, 1)
        return torch.stack(found)

    def centres(self, prompts: Sequence[Sequence[int]]) -> Centres:
        """Return the centres over all tokens of the prompts."""
        means: list[torch.Tensor] = []
        lengths: list[torch.Tensor] = []
        for ids in prompts:
            queries = self.queries(ids).double()
            means.append(queries.sum(dim=1))
            lengths.append(self.rotary(1).lengths(queries.cpu()).sum(dim=1))
        count = sum(map(len, prompts))
        mean, length = (torch.stack(sums).sum(dim=0) / count for sums in (means, lengths))
        return Centres(mean.float(), length.float())


def token_ids(model: str, prompts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of prompts, as `read_prompts` reads them."""
    from transformers import AutoTokenizer

    given = [prompt.get("prompt_token_ids") for prompt in prompts]
    if any(ids is None for ids in given):
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        given = [
            tokenizer(prompt["prompt"])["input_ids"] if ids is None else ids
            for prompt, ids in zip(prompts, given, strict=True)
        ]
    return [list(ids or ()) for ids in given]


def run(args: argparse.Namespace, prompts: Sequence[dict[str, Any]]) -> int:
    """Run the command with checked flags; return 0. ValueError: no such model, or no such file."""
    from rich.console import Console

    output = Path(args.output)
    if output.suffix != ".npz":
        raise ValueError(f"the output {args.output!r} must end in .npz")
    model = QueryModel(args.model)
    check_writable(output.parent, [output])
    ids = token_ids(args.model, prompts)
    centres = model.centres(ids)
    centres.write(output, model=args.model)
    layers, heads, size = centres.mean.shape
    lengths = centres.mean[..., : 2 * centres.length.shape[-1]].norm(dim=-1)
    near = lengths / centres.length.square().sum(dim=-1).sqrt()
    Console().print(
        f"{output}: centres of {layers} layers of {heads} query heads of {size}, over "
        f"{sum(map(len, ids)):,} tokens of {len(ids)} prompts; a centre is {near.mean():.0%} as "
        "long as its queries. Serve with --kv-policy triattention --kv-policy-args "
        f"'{json.dumps({'centres': str(output)})}'.",
        highlight=False,
        soft_wrap=True,
    )
    return 0
