# SPDX-License-Identifier: Apache-2.0
"""Presses as scorers: each keeps what kvpress itself keeps, index for index."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_pyramid.methods.kvpress_presses import PRESSES, REFUSED, KvpressScorer, _import, _seeded
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.scorer_inputs import ScorerInputs

pytestmark = pytest.mark.cpu

SHARES = (0.7, 0.5, 0.1)
# Queries that a press looks at; None: all but those of the sinks, as kvpress's own code does.
CASES: list[tuple[str, dict[str, Any], int | None]] = [
    ("CURPress", {}, 8),
    ("CURPress", {"leverage_type": "key", "local_window_size": 7}, 8),
    ("CURPress", {"use_random_leverage": True}, 8),
    ("CapPress", {}, None),
    ("CapPress", {"n_sink": 0, "tau": 2.0}, None),
    ("ExpectedAttentionPress", {}, None),
    ("ExpectedAttentionPress", {"use_covariance": False, "epsilon": 0.01}, None),
    ("KeyDiffPress", {}, 8),
    ("KnormPress", {}, 8),
    ("LagKVPress", {"lag_size": 64}, 8),
    ("LagKVPress", {"cross_scoring": True}, 8),
    ("LeverageScorePress", {}, 8),
    ("RandomPress", {"seed": 4}, 8),
    ("RandomPress", {}, 8),
    ("SnapKVPress", {"window_size": 32}, 32),
    ("SnapKVPress", {"window_size": 16, "kernel_size": 3}, 40),
    ("TOVAPress", {}, 8),
]


@pytest.fixture(scope="module")
def parity() -> Iterator[Any]:
    try:
        importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("`make smollm2` installs kvpress")
    script = Path(__file__).parents[1] / "parity" / "scorers.py"
    spec = importlib.util.spec_from_file_location("kvpress_parity_presses", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def policy_of(press: str, settings: dict[str, Any], window: int = 64) -> Policy:
    scorer = {"kind": "kvpress", "press": press, "settings": settings}
    return load_policy("snapkv", 4096, {"window": window, "sinks": 4, "scorer": scorer})


def inputs_of(data: Any, window: int, scale: float = 1.0) -> ScorerInputs:
    """The layer's prompt, with the queries of the window; `scale` beside 1 / sqrt(D)."""
    tokens, _, size = data.plain.shape
    cos, sin = data.rotary.at(torch.arange(tokens))
    queries = data.rotary.turn(data.plain, cos[:, None], sin[:, None])
    return ScorerInputs.of_tensors(
        queries[-window:] / scale,
        data.keys,
        data.values,
        window=window,
        sinks=4,
        layer=3,
        num_layers=8,
        scale=scale * size**-0.5,
        rotary=data.rotary,
        knows_rotary=True,
    )


def scores_of_kvpress(parity: Any, data: Any, press: str, settings: dict[str, Any]) -> torch.Tensor:
    """The press's own scores, from hidden states of the whole prompt."""
    module, hidden, *rest = parity.press_arguments(data, 3, 8)
    plain = data.rotary.turn_back(data.keys.transpose(0, 1), torch.arange(data.keys.shape[1]))
    module.k_proj = lambda states: plain.flatten(1)[None]
    found = getattr(_import(PRESSES[press].module), press)(**settings)
    with _seeded(torch.device("cpu"), 3):
        scores: torch.Tensor = found.score(module, hidden, *rest)[0]
    return scores


@pytest.mark.parametrize(("press", "settings", "queries"), CASES)
def test_the_same_tokens_as_kvpress(
    press: str, settings: dict[str, Any], queries: int | None, parity: Any
) -> None:
    for seed, shape in enumerate(parity.SHAPES):
        data = parity.made_up(shape, seed)
        window = queries or shape[3] - settings.get("n_sink", 4)
        policy = policy_of(press, settings, window=window)
        assert isinstance(policy.scorer, KvpressScorer)
        theirs = scores_of_kvpress(parity, data, press, settings)
        for scale in (1.0, 0.5):  # a layer that scales otherwise, with queries to match
            ours = policy.scorer.score(inputs_of(data, window, scale))
            assert ours.shape == theirs.shape and ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            for share in SHARES:
                count = int(ours.shape[1] * share)
                kept = [
                    x.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort().values
                    for x in (ours, theirs)
                ]
                assert (kept[0] == kept[1]).all(), (press, shape, share)


def test_all_presses_are_compared() -> None:
    assert {press for press, *_ in CASES} == set(PRESSES)
    assert not PRESSES.keys() & REFUSED.keys()


def test_random_numbers_do_not_depend_on_the_batch(parity: Any) -> None:
    data = parity.made_up(parity.SHAPES[0], 1)
    for press in ("RandomPress", "LeverageScorePress"):
        scorer = policy_of(press, {}).scorer
        state = torch.get_rng_state()
        first = scorer.score(inputs_of(data, 8))
        assert (torch.get_rng_state() == state).all()
        torch.rand(7)
        assert (scorer.score(inputs_of(data, 8)) == first).all()


def test_layers_that_presses_do_not_know(parity: Any) -> None:
    data = parity.made_up(parity.SHAPES[0], 1)
    inputs = inputs_of(data, 64)
    inputs.logit_sinks = torch.zeros(inputs.num_query_heads)
    with pytest.raises(ValueError, match="SnapKVPress knows no learned sinks"):
        policy_of("SnapKVPress", {}).scorer.score(inputs)
    inputs = inputs_of(data, 64)
    inputs.rotary = type(data.rotary)(data.rotary.cos_sin, halves=False)
    with pytest.raises(ValueError, match="rotates all channels of a head by halves"):
        policy_of("CapPress", {}).scorer.score(inputs)
    policy_of("SnapKVPress", {}).scorer.score(inputs)  # it rotates nothing
