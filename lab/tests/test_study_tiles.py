# SPDX-License-Identifier: Apache-2.0
"""The tiles that the kernels choose against those that `lab/method_study` chooses."""

from __future__ import annotations

import pytest
import torch

from lab.tests.study_scripts import study_scripts
from tests.kernels.uneven_tiles import uneven
from vllm_pyramid.methods.tiles.attention import choose_tiles

pytestmark = pytest.mark.cpu

SCALE = 0.125


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 3), (1, 4)])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.95])
def test_the_choice_is_the_studys(kv_heads: int, group: int, top_p: float) -> None:
    query, keys, cache, blocks = uneven(kv_heads, group, tiles=12)
    with study_scripts(("model", "gates_tiles")) as modules:
        right = modules["gates_tiles"].chosen_tiles(
            query.transpose(0, 1), keys.transpose(0, 1), SCALE, top_p, together=True
        )[::group]
    found = choose_tiles(query, cache, blocks, SCALE, top_p)
    assert torch.equal(found.transpose(0, 1), right)
    share = float(found.sum()) / (kv_heads * 12 * 13 / 2)
    assert share < 0.98 and found[:, :, 0].all() and found.diagonal(dim1=0, dim2=2).all()
