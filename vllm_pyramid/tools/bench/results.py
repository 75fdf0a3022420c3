# SPDX-License-Identifier: Apache-2.0
"""From samples to the rows of a result: medians, ranges, and ratios to the baseline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from vllm_pyramid.tools.bench import cost
from vllm_pyramid.tools.bench.cost import Machine
from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.samples import PERCENTILES, Sample

# What a row holds, in the order of the files. A measure that does not give a value leaves it empty.
#
# output_tokens_per_s: end to end. decode_tokens_per_s, decode_batch: of steady decode steps.
# cached_share: of the prompts' tokens, found in the prefix cache; ttft_hit, ttft_miss: of requests
# that found something there, and that did not. prefill_share: of the time. ttft, tpot: time to the
# first token (waiting included) and per token
# after it. output_low ... decode_high: the smallest and largest repetition.
# ..._ratio: to the baseline, of rates or of median times: the median of the repetitions' ratios,
# and the smallest and the largest.
# resident_max: the most requests that decoded at once; over HTTP the most that ran at once.
# peak_blocks: the most blocks of one layer allocated at once, all layers added up; decode_blocks:
# without prefills. Over HTTP both are seen twice a second, so they are lower bounds.
# to_their_end: so many of the resident requests finish for certain without preemption.
# before_queueing: so many can be sent at once before one waits for admission.
# predicted_...: by the cost model. host_bytes: of V in host memory, on top of the KV cache.
_KEYS = ["policy", "budget"]
_JOB = ["prompt_len", "output_len", "num_prompts", "turns", "shared_len"]
_CONDITIONS = ["pool_prompts", "request_rate"]
_TIMES = [f"{metric}_p{percent}_ms" for metric in ("ttft", "tpot") for percent in PERCENTILES]
_RATES = ["output_tokens_per_s", "decode_tokens_per_s", "decode_batch", "prefill_share"]
_CACHED = ["cached_share", "ttft_miss_ms", "ttft_hit_ms"]
_MEDIANS = [*_RATES, *_CACHED, *_TIMES]
_LARGEST = ["resident_max", "to_their_end", "before_queueing"]
_LARGEST_BLOCKS = ["peak_blocks", "decode_blocks", "preemptions"]
_RANGES = {"output": "output_tokens_per_s", "decode": "decode_tokens_per_s"}
_RATIOS = _RANGES | {"ttft": "ttft_p50_ms", "tpot": "tpot_p50_ms"}
_SPREAD = [f"{name}_{end}" for name in _RANGES for end in ("low", "high")]
_RATIO_COLUMNS = [f"{name}_ratio{end}" for name in _RATIOS for end in ("", "_low", "_high")]
_PREDICTED = ["predicted_decode_tokens_per_s", "predicted_resident", "predicted_prefill_share"]
_COLUMNS = [
    *("measure", *_KEYS, *_JOB, *_CONDITIONS, *_RATES, *_CACHED, *_LARGEST, *_TIMES),
    *(*_LARGEST_BLOCKS, "repetitions", *_SPREAD, *_RATIO_COLUMNS, *_PREDICTED, "host_bytes"),
]
_WHOLE = [*_LARGEST, *_LARGEST_BLOCKS, "predicted_resident", "host_bytes"]


def make_rows(
    measure: str,
    job: Job,
    variants: Sequence[Variant],
    samples: Sequence[tuple[Variant, Sample]],
    machine: Machine | None,
) -> pd.DataFrame:
    """A row for each variant under each condition.

    Args:
        variants: the first one is the baseline.
        samples: in the order in which they were measured. Beside what was measured a sample has
            `pool_prompts` and, over HTTP, `request_rate`.
        machine: for the rates that the cost model allows; None: without them.
    """
    frame = pd.DataFrame(
        [dict(zip(_KEYS, _identity(v), strict=True)) | sample for v, sample in samples],
        columns=[*_KEYS, *_CONDITIONS, *_MEDIANS, *_LARGEST, *_LARGEST_BLOCKS],
    )
    numbers = frame.columns[len(_KEYS) :]
    frame[numbers] = frame[numbers].astype(float)
    keys = [*_CONDITIONS, *_KEYS]
    frame["repetition"] = frame.groupby(keys, dropna=False).cumcount()
    base = frame[(frame[_KEYS] == _identity(variants[0])).all(axis=1)]
    pairs = frame.merge(base, "left", [*_CONDITIONS, "repetition"], suffixes=("", "_base"))
    for name, column in _RATIOS.items():
        frame[f"{name}_ratio"] = pairs[column] / pairs[f"{column}_base"]
    groups = frame.groupby(keys, sort=False, dropna=False)
    ratios = [f"{name}_ratio" for name in _RATIOS]
    rows = groups[_MEDIANS + ratios].median().join(groups[_LARGEST + _LARGEST_BLOCKS].max())
    rows["repetitions"] = groups.size()
    spread = _RANGES | {r: r for r in ratios}
    for name, column in spread.items():
        rows[f"{name}_low"] = groups[column].min()
        rows[f"{name}_high"] = groups[column].max()
    rows = rows.reset_index()
    rows["measure"] = measure
    for name in _JOB:
        rows[name] = getattr(job, name)
    by_identity = {tuple(_identity(variant)): variant for variant in variants}
    found: list[Any] = list(rows.itertuples())
    predicted = [
        _predict(job, by_identity[row.policy, row.budget], row.pool_prompts, row.decode_batch,
                 row.output_tokens_per_s, machine)
        for row in found
    ]  # fmt: skip
    rows = rows.join(pd.DataFrame(predicted, columns=[*_PREDICTED, "host_bytes"]))
    return rows[_COLUMNS].astype(dict.fromkeys(_WHOLE, "Int64"))


def _identity(variant: Variant) -> list[str]:
    return [variant.name, variant.budget or "100%"]


def _predict(
    job: Job,
    variant: Variant,
    pool_prompts: float,
    decode_batch: float,
    whole_job: float,
    machine: Machine | None,
) -> dict[str, float | None]:
    """What the cost model says of a row: `_PREDICTED`, and `host_bytes`."""
    made: dict[str, float | None] = {}
    needs = job.needs(variant)
    batch = 0
    if not variant.is_peer:
        pool_bytes = job.pool_blocks(variant, pool_prompts) * job.block_bytes(variant)
        batch = min(job.num_prompts, cost.resident(pool_bytes, needs))
        made["predicted_resident"] = batch
        made["host_bytes"] = job.host_bytes(variant, pool_prompts)
    if machine is None:
        return made
    if not pd.isna(decode_batch):
        step = cost.decode_step(job.shape, machine, decode_batch, needs)
        made["predicted_decode_tokens_per_s"] = decode_batch / step
    if batch and not pd.isna(whole_job):
        share = cost.prefill_share(job.shape, machine, needs, job.num_prompts, batch)
        made["predicted_prefill_share"] = share
    return made


def labelled(rows: pd.DataFrame) -> pd.DataFrame:
    """With a column `label`, as in tables and pictures."""
    plain = rows["policy"].where(rows["budget"] == "100%", rows["policy"] + " " + rows["budget"])
    return rows.assign(label=plain)


def records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows for JSON; an empty value is None."""
    made: list[dict[str, Any]] = json.loads(rows.to_json(orient="records", double_precision=15))
    return made


def as_json(rows: pd.DataFrame, about: Mapping[str, object]) -> str:
    """What was run, and the rows."""
    return json.dumps({**about, "rows": records(rows)}, indent=1) + "\n"
