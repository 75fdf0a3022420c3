# SPDX-License-Identifier: Apache-2.0
"""The scripts of `lab/method_study` as modules, and a step of noise for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

FOLDER = Path(__file__).parents[1] / "method_study"


@contextmanager
def study_scripts(
    names: Sequence[str], also: Sequence[str] = ()
) -> Iterator[dict[str, ModuleType]]:
    """Import scripts as they see each other; forget them, and `also` others, in the end."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in (*names, *also):
            sys.modules.pop(name, None)


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    tokens: int
    behind: int
    head_size: int


def step_of_noise(model: Any, layer: int, sizes: Sizes, scale: float = 1.0) -> tuple[Any, Any]:
    """A step of a layer, of noise times `scale`, and its cache."""
    torch.manual_seed(3)
    heads, kv_heads, tokens, behind, size = sizes
    cache = model.LayerCache(
        torch.randn(tokens, heads, size),
        torch.randn(kv_heads, tokens, size),
        torch.randn(kv_heads, tokens, size),
    )
    own = (scale * torch.randn(count, behind, size) for count in (heads, kv_heads, kv_heads))
    return model.Step(layer, *own, size**-0.5), cache
