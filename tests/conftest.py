# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests. vLLM is not imported here: most tests do not need it (8 seconds)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MARKS = ("cpu", "engine", "gpu")

# Before anything imports vLLM, transformers or torch; children inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test has a mark: one without would silently not run in `make test`."""
    unmarked = [
        item.nodeid for item in items if not any(item.get_closest_marker(mark) for mark in MARKS)
    ]
    if unmarked:
        raise pytest.UsageError(
            f"mark these tests with one of {', '.join(MARKS)}: {', '.join(unmarked)}"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model: 8 layers, 8 query and 4 KV heads, head size 32."""
    from tests.random_model import Shape, write_model
    from vllm_pyramid.eval.topics import topics

    folder = tmp_path_factory.mktemp("random-model")
    write_model(folder, Shape(), list(topics().values()))
    return folder
