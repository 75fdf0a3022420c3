# SPDX-License-Identifier: Apache-2.0
"""Real models from Python packages, for the tests that need one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.models.folders import MissingModelError, model_folder


def real_model(name: str) -> Path:
    """Return a model's folder; skip the test where its package is not installed.

    `make test` installs `smollm2` alone.
    """
    try:
        return model_folder(name)
    except MissingModelError as error:
        pytest.skip(f"`make {'smollm2' if name == 'smollm2' else 'models'}` installs it: {error}")
