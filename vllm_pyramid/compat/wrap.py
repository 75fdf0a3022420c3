# SPDX-License-Identifier: Apache-2.0
"""Put functions of ours in front of vLLM's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_WRAPPERS = "_vllm_pyramid_wrappers"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let calls of a class's or module's function `name` call `wrapper(original, ...)`.

    Idempotent: a second wrapper of the same name changes nothing. AttributeError: vLLM has no such
    function.
    """
    original = getattr(owner, name)
    wrappers: frozenset[str] = getattr(original, _WRAPPERS, frozenset())
    key = f"{wrapper.__module__}.{wrapper.__qualname__}"
    if key in wrappers:
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(call, _WRAPPERS, wrappers | {key})
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(call) if is_static else call)
