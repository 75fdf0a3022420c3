# SPDX-License-Identifier: Apache-2.0
"""The files of traces: of ranks and stages put together, and of one request among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_pyramid.step.trace_files import read_kept

TOKENS = 6
# Of two layers and two KV heads.
KEPT = {0: [[0, 1, 5], [0, 2, 5]], 1: [[0, 5], [4, 5]]}
COUNTS = [[2, 1, 1, 0, 0, 2], [1, 0, 0, 0, 1, 2]]


def write(path: Path, kept: dict[int, list[list[int]]], held: list[int], **changes: object) -> None:
    arrays: dict[str, Any] = {
        f"kept_{layer}": np.array(rows, np.int32) for layer, rows in kept.items()
    }
    common = {"request_id": "r", "prompt_len": TOKENS, "layers": [1, 3], "held": held}
    np.savez(path, **(arrays | common | changes))


def test_counts_of_one_file(tmp_path: Path) -> None:
    write(tmp_path / "r.npz", KEPT, [3, 2])
    write(tmp_path / "r@9.npz", KEPT, [3, 2], computed=9)  # has a prompt_len here: another request
    (kept, _) = read_kept(tmp_path)
    assert kept.counts.tolist() == COUNTS
    assert (kept.layers, kept.heads, kept.tokens) == ([1, 3], [2, 2], TOKENS)


def test_later_evictions_are_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "r@9.npz", request_id="r", computed=9)
    assert read_kept(tmp_path) == []


@pytest.mark.parametrize("by", ["rank", "stage", "both"])
def test_parts_are_put_together(by: str, tmp_path: Path) -> None:
    for layer, heads in KEPT.items():
        for head, places in enumerate(heads):
            stage, rank = f"-stage{layer}" * (by != "rank"), f"-rank{head}" * (by != "stage")
            if by == "stage" and head == 0:
                write(tmp_path / f"r{stage}.npz", {layer: heads}, [3, 2])
            elif by == "rank" and layer == 0:
                of_rank = {each: [rows[head]] for each, rows in KEPT.items()}
                write(tmp_path / f"r{rank}.npz", of_rank, [3, 2])
            elif by == "both":
                write(tmp_path / f"r{stage}{rank}.npz", {layer: [places]}, [3, 2])
    (kept,) = read_kept(tmp_path)
    assert kept.counts.tolist() == COUNTS and kept.heads == [2, 2]


def test_missing_parts_are_noticed(tmp_path: Path) -> None:
    write(tmp_path / "r-stage0.npz", {0: KEPT[0]}, [3, 2])
    with pytest.raises(ValueError, match="a stage lacks"):
        read_kept(tmp_path)
    write(tmp_path / "r-stage0.npz", KEPT, [4, 2])
    with pytest.raises(ValueError, match="not \\[8, 4\\]"):
        read_kept(tmp_path)


def test_lanes_of_ranks_are_put_together(tmp_path: Path) -> None:
    """Two layers of two lanes, of each of which each of two ranks has a KV head."""
    of_lanes = {0: [[0, 1, 5], [0, 2, 5]], 1: [[5], [4]], 2: [[0, 5], [4, 5]], 3: [[1], [1]]}
    for rank in range(2):
        of_rank = {lane: [rows[rank]] for lane, rows in of_lanes.items()}
        changes = {"layers": [1, 1, 3, 3], "kv_heads": 2}
        write(tmp_path / f"r-rank{rank}.npz", of_rank, [3, 1, 2, 1], **changes)
    (kept,) = read_kept(tmp_path)
    assert (kept.layers, kept.heads) == ([1, 3], [4, 4])
    assert kept.counts.tolist() == [[2, 1, 1, 0, 1, 3], [1, 2, 0, 0, 1, 2]]
