# SPDX-License-Identifier: Apache-2.0
"""The figures of `lab.openvino_peer`, and its processes, without OpenVINO."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.openvino_peer.__main__ import VARIANTS, Child
from lab.openvino_peer.engines import answer_all, eviction_sizes, u8_blocks
from lab.openvino_peer.figures import reference_of, rightness, sameness, speeds, summary

pytestmark = pytest.mark.cpu


class Countdown:
    """A side that gives each request one token a step, the second one from the second step on."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.steps = 0

    def add(self, index: int, prompt: Sequence[int], answer: int) -> None:
        self.left[index] = answer

    def step(self) -> dict[int, list[int]] | None:
        if not any(self.left.values()):
            return None
        self.steps += 1
        new = {}
        for index in self.left:
            if self.left[index] and (index == 0 or self.steps > 1):
                self.left[index] -= 1
                new[index] = [10 * index + self.left[index]]
        return new

    def about(self) -> dict[str, Any]:
        return {"steps": self.steps}


class Short(Countdown):
    """A side whose second answer ends with its first token."""

    def add(self, index: int, prompt: Sequence[int], answer: int) -> None:
        self.left[index] = answer if index == 0 else 1


def test_every_token_has_the_time_of_its_step() -> None:
    found = answer_all(Countdown(), [[1], [2, 3]], 3)
    assert found["tokens"] == [[2, 1, 0], [12, 11, 10]] and found["steps"] == 4
    first, second = found["times"]
    assert first[1:] == second[:2] and sorted(first) == first and second[2] > first[2]
    with pytest.raises(RuntimeError, match=r"answers of 3 tokens have \[3, 1\]"):
        answer_all(Short(), [[1], [2, 3]], 3)


def test_speeds_over_the_job_and_while_all_decode() -> None:
    times = [[1.0, 2.0, 3.0], [2.0, 3.0, 6.0]]
    assert speeds(times, times) == {
        "seconds": 6.0,
        "tokens_per_s": 1.0,
        "decode_tokens_per_s": 2.0,  # from second 2 to second 3
        "first_median_s": 1.5,
        "token_median_ms": 1000.0,
        "at_once": 2,
    }
    one_by_one = speeds(times, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert one_by_one["decode_tokens_per_s"] is None and one_by_one["at_once"] == 1


def test_answers_are_compared_within_their_side() -> None:
    assert sameness([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 0, 7, 8]]) == {
        "equal": 0.5,
        "common": 0.625,
    }
    assert reference_of("openvino evict u8", VARIANTS) == "openvino"
    assert reference_of("vllm snapkv", VARIANTS) == "vllm full"
    assert reference_of("vllm snapkv", ["stock", "vllm snapkv"]) == "stock"
    assert reference_of("openvino u8", ["openvino u8", "vllm full"]) is None
    found = rightness([" 12345.", "the 12345"], ["12345", "12345"])
    assert found == {"right": "1 of 2", "right_interval": [0.095, 0.905]}


def test_kvcrush_keeps_a_part_of_the_same_budget() -> None:
    assert eviction_sizes(256, 64, crush=False) == (256, 0)
    assert eviction_sizes(256, 64, crush=True) == (224, 1)
    assert eviction_sizes(768, 64, crush=True) == (768 - 5 * 32, 5)
    assert u8_blocks(136, 64) == 136 * 8192 // 4864


def test_a_table_has_medians_and_ranges() -> None:
    row = {"variant": "stock", "decode_tokens_per_s": None, "first_median_s": 1.5}
    row |= {"token_median_ms": 20.0, "right": "1 of 2", "at_once": 2}
    rows = [{**row, "tokens_per_s": speed} for speed in (3.0, 1.0, 2.0)]
    assert summary(rows).splitlines()[2] == (
        "| stock | 2 (1 to 3) |  | 1.5 (1.5 to 1.5) | 20 (20 to 20) | 1 of 2 |  |  | 2 |"
    )


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = {"variant": "openvino", "threads": 1, "prompts": []}
    with pytest.raises(RuntimeError, match=r"openvino: (?s:.*)No module named 'openvino'"):
        Child(job, sys.executable, tmp_path / "log")
