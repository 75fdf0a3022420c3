# SPDX-License-Identifier: Apache-2.0
"""The built-in model (its origin: `model/README.md`) and the demonstration of `make demo`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """Return the folder of the built-in Hugging Face model."""
    return Path(__file__).parent / "model"
