#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does `rest-kv` keep the tokens that its authors' code keeps, on the same keys, values, queries?

    git clone https://github.com/an-yongqi/rest-kv FOLDER  # read at commit a8bb112
    .venv/bin/python lab/parity/rest_kv.py FOLDER

The class `RestKVCluster` of FOLDER's `restkv/restkv_utils.py` runs as it is, with the settings
that their scripts pass for the published results, on made-up float32 tensors. Its scores are what
it hands to `topk`; the tokens that it keeps are found by the keys that it returns.

Compared are the scores and, index by index in the order of the scores, the kept tokens at several
budgets; two tokens count as a tie, and as equal, where their scores differ by rounding alone. Ours
is set up as theirs where our documentation names a choice:

- Theirs keeps tokens for each query head. So does ours where each query head has a KV head of its
  own; where a group shares one, our scores are compared with the mean of theirs.
- Theirs measures the drift on as many tokens as it keeps before the window: `top` is that number.

One difference is known. Where the drift is 0 or a negative multiple of `drift` to the last digit,
their pooling lies one position further behind than ours, which rounds towards 0. The script checks
that it lies there, and that nothing else differs on these tensors. Exit status 1 if anything does.
Attention so sharp that one token takes nearly all of it is not among them: there 1 - a is at least
1e-6 in ours, and theirs becomes infinite.

Last it says how many kept tokens float16 changes in their code, which computes in the model's type
where ours takes float32. That is not part of the status.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from vllm_pyramid.methods.output_change import OutputChangeScorer
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.output_factors import output_factors
from vllm_pyramid.step.scorer_inputs import ScorerInputs

ROUNDING = 1e-5  # of the largest score, and of the score of a token that another one ties with
BUDGETS = (16, 64, 128)  # tokens kept before the window

PRESET = load_policy("rest-kv")
assert isinstance(PRESET.scorer, OutputChangeScorer)


@dataclass(frozen=True)
class Case:
    """Settings of both sides: `changes` are those that differ from the preset's scorer."""

    changes: dict[str, Any] = field(default_factory=dict)
    window: int = PRESET.window


CASES = [
    Case(),
    Case({"kernel_size": 21}),  # as their scripts for RULER
    Case({"alpha": 1.0, "kernel_size": 1}),
    Case({"alpha": 0.7, "drift": 100}),
    Case({"kernel_size": 9, "drift": 33}, window=8),
]
# KV heads, query heads, head size, hidden size, tokens.
SHAPES = [(4, 4, 16, 64, 700), (2, 8, 32, 24, 513), (3, 6, 16, 96, 6000)]


@dataclass(frozen=True)
class Layer:
    """What a layer has of a prompt.

    Attributes:
        queries: `[T, H, D]`. keys, values: `[G, T, D]`.
        output: `[C, H * D]`, the weight of the output projection.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    output: torch.Tensor

    @property
    def group(self) -> int:
        """The number of query heads that share a KV head."""
        return self.queries.shape[1] // len(self.keys)

    def with_own_keys(self) -> Layer:
        """Return the layer in which each query head has a KV head."""
        keys, values = (x.repeat_interleave(self.group, 0) for x in (self.keys, self.values))
        return Layer(self.queries, keys, values, self.output)

    def to(self, dtype: torch.dtype) -> Layer:
        return Layer(*(x.to(dtype) for x in vars(self).values()))


def made_up(shape: tuple[int, ...], window: int, seed: int) -> Layer:
    """Return noise; in some heads the window's second half attends to other places than its first.

    From the first head to the last one these move from far behind to far before.
    """
    heads_kv, heads, size, hidden, tokens = shape
    generator = torch.Generator().manual_seed(seed)

    def noise(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator)

    queries, keys = noise(tokens, heads, size), noise(heads_kv, tokens, size)
    queries[..., 0], keys[..., 0] = 0.0, torch.linspace(-4, 4, tokens)
    strength = torch.linspace(-size, size, heads) / 4
    queries[-window : -window // 2, :, 0] = strength
    queries[-window // 2 :, :, 0] = -strength
    return Layer(queries, keys, noise(heads_kv, tokens, size), noise(hidden, heads * size))


def at_edges(drifts: list[int], window: int, tokens: int, seed: int) -> Layer:
    """Return noise in which the best token of head i moves by `drifts[i]` between the halves."""
    layer = made_up((len(drifts), len(drifts), 16, 64, tokens), window, seed)
    queries, keys, middle = layer.queries, layer.keys, tokens // 2
    queries[-window:], keys[..., :2] = 0.1 * queries[-window:], 0.0
    queries[-window : -window // 2, :, :2] = torch.tensor([4.0, 0.0])
    queries[-window // 2 :, :, :2] = torch.tensor([0.0, 4.0])
    for head, drift in enumerate(drifts):
        keys[head, middle, 1] = keys[head, middle + drift, 0] = 5.0
    return layer


def import_theirs(folder: Path) -> Any:
    """Return their class, past the packages that its file imports and the class does not need."""
    file = folder / "restkv" / "restkv_utils.py"
    if not file.is_file():
        raise SystemExit(f"{file} is missing: FOLDER must be a checkout of an-yongqi/rest-kv")
    package, caches = ModuleType("transformers"), ModuleType("transformers.cache_utils")
    vars(caches)["Cache"] = object
    spec = importlib.util.spec_from_file_location("restkv_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {package.__name__: package, caches.__name__: caches}):
        spec.loader.exec_module(module)
    return module.RestKVCluster


class Watch(TorchFunctionMode):
    """Notes what goes through `topk`, and how wide and how far behind each pooling is."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[torch.Tensor] = []
        self.poolings: list[tuple[int, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.topk:
            self.scores.append(args[0])
        elif func is torch.nn.functional.pad:
            before, behind = args[1]
            self.poolings.append((before + behind + 1, (behind - before) // 2))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Found:
    """What theirs does.

    Attributes:
        scores: `[H, T - window]`. kept: `[H, budget]` in their order, without the window.
        poolings: of each head, its width and how far behind the token it lies.
    """

    scores: torch.Tensor
    kept: torch.Tensor
    poolings: list[tuple[int, int]]


def run_theirs(theirs: Any, layer: Layer, scorer: OutputChangeScorer, window: int) -> Found:
    """Run their code with the budget `scorer.top` before the window."""
    cluster = theirs(
        window_size=window,
        max_capacity_prompt=window + scorer.top,
        kernel_size=scorer.kernel_size,
        pooling="adaptive",
        use_wo=True,
        use_ema=True,
        alpha=scorer.alpha,
        metric_mode="after",
        tau=1.0,
        scale=scorer.drift,
    )
    own = layer.with_own_keys()
    keys, tokens = own.keys, own.keys.shape[1]
    with Watch() as watch:
        returned, _ = cluster.update_kv(
            keys[None], own.queries.transpose(0, 1)[None], own.values[None], None, 1, own.output
        )
    (scores,) = watch.scores
    places = []
    for mine, all_of_head in zip(returned[0], keys, strict=True):
        same = (mine[:, None] == all_of_head).all(dim=-1)
        assert (same.sum(dim=1) == 1).all(), "a returned key is none of the prompt, or two"
        places.append(same.int().argmax(dim=1))
    kept = torch.stack(places)
    last = torch.arange(tokens - window, tokens).expand(len(kept), window)
    assert torch.equal(kept[:, scorer.top :], last), "theirs does not end with the window"
    return Found(scores[0], kept[:, : scorer.top], watch.poolings)


def run_ours(layer: Layer, scorer: OutputChangeScorer, window: int) -> torch.Tensor:
    """Return our scores of the tokens before the window, `[G, T - window]`."""
    tokens, heads, size = layer.queries.shape
    view = ScorerInputs.of_tensors(
        layer.queries[-window:],
        layer.keys,
        layer.values,
        window=window,
        sinks=0,
        output=output_factors(layer.output.unflatten(1, (heads, size)).transpose(0, 1)),
    )
    return scorer.score(view)[:, : tokens - window]


def differences(ours: torch.Tensor, theirs: torch.Tensor, kept: torch.Tensor) -> Iterator[str]:
    """Yield what differs between `[n, T]` scores, and between our choice and the tokens `kept`."""
    largest = theirs.abs().amax(dim=1, keepdim=True)
    error = float(((ours - theirs).abs() / largest).max())
    if not error <= ROUNDING:  # or not a number
        yield f"scores differ by {error:.1e} of the largest"
    mine = ours.topk(kept.shape[1]).indices
    chosen = theirs.gather(1, kept)
    apart = (theirs.gather(1, mine) - chosen).abs() > ROUNDING * chosen
    if count := int(((mine != kept) & apart).sum()):
        yield f"{count} of {kept.numel()} indices differ at a budget of {kept.shape[1]}"


def with_settings(changes: dict[str, Any]) -> OutputChangeScorer:
    """Return the preset's scorer with other settings."""
    return OutputChangeScorer(**{**PRESET.scorer.model_dump(), **changes})


def compare(theirs: Any, case: Case) -> tuple[list[str], set[tuple[int, int]], int]:
    """Return what differs in all shapes and budgets, the poolings seen, the kept tokens."""
    problems, poolings, count = [], set(), 0
    for seed, shape in enumerate(SHAPES):
        layer = made_up(shape, case.window, seed)
        for budget in BUDGETS:
            scorer = with_settings(case.changes | {"top": budget})
            found = run_theirs(theirs, layer, scorer, case.window)
            poolings |= set(found.poolings)
            ours = run_ours(layer.with_own_keys(), scorer, case.window)
            what = list(differences(ours, found.scores, found.kept))
            count += found.kept.numel()
            if layer.group > 1:
                mean = found.scores.unflatten(0, (-1, layer.group)).mean(dim=1)
                kept = mean.topk(budget).indices
                ours = run_ours(layer, scorer, case.window)
                what += [f"groups: {x}" for x in differences(ours, mean, kept)]
                count += kept.numel()
            problems += [f"shape {shape}: {x}" for x in what]
    return problems, poolings, count


def compare_edges(theirs: Any) -> Iterator[str]:
    """Yield what differs where the drift is at a multiple of the setting, or next to one."""
    step, window = 40, 16
    drifts = [base + i for base in range(-3 * step, 3 * step + 1, step) for i in (-1, 0, 1)]
    scorer = with_settings({"drift": step, "top": 1})
    layer = at_edges(drifts, window, tokens=600, seed=1)
    found, ours = run_theirs(theirs, layer, scorer, window), run_ours(layer, scorer, window)
    for i, drift in enumerate(drifts):
        mine, other = ours[i : i + 1], found.scores[i : i + 1]
        known = drift <= 0 and drift % step == 0
        if known:  # theirs lies one position further behind
            mine, other = mine[:, 1:], other[:, :-1]
        what = list(differences(mine, other, other.topk(1).indices))
        moved = f"drift {drift}, setting {step}, their pooling {found.poolings[i]}"
        yield from (f"{moved}: {x}" for x in what)
        if known and not what:
            print(f"  known: {moved} is one position further behind than ours")


def in_half(theirs: Any) -> str:
    """Say how many tokens their code keeps in float16 and in float32 alike, preset's settings."""
    same, count = 0, 0
    for seed, shape in enumerate(SHAPES):
        layer = made_up(shape, PRESET.window, seed).to(torch.float16)
        scorer = with_settings({})
        half, full = (
            run_theirs(theirs, x, scorer, PRESET.window).kept
            for x in (layer, layer.to(torch.float32))
        )
        same += sum(int(torch.isin(a, b).sum()) for a, b in zip(half, full, strict=True))
        count += full.numel()
    return f"{same} of {count} tokens that theirs keeps in float32 it keeps in float16"


def main() -> int:
    """Compare all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="checkout of an-yongqi/rest-kv")
    theirs = import_theirs(parser.parse_args().folder)
    failed = 0
    for case in CASES:
        problems, poolings, count = compare(theirs, case)
        failed += bool(problems)
        widths, shifts = zip(*poolings, strict=True)
        print(
            f"window {case.window}, {case.changes or 'settings of the preset'}: "
            f"{'; '.join(problems) or f'{count} indices equal'}; pooled over {min(widths)} to "
            f"{max(widths)} scores, {min(shifts)} to {max(shifts)} positions behind"
        )
    problems = list(compare_edges(theirs))
    failed += bool(problems)
    print(f"at the edges of the pooling: {'; '.join(problems) or 'equal apart from the known'}")
    print(f"not compared: {in_half(theirs)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
