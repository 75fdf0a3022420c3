# SPDX-License-Identifier: Apache-2.0
"""Rates, shares and percentiles from steps that are known; rows from samples that are known."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.report import make_rows, records, table
from vllm_pyramid.tools.bench.samples import Request, Step, engine_sample, latencies
from vllm_pyramid.tools.bench.scheduler_log import steps_with_room
from vllm_pyramid.tools.bench.shapes import SHAPES

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


def requests(*timings: tuple[float, float, int]) -> list[Request]:
    return [Request(*timing, prompt_len=100) for timing in timings]


def test_a_sample_of_an_engine() -> None:
    made = engine_sample(STEPS, requests((4.0, 10.0, 4), (9.0, 19.0, 3)), 2)
    assert made["output_tokens_per_s"] == pytest.approx(7 / 19.5)
    assert made["decode_tokens_per_s"] == pytest.approx(6 / 6.0) and made["decode_batch"] == 2
    assert made["prefill_share"] == pytest.approx(13 / 19.5)
    assert made["resident_max"] == 2 and made["preemptions"] == 2
    assert made["peak_blocks"] == 110 and made["decode_blocks"] == 20
    assert made["ttft_p50_ms"] == pytest.approx(6500.0)
    assert made["tpot_p50_ms"] == pytest.approx(1e3 * (2.0 + 5.0) / 2)
    assert made["ttft_p90_ms"] == pytest.approx(8500.0) and "ttft_p99_ms" not in made


def test_what_was_in_the_prefix_cache() -> None:
    found = [
        Request(seconds, 10.0, 4, 100, cached)
        for seconds, cached in zip((4.0, 1.0, 2.0, 6.0), (0, 60, 20, 0), strict=True)
    ]
    made = engine_sample(STEPS, found, 0)
    assert made["cached_share"] == 0.2
    assert made["ttft_miss_ms"] == 5000.0 and made["ttft_hit_ms"] == 1500.0
    assert "cached_share" not in engine_sample(STEPS, found[:1], 0)
    assert "ttft_miss_ms" not in engine_sample(STEPS, found[1:3], 0)


def test_the_99th_percentile_needs_twenty_requests() -> None:
    timings = [Request(0.001 * (index + 1), 1.0, 2, 9) for index in range(20)]
    assert latencies(timings)["ttft_p99_ms"] == pytest.approx(19.81)
    assert "ttft_p99_ms" not in latencies(timings[1:])


def test_plentiful_memory_is_steady_until_the_first_ends() -> None:
    steps = [step(1.0, 9, 0, False), step(1.0, 0, 4, False), step(9.0, 0, 3, False, finished=1)]
    made = engine_sample(steps, requests((1.0, 2.0, 2)), 0)
    assert made["decode_tokens_per_s"] == 4.0


def sample(output: float, decode: float | None = None, **more: Any) -> dict[str, Any]:
    made = {"pool_prompts": 4.0, "output_tokens_per_s": output, "decode_tokens_per_s": decode}
    return made | more


def rows_of(*samples: tuple[Variant, dict[str, Any]]) -> pd.DataFrame:
    return make_rows("throughput", JOB, [STOCK, SNAPKV], samples)


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


def test_each_condition_has_its_own_baseline() -> None:
    rows = rows_of(
        *((STOCK, sample(10.0, pool_prompts=4.0)), (SNAPKV, sample(20.0, pool_prompts=4.0))),
        *((STOCK, sample(1.0, pool_prompts=1.0)), (SNAPKV, sample(4.0, pool_prompts=1.0))),
    )
    assert rows["pool_prompts"].tolist() == [4.0, 4.0, 1.0, 1.0]
    assert rows["output_ratio"].tolist() == [1.0, 2.0, 1.0, 4.0]


def test_rows_are_written_and_shown(tmp_path: Path) -> None:
    full = sample(10.0, prefill_share=0.5, resident_max=3)
    rows = rows_of((STOCK, full), (SNAPKV, full | {"output_tokens_per_s": 20000.0}))
    rows.to_csv(tmp_path / "rows.csv", index=False)
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert read[1]["policy"] == "snapkv" and read[0]["decode_tokens_per_s"] == ""
    assert read[0]["resident_max"] == "3"
    shown = {line.split()[0]: line.split()[1:] for line in table(rows).splitlines()}
    assert shown["policy"] == ["stock", "snapkv"] and shown["budget"] == ["100%", "12%"]
    assert shown["output_tokens_per_s"] == ["10", "20,000"]
    assert shown["prefill_share"] == ["0.5", "0.5"] and shown["resident_max"] == ["3", "3"]
    assert "decode_tokens_per_s" not in shown  # nothing measured


def test_room_by_hand() -> None:
    """Two tables; the last blocks of two requests have 8 tokens left, that of the third one."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group, group]),
        running=[SimpleNamespace(num_computed_tokens=tokens) for tokens in (40, 40, 47)],
    )
    steps = [steps_with_room(scheduler, free, 30) for free in (0, 1, 2, 5, 6, 7, 8, 12)]
    # They need 2 blocks from the 2nd step on, 6 from the 9th, 8 from the 18th, 12 from the 25th.
    assert steps == [1, 1, 8, 8, 17, 17, 24, 30]
