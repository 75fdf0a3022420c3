# SPDX-License-Identifier: Apache-2.0
"""Rates, shares and percentiles from steps that are known; rows from samples that are known."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from vllm_pyramid.tools.bench import pictures
from vllm_pyramid.tools.bench.cost import Machine
from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.report import tables
from vllm_pyramid.tools.bench.results import as_json, make_rows, records
from vllm_pyramid.tools.bench.samples import Request, Step, Timing, engine_sample, latencies
from vllm_pyramid.tools.bench.shapes import SHAPES

pytestmark = pytest.mark.cpu

JOB = Job(SHAPES["small"], 64, 8, 2, 4.0)
STOCK, SNAPKV = Variant("stock", None), Variant("snapkv", "12%")


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


def requests(*timings: Timing) -> list[Request]:
    return [Request(timing, 100, 0, False) for timing in timings]


def test_a_sample_of_an_engine() -> None:
    made = engine_sample(STEPS, requests(Timing(4.0, 10.0, 4), Timing(9.0, 19.0, 3)), 2)
    assert made["output_tokens_per_s"] == pytest.approx(7 / 19.5)
    assert made["decode_tokens_per_s"] == pytest.approx(6 / 6.0) and made["decode_batch"] == 2
    assert made["prefill_share"] == pytest.approx(13 / 19.5)
    assert made["resident_max"] == 2 and made["preemptions"] == 2
    assert made["peak_blocks"] == 110 and made["decode_blocks"] == 20
    assert made["ttft_p50_ms"] == pytest.approx(6500.0)
    assert made["tpot_p50_ms"] == pytest.approx(1e3 * (2.0 + 5.0) / 2)
    assert made["ttft_p90_ms"] == pytest.approx(8500.0) and "ttft_p99_ms" not in made


def test_what_was_in_the_prefix_cache() -> None:
    timings = [Timing(seconds, 10.0, 4) for seconds in (4.0, 1.0, 2.0, 6.0)]
    found = [
        Request(timing, 100, cached, False)
        for timing, cached in zip(timings, (0, 60, 20, 0), strict=True)
    ]
    made = engine_sample(STEPS, found, 0)
    assert made["cached_share"] == 0.2
    assert made["ttft_miss_ms"] == 5000.0 and made["ttft_hit_ms"] == 1500.0
    assert "cached_share" not in engine_sample(STEPS, found[:1], 0)
    assert "ttft_miss_ms" not in engine_sample(STEPS, found[1:3], 0)


def test_the_99th_percentile_needs_twenty_requests() -> None:
    timings = [Timing(0.001 * (index + 1), 1.0, 2) for index in range(20)]
    assert latencies(timings)["ttft_p99_ms"] == pytest.approx(19.81)
    assert "ttft_p99_ms" not in latencies(timings[1:])


def test_plentiful_memory_is_steady_until_the_first_ends() -> None:
    steps = [step(1.0, 9, 0, False), step(1.0, 0, 4, False), step(9.0, 0, 3, False, finished=1)]
    made = engine_sample(steps, requests(Timing(1.0, 2.0, 2)), 0)
    assert made["decode_tokens_per_s"] == 4.0


def test_a_job_without_steady_decoding_says_none() -> None:
    made = engine_sample([step(1.0, 9, 1, False)], requests(Timing(1.0, 1.0, 1)), 0)
    assert made["decode_tokens_per_s"] is None and made["decode_batch"] is None
    assert made["decode_blocks"] is None and "tpot_p50_ms" not in made


def sample(output: float, decode: float | None = None, **more: Any) -> dict[str, Any]:
    made = {"pool_prompts": 4.0, "output_tokens_per_s": output, "decode_tokens_per_s": decode}
    return made | more


def rows_of(
    *samples: tuple[Variant, dict[str, Any]], machine: Machine | None = None
) -> pd.DataFrame:
    return make_rows("throughput", JOB, [STOCK, SNAPKV], samples, machine)


def test_ratios_are_of_pairs_not_of_medians() -> None:
    """A slow moment that meets both A and B of a repetition leaves the ratio alone."""
    rows = rows_of(
        *((STOCK, sample(10.0, 1.0)), (SNAPKV, sample(20.0, None, resident_max=3))),
        *((STOCK, sample(1.0, 2.0)), (SNAPKV, sample(2.0, 4.0, resident_max=5))),
        *((STOCK, sample(11.0, None)), (SNAPKV, sample(33.0, 6.0))),
    )
    stock, snapkv = records(rows)
    assert (stock["policy"], stock["budget"], stock["repetitions"]) == ("stock", "100%", 3)
    assert stock["output_tokens_per_s"] == 10.0 and stock["output_ratio"] == 1.0
    assert (stock["output_low"], stock["output_high"]) == (1.0, 11.0)
    ratios = [snapkv[f"output_ratio{end}"] for end in ("", "_low", "_high")]
    assert ratios == [2.0, 2.0, 3.0]
    assert (snapkv["decode_tokens_per_s"], snapkv["decode_ratio"]) == (5.0, 2.0)
    assert (snapkv["decode_low"], snapkv["decode_high"]) == (4.0, 6.0)
    assert snapkv["resident_max"] == 5 and stock["resident_max"] is None
    assert snapkv["predicted_decode_tokens_per_s"] is None and snapkv["predicted_resident"] == 2


def test_each_condition_has_its_own_baseline() -> None:
    rows = rows_of(
        *((STOCK, sample(10.0, pool_prompts=4.0)), (SNAPKV, sample(20.0, pool_prompts=4.0))),
        *((STOCK, sample(1.0, pool_prompts=1.0)), (SNAPKV, sample(4.0, pool_prompts=1.0))),
    )
    assert rows["pool_prompts"].tolist() == [4.0, 4.0, 1.0, 1.0]
    assert rows["output_ratio"].tolist() == [1.0, 2.0, 1.0, 4.0]
    assert rows["predicted_resident"].tolist() == [2, 2, 1, 1]


def test_what_the_cost_model_allows() -> None:
    samples = [(STOCK, sample(10.0, 5.0, decode_batch=2.0)), (SNAPKV, sample(20.0))]
    stock, snapkv = records(rows_of(*samples, machine=Machine(1e9, 1e10)))
    assert stock["predicted_decode_tokens_per_s"] > 0
    assert snapkv["predicted_decode_tokens_per_s"] is None
    assert 0 < stock["predicted_prefill_share"] < 1


def test_rows_are_written_shown_and_drawn(tmp_path: Path) -> None:
    full = sample(10.0, prefill_share=0.5, resident_max=3)
    rows = rows_of((STOCK, full), (SNAPKV, full | {"output_tokens_per_s": 20.0}))
    rows = rows.assign(predicted_prefill_share=[None, 0.754])
    rows.loc[1, ["output_ratio_low", "output_ratio_high"]] = [1.5, 2.25]
    written = json.loads(as_json(rows, {"machine": None}))
    assert written["rows"] == records(rows) and "machine" in written
    # The form that docs/results has.
    kept = json.loads(
        (Path(__file__).parents[3] / "docs/results/bench-prefix-turns.json").read_text(
            encoding="utf-8"
        )
    )
    assert list(written["rows"][0]) == list(kept["rows"][0])
    rows.to_csv(tmp_path / "rows.csv", index=False)
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert read[1]["policy"] == "snapkv" and read[0]["decode_tokens_per_s"] == ""
    assert read[0]["resident_max"] == "3"
    (shown,) = tables(rows)
    assert shown.title == "2 requests of 64 + 8 tokens; room for 4 whole requests; medians of 1"
    lines = zip(*(column.cells for column in shown.columns), strict=True)
    assert [str(column.header) for column in shown.columns] == ["", "stock", "snapkv 12%"]
    assert list(lines) == [
        ("output tok/s, end to end", "10", "20"),
        ("  of baseline", "1.00 (1.00–1.00)", "2.00 (1.50–2.25)"),
        ("share of prefill", "0.5", "0.5"),
        ("  by the cost model", "", "0.754"),
        ("requests at once", "3", "3"),
        ("  by the cost model", "2", "2"),
    ]
    assert pictures.draw("throughput", rows, tmp_path).stat().st_size > 1000


@pytest.mark.parametrize(
    ("measure", "condition"), [("pressure", "pool_prompts"), ("latency", "request_rate")]
)
@pytest.mark.parametrize("values", [[2.0], [4.0, 2.0]])
def test_pictures_of_a_sweep(
    measure: str, condition: str, values: list[float], tmp_path: Path
) -> None:
    samples = [
        (variant, sample(10.0, ttft_p50_ms=5.0, tpot_p50_ms=7.0, resident_max=2) | {condition: v})
        for v in values
        for variant in (STOCK, SNAPKV)
    ]
    rows = make_rows(measure, JOB, [STOCK, SNAPKV], samples, None)
    assert pictures.draw(measure, rows, tmp_path).stat().st_size > 1000
    assert len(tables(rows)) == len(values)
