# SPDX-License-Identifier: Apache-2.0
"""The built-in model and the demonstration that `make demo` runs.

The model, a small Llama trained to find facts in English text, comes with the package
(`vllm_pyramid/tools/demo/model/README.md` says how it was made).
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """Return the folder of the built-in Hugging Face model."""
    return Path(__file__).parent / "model"
