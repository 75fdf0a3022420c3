# SPDX-License-Identifier: Apache-2.0
"""The evictions of a step on the device of the attention."""

from __future__ import annotations

import numpy as np
import torch

from tests import steps
from tests.steps import make_call
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.step_evictions import StepEvictions

WIDTH = 8


def make_evictions(rows: list[int]) -> StepEvictions:
    kept_lens = np.arange(3 * len(rows)).reshape(3, len(rows)).tolist()
    return steps.make_evictions([100 + index for index in range(len(rows))], kept_lens, rows=rows)


def test_evictions_are_uploaded_once_a_step() -> None:
    policy = load_policy("pyramidkv")
    tables = torch.arange(8, dtype=torch.int32)[:, None].repeat(1, WIDTH)
    step = make_evictions([4, 0, 7])
    everyone, some = np.array([0, 1, 2]), np.array([0, 2])
    layers = [step.batch(make_call(tables, layer=layer), policy, everyone) for layer in range(3)]
    for batch in layers:
        assert batch.query_ends is layers[0].query_ends
        assert batch.keeps.untyped_storage().data_ptr() == (
            layers[0].keeps.untyped_storage().data_ptr()
        )
    again = step.batch(make_call(tables), policy, everyone.copy())
    assert again.query_ends is layers[0].query_ends
    part = [step.batch(make_call(tables, layer=layer), policy, some) for layer in range(3)]
    assert part[0].tables[:, 0].tolist() == [4, 7]
    assert part[0].query_ends.tolist() == [100, 303]
    assert part[0].lens.tolist() == part[0].host_lens.tolist() == [100, 102]
    keeps = [[0, 2], [3, 5], [6, 8]]
    assert [batch.keeps.tolist() for batch in part] == keeps
    assert [batch.host_keeps.tolist() for batch in part] == keeps
    assert {part[0].keeps.dtype, part[0].lens.dtype, part[0].query_ends.dtype} == {torch.int32}
    assert step.batch(make_call(tables), policy, everyone).query_ends is layers[0].query_ends
    later = make_evictions([1, 2, 3])  # the same choice in another step is something else
    assert later.batch(make_call(tables), policy, everyone).tables[:, 0].tolist() == [1, 2, 3]
