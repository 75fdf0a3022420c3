# SPDX-License-Identifier: Apache-2.0
"""The cost model on paper: models and machines that are not here. `vllm-pyramid bench cost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from vllm_pyramid.bench import cost
from vllm_pyramid.bench.cost import Demand, Machine
from vllm_pyramid.bench.shapes import Shape
from vllm_pyramid.policy.budget import Budget

__all__ = ["PaperRow", "as_markdown", "paper_rows"]

# Of the memory that the weights leave, what a server gives to the cache.
CACHE_SHARE = 0.9


@dataclass(frozen=True)
class PaperRow:
    """What the model says of a prompt length and a budget.

    Attributes:
        prompt_len, budget: "100%" without eviction. cache_gb: of one request when its prompt ends.
        resident: requests that decode at once. step_ms: of a decode step with all of them.
        decode_tokens_per_s, decode_ratio: then, and as a multiple of that without eviction.
        prefill_s: of one prompt. requests_per_s: of one engine, end to end.
        engines: for the asked number of requests/s.
    """

    prompt_len: int
    budget: str
    cache_gb: float
    resident: int
    step_ms: float
    decode_tokens_per_s: float
    decode_ratio: float
    prefill_s: float
    requests_per_s: float
    engines: int


def cache_bytes(shape: Shape, machine: Machine) -> float:
    """Bytes for the cache on all devices together.

    Raises:
        ValueError: the weights do not fit.
    """
    embedding = shape.hidden * shape.vocabulary
    weights = shape.element_bytes * (shape.step_parameters + embedding)
    left = machine.memory * machine.devices * CACHE_SHARE - weights
    if left <= 0:
        raise ValueError(
            f"{weights / 1e9:.0f} GB of weights do not fit into {CACHE_SHARE:.0%} of "
            f"{machine.devices} x {machine.memory / 1e9:.0f} GB: give more --devices"
        )
    return left


def paper_rows(
    shape: Shape,
    machine: Machine,
    prompt_lens: Sequence[int],
    budgets: Sequence[str],
    output_len: int,
    request_rate: float,
) -> list[PaperRow]:
    """A row for each prompt length, without eviction and with each budget.

    Raises:
        ValueError: the weights, or one request, do not fit.
    """
    pool = cache_bytes(shape, machine)
    rows = []
    for prompt_len in prompt_lens:
        base = 0.0
        for budget in (None, *budgets):
            kept = prompt_len if budget is None else Budget.parse(budget).tokens_for(prompt_len, 1)
            demand = Demand.plain(shape, prompt_len, output_len, kept)
            batch = cost.resident(pool, demand)
            if not batch:
                raise ValueError(f"a prompt of {prompt_len} tokens does not fit beside the weights")
            step = cost.decode_step(shape, machine, batch, demand)
            rate = batch / step
            base = base or rate
            many = 1000 * batch
            requests = cost.end_to_end(shape, machine, demand, many, batch) / output_len
            rows.append(
                PaperRow(
                    prompt_len=prompt_len,
                    budget=budget or "100%",
                    cache_gb=cost.kept_blocks_bytes(shape, kept) / 1e9,
                    resident=batch,
                    step_ms=1e3 * step,
                    decode_tokens_per_s=rate,
                    decode_ratio=rate / base,
                    prefill_s=cost.prefill(machine, demand),
                    requests_per_s=requests,
                    engines=ceil(request_rate / requests),
                )
            )
    return rows


HEADINGS = (
    "prompt",
    "budget",
    "cache of a request, GB",
    "resident",
    "decode step, ms",
    "decode, tok/s",
    "of 100%",
    "prefill, s",
    "requests/s",
    "engines",
)


def cells(row: PaperRow) -> list[str]:
    """The row as a reader wants it, in the order of `HEADINGS`."""
    return [
        f"{row.prompt_len:,}",
        row.budget,
        f"{row.cache_gb:.2f}",
        f"{row.resident:,}",
        f"{row.step_ms:.1f}",
        f"{row.decode_tokens_per_s:,.0f}",
        f"{row.decode_ratio:.2f}",
        f"{row.prefill_s:.2f}",
        f"{row.requests_per_s:.2f}",
        f"{row.engines:,}",
    ]


def as_markdown(rows: Sequence[PaperRow]) -> str:
    """A table for docs/performance.md."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---:|" * len(HEADINGS)]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"
