# SPDX-License-Identifier: Apache-2.0
"""Rates, shares and percentiles from steps that are known."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from vllm_pyramid.bench.measure import Measurement, Step, Timing, merge, percentile, summarise
from vllm_pyramid.bench.report import tables
from vllm_pyramid.bench.rows import Row, as_csv, as_json, with_ratios

pytestmark = pytest.mark.cpu


def step(seconds: float, prompt: int, decoding: int, waiting: bool, finished: int = 0) -> Step:
    return Step(seconds, prompt, decoding, waiting, finished, blocks=10 * decoding + prompt)


STEPS = [
    step(4.0, 100, 0, True),  # prefills
    step(5.0, 100, 1, True),
    step(1.0, 0, 2, True),  # steady: somebody waits
    step(2.0, 0, 2, True),
    step(3.0, 0, 2, True, finished=1),
    step(4.0, 100, 1, False, finished=1),
    step(0.5, 0, 1, False, finished=2),  # draining: nobody waits any more
]


def test_summary() -> None:
    timings = [Timing(4.0, 10.0, 4), Timing(9.0, 19.0, 3)]
    made = summarise(STEPS, timings, preemptions=2)
    assert made.output_tokens == 7 and made.seconds == 19.5
    assert made.output_tokens_per_s == pytest.approx(7 / 19.5)
    assert made.decode_tokens_per_s == pytest.approx(6 / 6.0) and made.decode_batch == 2
    assert made.prefill_share == pytest.approx(13 / 19.5)
    assert made.resident_max == 2 and made.preemptions == 2
    assert made.peak_blocks == 110 and made.decode_blocks == 20
    assert made.ttft_ms[0] == pytest.approx(6500.0)
    assert made.tpot_ms[0] == pytest.approx(1e3 * (2.0 + 5.0) / 2)


def test_plentiful_memory_is_steady_until_the_first_ends() -> None:
    steps = [step(1.0, 9, 0, False), step(1.0, 0, 4, False), step(9.0, 0, 3, False, finished=1)]
    made = summarise(steps, [Timing(1.0, 2.0, 2)])
    assert made.decode_tokens_per_s == 4.0


def test_a_job_without_steady_decoding_says_none() -> None:
    made = summarise([step(1.0, 9, 1, False)], [Timing(1.0, 1.0, 1)])
    assert made.decode_tokens_per_s is None and made.decode_batch is None
    assert made.decode_blocks is None and made.tpot_ms == []


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    for percent in (0, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def _run(seconds: float, decode: float | None) -> Measurement:
    return Measurement(
        output_tokens=10,
        seconds=seconds,
        decode_tokens_per_s=decode,
        decode_batch=2.0,
        prefill_share=0.5,
        resident_max=int(seconds),
        peak_blocks=5,
        decode_blocks=None,
        ttft_ms=[seconds, 2.0, 3.0],
        tpot_ms=[],
    )


def test_repetitions_become_medians() -> None:
    merged = merge([_run(3.0, 1.0), _run(1.0, None), _run(9.0, 5.0)])
    assert merged.seconds == 3.0 and merged.decode_tokens_per_s == 3.0
    assert merged.resident_max == 9 and merged.ttft_ms == [3.0, 2.0, 3.0]
    assert merged.decode_blocks is None
    with pytest.raises(ValueError, match="repetitions of one job"):
        merge([_run(1.0, 1.0), replace(_run(1.0, 1.0), output_tokens=11)])


def test_ratios_are_of_pairs_not_of_medians() -> None:
    """A slow moment that meets both A and B of a repetition leaves the ratio alone."""
    row = Row("throughput", "snapkv", "12%", 64, 8, 2)
    made = with_ratios(
        row,
        {"output": [20.0, 2.0, 33.0], "decode": [None, 4.0, 6.0]},
        {"output": [10.0, 1.0, 11.0], "decode": [1.0, 2.0, None]},
    )
    assert (made.output_ratio, made.output_ratio_low, made.output_ratio_high) == (2.0, 2.0, 3.0)
    assert (made.decode_ratio, made.decode_ratio_low) == (2.0, 2.0)


def test_rows_are_written_and_shown() -> None:
    full = Row("throughput", "full", "100%", 64, 8, 2, 4.0, output_tokens_per_s=10.0)
    full = replace(full, prefill_share=0.5)
    other = replace(full, policy="snapkv", budget="12%", output_ratio=2.0)
    other = replace(other, output_ratio_low=1.5, output_ratio_high=2.25)
    other = replace(other, predicted_prefill_share=0.754)
    written = json.loads(as_json([full, other], {"machine": None}))
    assert written["rows"][1] == asdict(other) and "machine" in written
    read = list(csv.DictReader(io.StringIO(as_csv([full, other]))))
    assert read[1]["policy"] == "snapkv" and read[0]["decode_tokens_per_s"] == ""
    (shown,) = tables("throughput", [full, other])
    assert [str(column.header) for column in shown.columns] == [
        "policy",
        "output tok/s",
        "of baseline",
        "prefill (model)",
    ]
    assert list(shown.columns[0].cells) == ["full", "snapkv 12%"]
    assert list(shown.columns[2].cells) == ["", "2.00 (1.50–2.25)"]
    assert list(shown.columns[3].cells) == ["50 %", "50 % (75 %)"]
