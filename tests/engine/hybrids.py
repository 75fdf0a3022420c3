# SPDX-License-Identifier: Apache-2.0
"""Hybrid models of which tests compare what is computed with and without prefix caching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.families import make_family
from tests.engine.support import is_cpu_build

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 200,
    "max_num_seqs": 8,
    "max_model_len": 1024,
    "kv_policy": "snapkv",
    "kv_budget": 64,
    "kv_policy_args": {"window": 8},
}
_WITH_EXPERTS = ("llama4", "gpt-oss")


def make_hybrid(family: str, folder: Path) -> Path:
    """A model of a family in its own folder; the test is skipped where the build cannot run it."""
    if family in _WITH_EXPERTS and not is_cpu_build():
        pytest.skip("this build of vLLM has no CPU kernels for experts")
    return make_family(family, folder / family)
