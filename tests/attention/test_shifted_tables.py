# SPDX-License-Identifier: Apache-2.0
"""Shifted tables of a step: their memory, and what is sent to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.shifted_worker import Host, launch_tables
from vllm_pyramid.attention import shifted_tables
from vllm_pyramid.attention.shifted_tables import HeldTables, ShiftedTables, Slots

WIDTH = 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_tables(monkeypatch, Host())


def test_each_layers_part_begins_as_a_tensor_of_its_own_would() -> None:
    for rows in (1, 3, 4, 1023):
        shapes = [(5, 16), (3, 32), (3, 32)]  # of layers with V and without
        shifted = ShiftedTables(slice(0, 3), rows, shapes, CPU)
        assert [table.shape for table in shifted.tables] == [(rows, width) for width, _ in shapes]
        assert shifted.lens.shape == (3, rows)
        for layer in range(3):
            for tensor in (shifted.tables, shifted.lens, shifted.skips):
                part = tensor[layer].storage_offset() * tensor[layer].element_size()
                assert part % 16 == 0


def test_lengths_of_thinned_steps_keep_what_the_device_knows() -> None:
    """The host counts drafts that were rejected; of a piece of a prompt it knows the length."""
    shifted = ShiftedTables(slice(0, 2), 4, [(WIDTH, 16)] * 2, CPU)
    skips = np.array([[16, 0], [32, 16]], np.int32)
    host_lens = np.array([100, 48], np.int32)  # one decodes, the other's piece is thinned
    own_lens = np.array([[100, 48], [100, 30]], np.int32)
    on_device = torch.tensor([97, 48], dtype=torch.int32)  # three drafts were rejected
    shifted.update(on_device, skips, host_lens, own_lens)
    assert shifted.lens[:, :2].tolist() == [[97 - 16, 48], [97 - 32, 30 - 16]]
    assert shifted.max_lens is not None and shifted.max_lens.tolist() == [84, 68]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is sent to the device."""
    found: list[Any] = []

    def upload(values: Any, device: torch.device) -> torch.Tensor:
        found.append(values.tolist())
        return torch.from_numpy(values)

    monkeypatch.setattr(shifted_tables, "upload", upload)
    return found


@pytest.mark.parametrize("held", [True, False])
def test_only_skips_that_changed_are_sent(sent: list[Any], held: bool) -> None:
    """Of a request's slot where vLLM holds its table, else of its row in the batch."""
    shapes = [(WIDTH, 16)] * 2
    sources = [torch.arange(40, dtype=torch.int32).view(5, 8) + 100 * layer for layer in range(2)]
    shifted = ShiftedTables(slice(1, 3), 5, shapes, CPU, HeldTables(sources) if held else None)

    def step(requests: list[int], skips: list[list[int]]) -> None:
        count = len(requests)
        places = np.array(requests)
        slots = Slots(places, torch.from_numpy(places), torch.zeros(1, 1).int())
        if not held:
            for table, source in zip(shifted.tables, sources, strict=True):
                table[:count] = source[places]
        lens = torch.tensor([100] * count + [0], dtype=torch.int32)  # with a row of padding
        of_layers = np.array([[0] * count, *skips], np.int32)  # one of the stage below
        host_lens = np.full(count, 100, np.int32)
        shifted.update(lens, of_layers, host_lens, slots=slots if held else None)
        assert shifted.skips[:, :count].tolist() == skips
        assert shifted.lens[:, : count + 1].tolist() == [
            [100 - skip for skip in of_layer] + [0] for of_layer in skips
        ]
        for layer, table in enumerate(shifted.tables):
            for row, request in enumerate(requests):
                first = skips[layer][row] // 16
                kept = sources[layer][request, first:7].tolist()
                assert table[row, : len(kept)].tolist() == kept

    step([4, 2], [[0, 0], [0, 0]])
    assert sent == []
    step([4, 2], [[0, 32], [0, 64]])  # one request has evicted
    assert sent == [[[2 if held else 1, 32, 64]]]
    step([4, 2], [[0, 32], [0, 64]])
    assert len(sent) == 1
    step([2, 4], [[32, 0], [64, 0]])  # the batch's order changes
    assert sent[1:] == ([] if held else [[[0, 32, 64], [1, 0, 0]]])
    step([2, 4, 0], [[32, 0, 16], [64, 0, 16]])
    assert sent[-1] == [[0 if held else 2, 16, 16]]
    before = len(sent)
    step([2], [[0], [0]])  # another request has the slot, or this one was preempted
    assert sent[before:] == [[[2 if held else 0, 0, 0]]]
