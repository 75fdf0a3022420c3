# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin that gives every attention layer its own KV budget and its own block table.

Importing this package is light: vLLM is imported when `LLM` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pyramid.version import __version__

if TYPE_CHECKING:
    from vllm_pyramid.llm import LLM

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from vllm_pyramid.compat.versions import check_vllm

        check_vllm()
        from vllm_pyramid.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
