# SPDX-License-Identifier: Apache-2.0
"""Presses of kvpress on a recorded prompt: which tokens each layer and KV head keeps.

A press's own `score` and `compress` run unchanged. `compress` gets the positions in place of the
values, so that what comes back are the positions that it chose.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch
from model import Kept, Model, Recorded

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
import scorers

KVPRESS = "0.5.5"


def _press_class(name: str) -> Any:
    """`module.Class` of `kvpress.presses`.

    Raises:
        ValueError: kvpress is not installed, or another version.
    """
    try:
        found = importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or found.version != KVPRESS:
        has = f"{found.version} is installed" if found else "there is none"
        raise ValueError(f"the press {name!r} needs kvpress {KVPRESS}, {has}: `make smollm2`")
    if "kvpress" not in sys.modules:
        scorers.import_presses(Path(str(found.locate_file(""))))
    module, _, press = name.rpartition(".")
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), press)


def kept_by(
    name: str,
    settings: dict[str, Any],
    heads: float | None,
    model: Model,
    recorded: Recorded,
    keep: int,
) -> Kept:
    """Return the ascending places that a press keeps of a prompt.

    Args:
        name: `module.Class` of `kvpress.presses`. settings: its arguments, the ratio left out.
        heads: AdaKVPress around it, with this safeguard; None for the press alone.
        keep: tokens to keep per KV head, the mean over the layers.
    """
    tokens = recorded.tokens
    press = _press_class(name)(**settings)
    # compress() truncates `tokens * (1 - ratio)`; PyramidKVPress rounds it.
    half = 0.0 if hasattr(press, "get_layer_budget") else 0.5
    press.compression_ratio = 1 - (keep + half) / tokens
    kept = []
    for number, cache in enumerate(recorded.layers):
        plain = model.rotary.turn_back(cache.queries, torch.arange(tokens))
        data = scorers.Layer(plain, cache.keys, cache.values, model.rotary)
        module, hidden, keys, values, _, extra = scorers.press_arguments(data, number, model.layers)
        scores = press.score(module, hidden, keys, values, None, extra)
        press.score = lambda *_, scores=scores: scores
        try:
            if heads is None:
                places = torch.arange(tokens)[None, None, :, None].expand(values.shape)
                _, chosen = press.compress(module, hidden, keys, places, None, extra)
                kept.append(list(chosen[0, :, :, 0].sort(-1).values))
            else:
                kept.append(_adaptive(press, heads, module, hidden, keys, values, extra))
        finally:
            del press.score
    return kept


def _adaptive(press: Any, share: float, module: Any, *arguments: Any) -> list[torch.Tensor]:
    """What AdaKVPress leaves unmasked of one layer: `[KV head]` ascending places."""
    hidden, keys, values, extra = arguments
    adaptive = _press_class("adakv_press.AdaKVPress")(press, alpha_safeguard=share)
    module.config._attn_implementation = "sdpa"
    adaptive.compress(module, hidden, keys, values, None, extra)
    _, head, place = module.masked_key_indices
    left = torch.ones(keys.shape[1:3], dtype=torch.bool)
    left[head, place] = False
    return [row.nonzero()[:, 0] for row in left]
