# SPDX-License-Identifier: Apache-2.0
"""From samples to rows (medians, ranges, ratios to the baseline), files and tables."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd

import vllm_pyramid
from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.options import EngineOptions
from vllm_pyramid.tools.bench.prepare import processor
from vllm_pyramid.tools.bench.samples import PERCENTILES, Sample

Samples = list[tuple[Variant, Sample]]

# What a row holds, in the order of the files. A measure that does not give a value leaves it empty.
#
# output_tokens_per_s: end to end. decode_tokens_per_s, decode_batch: of steady decode steps.
# prefill_share: of the time. read_share: of the pages that generated tokens see, those that they
# read, with a policy that selects. cached_share: of the prompts' tokens, found in the prefix cache;
# ttft_hit, ttft_miss: of requests that found something there, and that did not.
# ttft, tpot: time to the first token (waiting included) and per token after it.
# resident_max: the most requests that decoded at once.
# before_queueing: requests that decode when the first one has to wait.
# peak_blocks: the most blocks of one layer allocated at
# once, summed over the layers; decode_blocks: the most in steps without a prompt.
# output_low ... decode_high: the smallest and the largest repetition.
# ..._ratio: to the baseline, of rates or of median times: the median of the repetitions' ratios,
# and the smallest and the largest.
# turn_mode: how recorded sessions go on, if they do. requests_per_min: think times included.
# agreement: of the tokens that the whole cache answers, those before the first that differs.
_KEYS = ["policy", "budget", "turn_mode"]
_JOB = ["prompt_len", "output_len", "num_prompts", "turns", "shared_len"]
_CONDITIONS = ["pool_prompts"]
_TIMES = [f"{metric}_p{percent}_ms" for metric in ("ttft", "tpot") for percent in PERCENTILES]
_RATES = ["output_tokens_per_s", "decode_tokens_per_s", "decode_batch", "prefill_share"]
_MEDIANS = [
    *(*_RATES, "requests_per_min", "agreement", "read_share"),
    *("cached_share", "ttft_miss_ms", "ttft_hit_ms", *_TIMES),
]
_LARGEST = [*("resident_max", "before_queueing", "peak_blocks", "decode_blocks", "preemptions")]
_RANGES = {"output": "output_tokens_per_s", "decode": "decode_tokens_per_s"}
_RATIOS = _RANGES | {"ttft": "ttft_p50_ms", "tpot": "tpot_p50_ms"}
_SPREAD = [
    *(f"{name}_{end}" for name in _RANGES for end in ("low", "high")),
    *(f"{name}_ratio{end}" for name in _RATIOS for end in ("", "_low", "_high")),
]
_COLUMNS = [
    *("measure", *_KEYS, *_JOB, *_CONDITIONS, *_MEDIANS, *_LARGEST, "repetitions", *_SPREAD)
]


def make_rows(
    measure: str, job: Job, variants: Sequence[Variant], samples: Sequence[tuple[Variant, Sample]]
) -> pd.DataFrame:
    """Return a row for each variant, the baseline first, under each condition.

    `samples` are in the order in which they were measured, each with `pool_prompts`.
    """
    frame = pd.DataFrame(
        [identity(v) | sample for v, sample in samples],
        columns=[*_KEYS, *_CONDITIONS, *_MEDIANS, *_LARGEST],
    )
    numbers = frame.columns[len(_KEYS) :]
    frame[numbers] = frame[numbers].astype(float)
    keys = [*_CONDITIONS, *_KEYS]
    frame["repetition"] = frame.groupby(keys, dropna=False).cumcount()
    base = frame[(frame[_KEYS] == [*identity(variants[0]).values()]).all(axis=1)]
    pairs = frame.merge(base, "left", [*_CONDITIONS, "repetition"], suffixes=("", "_base"))
    ratios = {f"{name}_ratio": column for name, column in _RATIOS.items()}
    for name, column in ratios.items():
        frame[name] = pairs[column] / pairs[f"{column}_base"]
    groups = frame.groupby(keys, sort=False, dropna=False)
    rows = groups[[*_MEDIANS, *ratios]].median().join(groups[_LARGEST].max())
    rows["repetitions"] = groups.size()
    for name, column in (_RANGES | {name: name for name in ratios}).items():
        rows[f"{name}_low"] = groups[column].min()
        rows[f"{name}_high"] = groups[column].max()
    rows = rows.reset_index().assign(measure=measure, **{name: getattr(job, name) for name in _JOB})
    return rows[_COLUMNS].astype(dict.fromkeys(_LARGEST, "Int64"))


def identity(variant: Variant) -> dict[str, str]:
    """Return the columns that name a variant."""
    values = (variant.name, variant.budget or "100%", variant.turn_mode or "")
    return dict(zip(_KEYS, values, strict=True))


def records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows for JSON; an empty value is None."""
    made: list[dict[str, Any]] = json.loads(rows.to_json(orient="records", double_precision=15))
    return made


def table(rows: pd.DataFrame) -> str:
    """Return the rows as text, a column for each variant under each condition."""
    named = [*_KEYS, *_CONDITIONS]
    keys = [name for name in named if name in rows and rows[name].replace("", None).notna().any()]
    shown = rows.set_index(keys).drop(columns=["measure", "turn_mode"], errors="ignore")
    return shown.dropna(axis="columns", how="all").map(_number).T.to_string()


def _number(value: float) -> str:
    if pd.isna(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def write(
    measure: str, options: EngineOptions, rows: pd.DataFrame, about: Mapping[str, Any]
) -> None:
    """Print the table, and write the rows as JSON, with `about` what was run, and CSV."""
    about = {
        "version": vllm_pyramid.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["vllm-pyramid", *sys.argv[1:]]),
        "processor": processor(),
        **about,
    }
    text = json.dumps({**about, "rows": records(rows)}, indent=1) + "\n"
    for path in (options.out / f"{measure}.json", options.json_file):
        if path is not None:
            path.write_text(text, encoding="utf-8")
    rows.to_csv(options.out / f"{measure}.csv", index=False)
    print(table(rows))
    date = about["date"][:16].replace("T", " ")
    said = f"Measured {date} UTC on {about['processor']}."
    if "baseline" in about:
        said += f" Ratios are to {about['baseline']}."
    said += f" In {options.out}: {measure}.json, {measure}.csv."
    print(said)
