#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Do `r_kv` and `triattention` keep the keys that their authors' code keeps?

    .venv/bin/python lab/parity/answers.py --r-kv FOLDER --triattention FOLDER

The folders are checkouts of Zefan-Cai/R-KV and WeianMao/triattention; either may be left out. Their
modules are loaded as they are, without their packages' `__init__`. Keys and queries are made up,
float32: a prompt's, and survivors of an eviction that stand at other positions.

Compared is, index by index, what each KV head keeps at three budgets. Not compared, since it
differs: which set their servers choose for all layers and heads together, and when. Exit status 1
if anything differs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vllm_pyramid.methods.triattention import Centres
from vllm_pyramid.policy.kinds import parse_component
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.scorer_inputs import ScorerInputs

SHARES = (0.7, 0.5, 0.1)
SHAPES = [(2, 8, 16, 700), (4, 4, 32, 513), (3, 6, 64, 900)]  # KV heads, heads, head size, tokens
WINDOW = 8
POSITIONS = 4096  # of the rotary embedding's table


@dataclass(frozen=True)
class Layer:
    """What a layer holds: queries `[W, H, D]` and keys `[G, T, D]`, rotated, at `positions`, `[T]`.

    Attributes:
        centres: of the queries, `[1, H, D]`.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    rotary: Rotary
    centres: Centres


def made_up(shape: tuple[int, int, int, int], seed: int) -> Layer:
    """Noise around a mean, as keys of real models have one; every second position is gone."""
    heads_kv, heads, size, tokens = shape
    generator = torch.Generator().manual_seed(seed)

    def noise(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator)

    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(POSITIONS)[:, None] * frequencies
    rotary = Rotary(torch.cat([angles.cos(), angles.sin()], dim=-1))
    positions = 2 * torch.arange(tokens) + 5
    plain = noise(heads_kv, tokens, size) + noise(heads_kv, 1, size)
    keys = rotary.turn(plain, *rotary.at(positions))
    queries = noise(WINDOW, heads, size) + noise(heads, size)
    cos, sin = rotary.at(positions[-WINDOW:])
    mean = noise(1, heads, size)
    length = 1.2 * rotary.lengths(mean) + 0.1
    turned = rotary.turn(queries, cos[:, None], sin[:, None])
    return Layer(turned, keys, positions, rotary, Centres(mean, length))


def ours(layer: Layer, settings: dict[str, Any]) -> torch.Tensor:
    """Return our scores, `[G, T]`."""
    return parse_component(Scorer, settings).score(
        ScorerInputs.of_tensors(
            layer.queries,
            layer.keys,
            layer.keys,
            window=WINDOW,
            sinks=0,
            rotary=layer.rotary,
            knows_rotary=True,
            last_position=int(layer.positions[-1]),
        )
    )


@cache
def r_kv_module(folder: Path) -> ModuleType:
    """Load the authors' compressor, past the packages' `__init__`."""
    for name, path in (("rkv", "rkv"), ("rkv.compression", "rkv/compression")):
        package = ModuleType(name)
        package.__path__ = [str(folder / path)]
        sys.modules[name] = package
    utils = importlib.import_module("rkv.utils")
    for name in ("cal_similarity", "compute_attention_scores"):
        setattr(sys.modules["rkv.compression"], name, getattr(utils, name))
    file = "r1_kv" if (folder / "rkv/compression/r1_kv.py").exists() else "rkv"
    return importlib.import_module(f"rkv.compression.{file}")


def compare_r_kv(folder: Path, layer: Layer) -> Iterator[str]:
    """Yield what differs. Their values are places, so what is kept of them says which."""
    tokens = layer.keys.shape[1]
    places = torch.arange(tokens, dtype=torch.float32)[None, None, :, None]
    values = places.expand(1, *layer.keys.shape)
    queries = layer.queries.transpose(0, 1)[None]
    for mix in (0.07, 0.1):
        scores = ours(layer, {"kind": "r_kv", "mix": mix})[:, : tokens - WINDOW]
        for share in SHARES:
            budget = int(tokens * share)
            theirs = r_kv_module(folder).R1KV(budget=budget, window_size=WINDOW, mix_lambda=mix)
            _, kept = theirs.update_kv(layer.keys[None], queries, values)
            found = scores.topk(budget - WINDOW).indices.sort().values
            wanted = kept[0, :, : budget - WINDOW, 0].long().sort().values
            yield from differing(found, wanted, f"mix {mix}, {share:.0%}")


@cache
def triattention_module(folder: Path) -> ModuleType:
    """Load the authors' scoring functions."""
    file = folder / "triattention/methods/pruning_utils.py"
    spec = importlib.util.spec_from_file_location("triattention_scores", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compare_triattention(folder: Path, layer: Layer) -> Iterator[str]:
    """Yield what differs, with scores normalised and not."""
    theirs, heads_kv = triattention_module(folder), len(layer.keys)
    mean, length = (array[0] for array in layer.centres)
    group, half = len(mean) // heads_kv, length.shape[-1]
    cos, sin = (torch.cat([part, part], dim=-1) for part in layer.rotary.at(layer.positions))
    omega = (10000.0 ** (-torch.arange(0, 2 * half, 2) / (2 * half))).float()
    rows = []
    for head in range(len(mean)):
        plain = theirs.invert_rope(layer.keys[head // group], cos, sin, 1.0)
        centre = torch.complex(mean[head, :half], mean[head, half:])
        parts = theirs.compute_frequency_statistics_from_means(centre, length[head], plain)
        rows.append(
            theirs.score_keys_for_round(
                *(layer.positions, int(layer.positions[-1]) + 1, parts[0], parts[1], omega),
                *(parts[2], theirs.build_geometric_offsets(65536, torch.device("cpu"))),
                *("mean", torch.ones(half)),
            )
        )
    by_head = torch.stack(rows)
    file = Path(tempfile.mkdtemp()) / "centres.npz"
    layer.centres.write(file)
    for normalize in (False, True):
        scores = by_head
        if normalize:
            deviation = by_head.std(dim=1, unbiased=False, keepdim=True).clamp_min(1e-6)
            scores = (by_head - by_head.mean(dim=1, keepdim=True)) / deviation
        scores = scores.unflatten(0, (heads_kv, group)).amax(dim=1)
        own = {"kind": "triattention", "centres": str(file), "normalize": normalize}
        mine = ours(layer, own)
        for share in SHARES:
            budget = int(mine.shape[1] * share)
            found, wanted = (x.topk(budget).indices.sort().values for x in (mine, scores))
            yield from differing(found, wanted, f"normalize {normalize}, {share:.0%}")


def differing(found: torch.Tensor, wanted: torch.Tensor, what: str) -> Iterator[str]:
    """Yield a line if two sets of kept places, `[G, K]`, differ."""
    if not torch.equal(found, wanted):
        both = [len({*a.tolist()} & {*b.tolist()}) for a, b in zip(found, wanted, strict=True)]
        yield f"{what}: {found.numel() - sum(both)} of {found.numel()} places differ"


def main() -> int:
    """Compare all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--r-kv", type=Path, help="a checkout of Zefan-Cai/R-KV")
    parser.add_argument("--triattention", type=Path, help="a checkout of WeianMao/triattention")
    args = parser.parse_args()
    asked = {compare_r_kv: args.r_kv, compare_triattention: args.triattention}
    failed = 0
    for compare, folder in asked.items():
        if folder is None:
            continue
        name, found = compare.__name__.removeprefix("compare_"), list[str]()
        for seed, shape in enumerate(SHAPES):
            found += [f"shape {shape}: {one}" for one in compare(folder, made_up(shape, seed))]
        failed += bool(found)
        print(f"{name}: {'; '.join(found) or f'equal in {len(SHAPES)} shapes'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
