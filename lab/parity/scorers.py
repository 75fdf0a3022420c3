#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Do our scorers rank keys as kvpress's presses do, on the same keys, values and queries?

    .venv/bin/python lab/parity/scorers.py FOLDER [--model MODEL]

FOLDER holds the unpacked wheel of kvpress 0.5.5 (`pip download kvpress==0.5.5 --no-deps`). Its
press modules are imported as they are, past the package's `__init__`, which asks for another
transformers and replaces attention functions. Keys, values and queries are made up, or those of a
model on a text, float32; a press gets the queries as hidden states of a layer whose projection is
the identity.

Compared are the scores, and index by index the tokens that each head keeps at three shares. Tokens
that a press protects are left out on both sides. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from vllm_pyramid.policy.kinds import parse_component
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.scorer_inputs import ScorerInputs

SHARES = (0.7, 0.5, 0.1)


@dataclass(frozen=True)
class Case:
    """One press and one scorer.

    Attributes:
        module, press, settings: of kvpress. scorer: ours, as in a preset.
        sinks, window: first and last tokens that the press protects; queries: that it looks at;
            None: all of the prompt.
        factor: of our scores to theirs: a sum over the window's queries or a mean.
    """

    module: str
    press: str
    settings: dict[str, Any]
    scorer: dict[str, Any]
    sinks: int = 0
    window: int = 0
    queries: int | None = 1
    factor: float = 1.0


CASES = [
    Case("keydiff_press", "KeyDiffPress", {}, {"kind": "keydiff"}),
    Case(
        "snapkv_press",
        "SnapKVPress",
        {"window_size": 32, "kernel_size": 5},
        {"kind": "observation_window", "kernel_size": 5},
        window=32,
        queries=32,
        factor=32.0,
    ),
    Case(
        "expected_attention_press",
        "ExpectedAttentionPress",
        {},
        {"kind": "expected_attention"},
        sinks=4,
        queries=None,
    ),
    Case(
        "expected_attention_press",
        "ExpectedAttentionPress",
        {"epsilon": 0.01, "use_covariance": False},
        {"kind": "expected_attention", "epsilon": 0.01, "covariance": False},
        sinks=4,
        queries=None,
    ),
]
SHAPES = [(2, 8, 16, 700), (4, 4, 32, 513), (3, 6, 64, 900)]  # KV heads, heads, head size, tokens


def import_presses(folder: Path) -> None:
    """Make `kvpress.presses.*` importable without running the package's own `__init__`."""
    package = ModuleType("kvpress")
    package.__path__ = [str(folder / "kvpress")]
    sys.modules["kvpress"] = package


def cos_sin(size: int, positions: int) -> torch.Tensor:
    """`[positions, size]` as vLLM's layers hold it: cosines, then sines."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class RotaryModule:
    """As a press calls it: full-width cosines and sines of positions `[1, n]`."""

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin = self.rotary.at(positions)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


@dataclass(frozen=True)
class Layer:
    """What a layer has of a prompt: `[T, H, D]` queries without rotary embedding, `[G, T, D]`."""

    plain: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rotary: Rotary


def made_up(shape: tuple[int, int, int, int], seed: int) -> Layer:
    """Noise."""
    heads_kv, heads, size, tokens = shape
    generator = torch.Generator().manual_seed(seed)

    def noise(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator)

    rotary = Rotary(cos_sin(size, tokens + 1024))
    plain = noise(tokens, heads, size) + noise(heads, size)  # queries have a mean in real models
    return Layer(plain, noise(heads_kv, tokens, size), noise(heads_kv, tokens, size), rotary)


def of_model(folder: Path, ids: list[int]) -> Iterator[Layer]:
    """Yield every full-attention layer of a model, on a prompt."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "method_study"))
    from model import Model

    model = Model(folder)
    with torch.no_grad():
        recorded, _ = model.prefill(ids)
    for cache in recorded.layers:
        plain = model.rotary.turn_back(cache.queries, torch.arange(len(ids)))
        yield Layer(plain, cache.keys, cache.values, model.rotary)


def press_arguments(data: Layer, number: int = 0, layers: int = 1) -> tuple[Any, ...]:
    """Return what a press's `score` takes for layer `number`: module, hidden states, ..."""
    (tokens, heads, size), heads_kv = data.plain.shape, len(data.keys)
    module = SimpleNamespace(
        config=SimpleNamespace(
            num_attention_heads=heads, num_key_value_heads=heads_kv, num_hidden_layers=layers
        ),
        layer_idx=number,
        head_dim=size,
        num_key_value_groups=heads // heads_kv,
        q_proj=torch.nn.Identity(),
        rotary_emb=RotaryModule(data.rotary),
    )
    embeddings = module.rotary_emb(data.plain, torch.arange(tokens)[None])
    hidden = data.plain.reshape(1, tokens, heads * size)
    positions = {"position_embeddings": embeddings}
    return module, hidden, data.keys[None], data.values[None], None, positions


def compare(case: Case, layer_data: Layer) -> Iterator[str]:
    """What differs."""
    plain, keys, values = layer_data.plain, layer_data.keys, layer_data.values
    rotary = layer_data.rotary
    tokens = len(plain)
    cos, sin = rotary.at(torch.arange(tokens))
    queries = rotary.turn(plain, cos[:, None], sin[:, None])

    press = getattr(importlib.import_module(f"kvpress.presses.{case.module}"), case.press)
    theirs = press(**case.settings).score(*press_arguments(layer_data))[0]

    # kvpress leaves the queries of the sinks out of its means.
    looked_at = case.queries or tokens - case.sinks
    scorer = parse_component(Scorer, case.scorer)
    view = ScorerInputs.of_tensors(
        queries[-looked_at:],
        keys,
        values,
        window=looked_at,
        sinks=case.sinks,
        rotary=rotary,
        knows_rotary=True,
        asks_ranks=scorer.asks_ranks,
    )
    inside = slice(case.sinks, tokens - case.window)
    ours, theirs = scorer.score(view)[:, inside], case.factor * theirs[:, inside]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if error > 1e-5:
        yield f"scores differ by {error:.1e} of the largest"
    for share in SHARES:
        count = int(ours.shape[1] * share)
        kept = [x.topk(count).indices.sort().values for x in (ours, theirs)]
        differing = int((kept[0] != kept[1]).any(dim=0).sum())
        if differing:
            yield f"{differing} of {count} indices differ at {share:.0%}"


def main() -> int:
    """Compare all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="with the unpacked wheel of kvpress 0.5.5")
    parser.add_argument("--model", type=Path, help="folder of a model, for keys that are not noise")
    args = parser.parse_args()
    import_presses(args.folder)
    layers = {f"shape {shape}": made_up(shape, seed) for seed, shape in enumerate(SHAPES)}
    if args.model:
        from vllm_pyramid.tools.eval.haystack import load_tokens, topics

        text = "\n\n".join(topics().values())
        ids = load_tokens(args.model).encode(text[:8000])[:1500]
        layers |= {f"layer {i}": layer for i, layer in enumerate(of_model(args.model, ids))}
    failed = 0
    for case in CASES:
        found = [
            f"{name}: {problem}"
            for name, layer in layers.items()
            for problem in compare(case, layer)
        ]
        failed += bool(found)
        what = f"{case.press}{case.settings or ''} and {case.scorer['kind']}"
        print(f"{what}: {'; '.join(found) or f'equal in {len(layers)} shapes and layers'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
