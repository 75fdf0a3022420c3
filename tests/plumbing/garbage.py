# SPDX-License-Identifier: Apache-2.0
"""Cheap collections of garbage in processes that start several engines."""

from __future__ import annotations

import gc

_freeze = gc.freeze


def spare_collections() -> None:
    """Collections of garbage look at what engines left, and no more at what was imported.

    vLLM collects eight times in an engine's life, and freezes and unfreezes the heap. A million
    objects of imports made that half of the time of a short test. What an engine has made is never
    frozen here, so that it goes with its engine.
    """
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None
