# SPDX-License-Identifier: Apache-2.0
"""The layout and the lengths of shifted tables, without the kernel that shifts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_pyramid.attention.shifted_tables import ShiftedTables
from vllm_pyramid.kernels.triton import tables as triton_tables

pytestmark = pytest.mark.cpu

WIDTH = 8


def test_each_layers_part_begins_as_a_tensor_of_its_own_would() -> None:
    for rows in (1, 3, 4, 1023):
        shapes = [(5, 16), (3, 32), (3, 32)]  # of layers with V and without
        shifted = ShiftedTables(slice(0, 3), rows, shapes, torch.device("cpu"))
        assert [table.shape for table in shifted.tables] == [(rows, width) for width, _ in shapes]
        assert shifted.lens.shape == (3, rows)
        for layer in range(3):
            for tensor in (shifted.tables, shifted.lens, shifted.skips):
                part = tensor[layer].storage_offset() * tensor[layer].element_size()
                assert part % 16 == 0


def test_lengths_of_thinned_steps_keep_what_the_device_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host counts drafts that were rejected; of a piece of a prompt it knows the length."""
    monkeypatch.setattr(triton_tables, "shift_block_tables_", lambda *args, **more: None)
    shifted = ShiftedTables(slice(0, 2), 4, [(WIDTH, 16)] * 2, torch.device("cpu"))
    skips = np.array([[16, 0], [32, 16]], np.int32)
    host_lens = np.array([100, 48], np.int32)  # one decodes, the other's piece is thinned
    own_lens = np.array([[100, 48], [100, 30]], np.int32)
    on_device = torch.tensor([97, 48], dtype=torch.int32)  # three drafts were rejected
    shifted.update(on_device, skips, host_lens, own_lens)
    assert shifted.lens[:, :2].tolist() == [[97 - 16, 48], [97 - 32, 30 - 16]]
    assert shifted.max_lens is not None and shifted.max_lens.tolist() == [84, 68]
