# SPDX-License-Identifier: Apache-2.0
"""How a back end finds the kernels of a method: the part of `contract.py` that all share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def of_back_end(name: str) -> Callable[[str], Any]:
    """Return `Ops.of_method` of the back end `name`."""

    @functools.cache
    def of_method(package: str, /) -> Any:
        return importlib.import_module(f"{package}.{name}")

    return of_method
