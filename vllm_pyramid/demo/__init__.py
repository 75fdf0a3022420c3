# SPDX-License-Identifier: Apache-2.0
"""The built-in model and the demonstration that `make demo` runs.

The model is a small Llama with RANDOM weights, generated on the first use: untrained, its words are
noise. It exercises the engine; it says nothing about quality.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The folder of the built-in Hugging Face model, generated on the first call (a few seconds).

    It lies in `$VLLM_PYRAMID_CACHE`, or `~/.cache/vllm-pyramid` when that is not set.

    Raises:
        RuntimeError: the cache folder cannot be written, or Python lacks `pydoc_data`.
    """
    from vllm_pyramid.demo.build import cached_model

    return cached_model()
