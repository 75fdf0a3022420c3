# SPDX-License-Identifier: Apache-2.0
"""The allocator `utility`: what it does with a profile, against kvpress's LUKVPress, refusals."""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.methods.views import MadeUp
from vllm_pyramid.methods.kvpress_presses import _import
from vllm_pyramid.methods.utility_profile import UtilityAllocator, shape_of
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.allocator import Allocator, Reals
from vllm_pyramid.policy.kinds import parse_component

pytestmark = pytest.mark.cpu

LAYERS = 5
MODEL = SimpleNamespace(
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=1000,
)


def rows_of(seed: int, layers: int = LAYERS, tokens: int = 200) -> Reals:
    """Rows as a profile has them: whole numbers of `tokens`, a row's mean its budget exactly."""
    source = np.random.default_rng(seed)
    taken = source.permutation(np.repeat(np.arange(layers), tokens))
    counts = [
        np.bincount(taken[: percent * layers * tokens // 100], minlength=layers)
        for percent in range(1, 100)
    ]
    return np.array(counts) / tokens


def allocator_of(rows: Reals, **more: Any) -> UtilityAllocator:
    found = parse_component(Allocator, {"kind": "utility", "keep": rows.tolist(), **more})
    assert isinstance(found, UtilityAllocator)
    return found


def policy_of(rows: Reals, **more: Any) -> Policy:
    allocator = {"kind": "utility", "keep": rows.tolist(), **more}
    own = {"allocator": allocator, "sinks": 0, "window": 0, "min_tokens": 0}
    return load_policy("knorm", "12%", own)


def test_whole_percents_get_their_rows_and_others_what_lies_between() -> None:
    rows = rows_of(0)
    allocator = allocator_of(rows)
    for percent in range(1, 100):
        lengths = allocator.allocate(2 * percent, LAYERS, 200)
        assert (lengths == np.rint(200 * rows[percent - 1])).all()
    between = allocator.curve(25, LAYERS, 200)  # 12.5 %
    assert between == pytest.approx(100 * (rows[11] + rows[12]))
    first = allocator.curve(1, LAYERS, 200)  # half a percent: half of the first row
    assert first == pytest.approx(100 * rows[0])
    last = allocator.curve(199, LAYERS, 200)  # 99.5 %
    assert last == pytest.approx(100 * (rows[98] + 1))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20), st.integers(0, 2_000_000), st.floats(0, 1))
def test_sums_and_bounds(seed: int, capacity: int, share: float) -> None:
    """Also of rows that were rounded to the digits of a file."""
    mean = int(share * capacity)
    lengths = allocator_of(rows_of(seed).round(4)).allocate(mean, LAYERS, capacity)
    assert lengths.sum() == LAYERS * mean
    assert lengths.min() >= 0 and lengths.max() <= capacity


@pytest.mark.parametrize(("seed", "ratio"), [(0, 0.88), (1, 0.5), (2, 0.94), (3, 0.01), (4, 0.99)])
@pytest.mark.parametrize("tokens", [200, 333])
def test_lukv_press_keeps_the_same_where_a_layer_has_one_head(
    seed: int, ratio: float, tokens: int
) -> None:
    """The tokens of each layer, index for index, by the code of kvpress with our table."""
    try:
        importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("`make smollm2` installs kvpress")
    rows = rows_of(seed)
    module_of_press = _import("lukv_press")

    class ByNorm(module_of_press.ScorerPress):  # type: ignore[misc, name-defined]
        def score(self, module: Any, hidden: Any, keys: torch.Tensor, *_: Any) -> torch.Tensor:
            return -keys.norm(dim=-1)

    press = module_of_press.LUKVPress(ByNorm(), ratio, sink=0, window=0)
    press._budget_curves = (1 - rows[::-1])[:, :, None]
    percent = round(100 * (1 - ratio))
    mean = round(percent * tokens / 100)
    lengths = allocator_of(rows).allocate(mean, LAYERS, tokens)
    scorer = policy_of(rows).scorer
    for layer, length in enumerate(lengths.tolist()):
        made = MadeUp(kv_heads=1, heads=4, tokens=tokens, seed=100 * seed + layer)
        module = SimpleNamespace(
            config=SimpleNamespace(_attn_implementation="sdpa"), layer_idx=layer
        )
        press.compress(module, None, made.keys[None], made.values[None], None, {})
        dropped = torch.zeros(tokens, dtype=torch.bool)
        if module.masked_key_indices is not None:
            dropped[module.masked_key_indices[2]] = True
        theirs = int((~dropped).sum())
        # With 333 tokens each layer is rounded: theirs by itself, ours to the exact total.
        # Their press keeps one token at least, which ours leaves to window and sinks.
        assert length == theirs if tokens == 200 and length else abs(length - theirs) <= 1
        ours = scorer.score(made.view(window=0, sinks=0)).topk(theirs).indices
        assert set(ours[0].tolist()) == set((~dropped).nonzero()[:, 0].tolist())


def test_a_policy_serves_it_and_keeps_it_as_data() -> None:
    rows = rows_of(5)
    policy = policy_of(rows, model=shape_of(MODEL))
    plan = policy.plan(200, LAYERS, 16)
    assert plan.estimate().end.keep.sum() == 24 * LAYERS
    again = Policy.model_validate_json(json.dumps(policy.as_data()))
    assert again == policy and hash(again) == hash(policy)
    assert plan.estimate().end.keep.tolist() == np.rint(200 * rows[11]).tolist()
    assert again.plan(200, LAYERS, 16).estimate().end.keep.tolist() == (
        plan.estimate().end.keep.tolist()
    )


def _served(**changes: Any) -> Any:
    config = SimpleNamespace(**{**vars(MODEL), **changes})
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))


def test_the_profile_of_another_model_is_refused() -> None:
    policy = policy_of(rows_of(6), model=shape_of(MODEL))
    policy.allocator.check_config(policy, _served())
    for changes in ({"hidden_size": 96}, {"num_key_value_heads": 4}, {"vocab_size": 1001}):
        with pytest.raises(ValueError, match=r"has the profile of another model.*calibrate for"):
            policy.allocator.check_config(policy, _served(**changes))
    with pytest.raises(ValueError, match="profile of 5 layers, but this model has 6"):
        policy.plan(200, 6, 16)
    free = policy_of(rows_of(6))
    free.allocator.check_config(free, _served(hidden_size=96))


def test_head_sizes_that_a_configuration_does_not_say() -> None:
    old = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, vocab_size=9)
    assert shape_of(old) == "2 layers, 4 and 4 heads of 16, width 64 and None, 9 token ids"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:98], "99 rows, for budgets of 1 to 99 %"),
        (lambda rows: rows[:, :0], "of equally many numbers"),
        (lambda rows: rows[::-1], "row 1 of keep is for a budget of 1 % and keeps 99.0 %"),
        (lambda rows: 1 - rows, "row 1 of keep is for a budget of 1 %"),
        (lambda rows: rows - 0.5, "shares of 0 to 1"),
        (lambda rows: rows * np.nan, "shares of 0 to 1"),
    ],
)
def test_wrong_profiles_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocator_of(change(rows_of(7)))


def test_rows_of_different_lengths_are_refused() -> None:
    rows = rows_of(7).tolist()
    rows[3] = rows[3][:-1]
    with pytest.raises(ValueError, match="equally many numbers"):
        parse_component(Allocator, {"kind": "utility", "keep": rows})
