# SPDX-License-Identifier: Apache-2.0
"""Engines shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.models import write_model
from tests.engine.support import EnginePool, Models, Start


@pytest.fixture(scope="module")
def engines() -> Iterator[EnginePool]:
    """One engine at a time; tests of a file that ask for the same settings in a row share it."""
    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """`tiny_model(name)`: the folder of a model of `models.SHAPES`, written on the first call."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = write_model(name, tmp_path_factory.mktemp(name))
        return written[name]

    return get


@pytest.fixture(scope="module")
def tiny(engines: EnginePool, tiny_model: Models) -> Start:
    """`tiny(name, **settings)`: an engine of `engines` with a model of `models.SHAPES`."""
    return lambda name, **settings: engines.get(tiny_model(name), **settings)


@pytest.fixture(scope="module")
def demo(engines: EnginePool, random_model: Path) -> Start:
    """`demo(**settings)`: an engine of `engines` with the random model of all tests."""
    return lambda **settings: engines.get(random_model, **settings)
