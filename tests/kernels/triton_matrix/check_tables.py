# SPDX-License-Identifier: Apache-2.0
"""Tables, lengths and skips of a step, against the reference and by their definition."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import table_twins
from vllm_pyramid.kernels.table_records import StepRows, TableGroups
from vllm_pyramid.kernels.triton import tables as triton_tables

SLOTS, UNTOUCHED = 12, -9
# Blocks of each layer's entries: two layers that evict, and one that does not.
SIZES = [16, 32, 16]


class Case:
    """Tables of three layers; rows of a step are requests in slots 9, 2, 11, 0 and 5, and padding.

    Args:
        width: entries of a request in the first layer. lens: of the requests.
        held: whether their tables are apart from the step's.
    """

    def __init__(self, device, width, lens, skips, *, lanes=1, held=True):
        generator = torch.Generator().manual_seed(width)
        self.lens, self.lanes, self.held = [*lens, 0, 0], lanes, held
        widths = [lanes * width + (lanes > 1), lanes * -(-width // 2), width]
        self.stock = [
            torch.randint(1, 9999, (SLOTS, each), generator=generator).int() for each in widths
        ]
        self.sources = [table.clone().to(device) for table in self.stock]
        self.targets = self.sources
        if held or lanes > 1:
            rows = SLOTS * lanes
            self.targets = [
                torch.full((size, each), UNTOUCHED, dtype=torch.int32, device=device)
                for size, each in zip(
                    (rows, rows, SLOTS), (width, -(-width // 2), width), strict=True
                )
            ]
        count = 3 if held else 2
        self.groups = TableGroups.of(
            *(self.sources[:count], self.targets[:count], SIZES[:count], [0, 0, 4][:count], 2),
            per_layer=lanes,
            by_slot=held,
        )
        self.slots = [9, 2, 11, 0, 5][: len(lens)] if held else list(range(len(lens)))
        self.skips = torch.randint(0, 999, (SLOTS, 2 * lanes), generator=generator)
        for slot, of_request in zip(self.slots, skips, strict=True):
            self.skips[slot] = torch.tensor(of_request).repeat_interleave(lanes)
            # The lanes of a layer differ.
            self.skips[slot, lanes - 1 :: lanes] //= 2 if lanes > 1 else 1
        self.skips = self.skips.to(device)
        # As vLLM counts: 5 groups, one row for each slot.
        self.blocks = torch.zeros(5, SLOTS, dtype=torch.int32)
        for slot, length in zip(self.slots, lens, strict=True):
            self.blocks[4, slot] = min(-(-length // 16) + 1, width)  # with one for drafts
        self.out = [
            torch.full((2, SLOTS * lanes), UNTOUCHED, dtype=torch.int32, device=device)
            for _ in "ab"
        ]
        count = len(lens)
        self.rows = StepRows(torch.tensor(self.lens, dtype=torch.int32, device=device), count)
        if held:
            slots = torch.tensor(self.slots, device=device)
            self.rows = self.rows._replace(slots=slots, num_blocks=self.blocks.to(device))

    def run(self, function):
        function(self.groups, self.rows, self.skips, *self.out)
        return [*self.targets, *self.out]

    def check(self):
        """Check all entries of all tables: each kept one, and that no other one was written."""
        for layer in range(2):
            target = self.targets[layer].cpu()
            for lane in range(SLOTS * self.lanes):
                row, head = divmod(lane, self.lanes)
                before = torch.full((target.shape[1],), UNTOUCHED)
                if self.targets is self.sources:
                    before = self.stock[layer][row].long()
                if row >= len(self.lens):
                    assert torch.equal(target[lane].long(), before)
                    assert self.out[0][layer, lane] == self.out[1][layer, lane] == UNTOUCHED
                    continue
                length, skip, held = self.lens[row], 0, []
                if row < self.rows.num_reqs:
                    slot = self.slots[row]
                    skip = int(self.skips[slot, layer * self.lanes + head])
                    size = SIZES[layer]
                    held = self.stock[layer][slot, head :: self.lanes].tolist()
                    held = held[skip // size : -(-length // size)]
                assert target[lane].tolist() == held + before.tolist()[len(held) :]
                assert self.out[0][layer, lane] == max(0, length - skip)
                assert self.out[1][layer, lane] == skip
        if not self.held:
            return
        for row, entries in enumerate(self.targets[2].tolist()):
            if row < self.rows.num_reqs:
                count = int(self.blocks[4, self.slots[row]])
                held = self.stock[2][self.slots[row], :count].tolist()
                assert entries == held + [UNTOUCHED] * (len(entries) - count)
            elif row < len(self.lens):
                assert not any(entries)
            else:
                assert set(entries) == {UNTOUCHED}


# Skip nothing, some blocks, parts of a block, all but a token, or more than there is (a piece of a
# prompt that layers compute apart).
SHORT = [60, 1, 128, 97, 80], [[0, 0], [0, 0], [32, 96], [96, 96], [96, 90]]
# Longer than a tile; shifts of one entry, of a tile, and of one more and one less.
LONG = (
    [47_000, 48_000, 33_333, 31_999, 18_000],
    [[16, 32], [16_384, 32_768], [16_400, 32_800], [16_368, 31_968], [0, 17_984]],
)
CASES = {"short": (8, *SHORT), "long": (3000, *LONG), "one": (2000, [31_999], [[16_400, 0]])}


@pytest.mark.parametrize(("held", "lanes"), [(True, 1), (False, 1), (True, 3), (False, 3)])
@pytest.mark.parametrize("name", CASES)
def test_a_row_is_what_its_layer_keeps(device, name, held, lanes):
    found, by_reference = (Case(device, *CASES[name], lanes=lanes, held=held) for _ in "ab")
    pairs = zip(
        found.run(triton_tables.gather_tables),
        by_reference.run(table_twins.gather_tables),
        strict=True,
    )
    for own, right in pairs:
        assert torch.equal(own, right)
    found.check()


@pytest.mark.parametrize("held", [True, False])
def test_a_step_without_requests_has_lengths_alone(device, held):
    case = Case(device, *CASES["short"], held=held)
    case.rows = StepRows(case.rows.seq_lens, 0)
    *tables, lens, skips = case.run(triton_tables.gather_tables)
    for table, stock in zip(tables, case.stock, strict=True):
        assert (table == UNTOUCHED).all() if held else torch.equal(table.cpu(), stock)
    assert lens[:, :7].tolist() == [case.lens] * 2 and not skips[:, :7].any()
    assert (lens[:, 7:] == UNTOUCHED).all()
