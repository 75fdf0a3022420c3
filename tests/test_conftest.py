# SPDX-License-Identifier: Apache-2.0
"""Tests of engines do not start on a GPU by accident."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import platforms

from tests import conftest

pytestmark = pytest.mark.cpu


class Item:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def get_closest_marker(self, name: str) -> bool:
        return name == self.mark


@pytest.fixture(autouse=True)
def forget() -> Any:
    conftest.taken_by_gpu.cache_clear()
    yield
    conftest.taken_by_gpu.cache_clear()


@pytest.mark.parametrize("found", [None, "vllm.platforms.cuda.CudaPlatform"])
def test_engines_are_skipped_where_vllm_finds_a_gpu(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setitem(platforms.builtin_platform_plugins, "cuda", lambda: found)
    item: Any = Item("engine")
    if found is None:
        conftest.pytest_runtest_setup(item)
    else:
        with pytest.raises(pytest.skip.Exception, match="VLLM_BUILD=cpu make test"):
            conftest.pytest_runtest_setup(item)
    conftest.pytest_runtest_setup(Item("cpu"))  # type: ignore[arg-type]
