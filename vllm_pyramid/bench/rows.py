# SPDX-License-Identifier: Apache-2.0
"""The rows of a bench: one for each thing that was compared, with medians over the repetitions."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from vllm_pyramid.bench import cost
from vllm_pyramid.bench.cost import Machine
from vllm_pyramid.bench.measure import PERCENTILES, Measurement, merge
from vllm_pyramid.bench.plan import Plan, Variant

__all__ = ["Row", "as_csv", "as_json", "row_of", "with_ratios"]

FEWEST_FOR_P99 = 20


@dataclass(frozen=True)
class Row:
    """One line of a table. What a measure does not give is None.

    Attributes:
        measure: the sub-command. policy, budget: what was measured, "100%" without eviction.
        prompt_len, output_len, num_prompts: the job. pool_prompts: whole requests that the cache
            has room for; None where there is plenty. request_rate: requests/s; None for all at
            once.
        output_tokens_per_s: end to end. decode_tokens_per_s: of steady decode steps, all prompts in
            them prefilled; decode_batch: requests in them. prefill_share: of the time.
        resident_max: the most requests that decoded at once; over HTTP the most that ran at once
            (whose prompt was being processed, too) in samples, so a lower bound. to_their_end: so
            many of them finish for certain with none thrown out (see `holding.to_their_end`).
            before_queueing: the most that can be sent at once without one that waits for room.
        ttft_p50_ms ...: time to the first token, waiting included; tpot: time a further token. The
            99th percentile is None of fewer than 20 requests.
        peak_blocks: the most blocks of one layer held at once, all layers added up, and
            decode_blocks: without prefills. Over HTTP the former is of samples, a lower bound; None
            of stock vLLM, which does not say it.
        preemptions: requests thrown out to make room. repetitions: of which these are medians.
        output_low ... decode_high: the smallest and largest repetition.
        output_ratio, decode_ratio, ttft_ratio, tpot_ratio: to the baseline, of rates or (the
            last two) of median times; the median of the repetitions' own ratios, with the smallest
            and the largest beside it.
        predicted_decode_tokens_per_s: what the cost model allows this batch.
        predicted_resident: requests that the pool has room for, by the cost model.
        predicted_prefill_share: of the time, by the cost model, with so many decoding at once.
        host_bytes: of host memory for V of the pool, which comes on top of it, where a policy keeps
            V there.
    """

    measure: str
    policy: str
    budget: str
    prompt_len: int
    output_len: int
    num_prompts: int
    pool_prompts: float | None = None
    request_rate: float | None = None
    output_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_batch: float | None = None
    prefill_share: float | None = None
    resident_max: int | None = None
    to_their_end: int | None = None
    before_queueing: int | None = None
    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p90_ms: float | None = None
    tpot_p99_ms: float | None = None
    peak_blocks: int | None = None
    decode_blocks: int | None = None
    preemptions: int | None = None
    repetitions: int = 1
    output_low: float | None = None
    output_high: float | None = None
    decode_low: float | None = None
    decode_high: float | None = None
    output_ratio: float | None = None
    output_ratio_low: float | None = None
    output_ratio_high: float | None = None
    decode_ratio: float | None = None
    decode_ratio_low: float | None = None
    decode_ratio_high: float | None = None
    ttft_ratio: float | None = None
    ttft_ratio_low: float | None = None
    ttft_ratio_high: float | None = None
    tpot_ratio: float | None = None
    tpot_ratio_low: float | None = None
    tpot_ratio_high: float | None = None
    predicted_decode_tokens_per_s: float | None = None
    predicted_resident: int | None = None
    predicted_prefill_share: float | None = None
    host_bytes: int | None = None

    @property
    def label(self) -> str:
        """As in tables and pictures."""
        return self.policy if self.budget == "100%" else f"{self.policy} {self.budget}"


def job_row(measure: str, plan: Plan, variant: Variant, pool_prompts: float | None) -> Row:
    """What is known before anything is measured."""
    predicted = host_bytes = None
    if pool_prompts is not None and not variant.is_peer:
        host_bytes = plan.host_bytes(variant, pool_prompts)
        pool = plan.pool_blocks(variant, pool_prompts) * plan.block_bytes
        predicted = min(plan.num_prompts, cost.resident(pool, plan.demand(variant)))
    return Row(
        measure=measure,
        policy=variant.policy,
        budget=variant.budget or "100%",
        prompt_len=plan.prompt_len,
        output_len=plan.output_len,
        num_prompts=plan.num_prompts,
        pool_prompts=pool_prompts,
        host_bytes=host_bytes,
        predicted_resident=predicted,
    )


def predicted_rate(plan: Plan, variant: Variant, machine: Machine, batch: float) -> float | None:
    """Decode tokens/s that the cost model allows; None without a machine."""
    if not machine.bandwidth:
        return None
    return batch / cost.decode_step(plan.shape, machine, batch, plan.demand(variant))


def predicted_prefill_share(
    plan: Plan, variant: Variant, machine: Machine, batch: int | None
) -> float | None:
    """Of the time of the whole job, with so many requests decoding at once; None without a machine
    or room.
    """
    if not machine.flops or not batch:
        return None
    return cost.prefill_share(plan.shape, machine, plan.demand(variant), plan.num_prompts, batch)


def row_of(
    measure: str,
    plan: Plan,
    variant: Variant,
    pool_prompts: float,
    machine: Machine,
    runs: Sequence[Measurement],
) -> Row:
    """The medians of the repetitions of a job, and what the cost model says."""
    merged = merge(runs)
    outputs = [run.output_tokens_per_s for run in runs]
    decodes = [r.decode_tokens_per_s for r in runs if r.decode_tokens_per_s is not None]
    predicted = None
    if merged.decode_batch is not None:
        predicted = predicted_rate(plan, variant, machine, merged.decode_batch)
    row = job_row(measure, plan, variant, pool_prompts)
    return replace(
        row,
        output_tokens_per_s=statistics.median(outputs),
        decode_tokens_per_s=merged.decode_tokens_per_s,
        decode_batch=merged.decode_batch,
        prefill_share=merged.prefill_share,
        resident_max=merged.resident_max,
        **percentile_fields(merged.ttft_ms, merged.tpot_ms, plan.num_prompts),
        peak_blocks=merged.peak_blocks,
        decode_blocks=merged.decode_blocks,
        preemptions=merged.preemptions,
        repetitions=len(runs),
        output_low=min(outputs),
        output_high=max(outputs),
        decode_low=min(decodes, default=None),
        decode_high=max(decodes, default=None),
        predicted_decode_tokens_per_s=predicted,
        predicted_prefill_share=predicted_prefill_share(
            plan, variant, machine, row.predicted_resident
        ),
    )


def percentile_fields(
    ttft_ms: Sequence[float], tpot_ms: Sequence[float], requests: int
) -> dict[str, Any]:
    """Fields of a row from lists in the order of `measure.PERCENTILES`.

    Args:
        requests: of which each list is. Of few the 99th percentile says no more than the slowest,
            and is left out.
    """
    found: dict[str, Any] = {}
    for metric, values in (("ttft", ttft_ms), ("tpot", tpot_ms)):
        for percent, value in zip(PERCENTILES, values, strict=False):
            if percent < 99 or requests >= FEWEST_FOR_P99:
                found[f"{metric}_p{percent}_ms"] = value
    return found


Rates = Sequence[float | None]


def with_ratios(row: Row, mine: Mapping[str, Rates], baseline: Mapping[str, Rates]) -> Row:
    """The row with its ratios to the baseline, repetition by repetition.

    Args:
        mine, baseline: values of each repetition under `output`, `decode`, `ttft`, `tpot`.
    """
    changes: dict[str, float] = {}
    for name in mine:
        pairs = zip(mine[name], baseline[name], strict=True)
        ratios = [a / b for a, b in pairs if a is not None and b]
        if ratios:
            changes[f"{name}_ratio"] = statistics.median(ratios)
            changes[f"{name}_ratio_low"] = min(ratios)
            changes[f"{name}_ratio_high"] = max(ratios)
    return replace(row, **changes)  # type: ignore[arg-type]


def as_json(rows: Sequence[Any], about: Mapping[str, object]) -> str:
    """What was run, and the rows."""
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def as_csv(rows: Sequence[Any]) -> str:
    """The rows, one a line."""
    text = io.StringIO()
    names = [field.name for field in fields(rows[0])]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
