# SPDX-License-Identifier: Apache-2.0
"""Choose few variants that hold every pair of settings which all variants hold together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations


def covering(variants: Mapping[str, Iterable[str]]) -> list[str]:
    """Return names of variants in which each setting, and each pair of two, is found.

    A pair that no variant has need not be found. The variant with the most pairs that are not found
    yet is chosen first, so the choice depends on nothing but `variants`.

    Args:
        variants: the settings of each variant that differ from the defaults.
    """
    pairs = {name: _pairs(settings) for name, settings in variants.items()}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda name: len(pairs[name] & missing))
        chosen.append(best)
        missing -= pairs.pop(best)
    return chosen


def _pairs(settings: Iterable[str]) -> set[tuple[str, ...]]:
    names = sorted(set(settings))
    return {(name,) for name in names} | set(combinations(names, 2))
