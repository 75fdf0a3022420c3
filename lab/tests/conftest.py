# SPDX-License-Identifier: Apache-2.0
"""Fixtures of engines; the settings of all tests are in the root's conftest.py."""

from tests.engine.conftest import engines, tiny_model

__all__ = ["engines", "tiny_model"]
