# SPDX-License-Identifier: Apache-2.0
"""`vllm-pyramid bench cost`: the cost model for models and machines that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import pandas as pd

from vllm_pyramid.policy import Budget
from vllm_pyramid.tools.bench import cost
from vllm_pyramid.tools.bench.cost import Machine, RequestNeeds
from vllm_pyramid.tools.bench.shapes import Shape

CACHE_SHARE = 0.9  # of a server's memory; the KV cache gets what the weights leave of it
# Column: heading and format. `cache_gb` is a request's when its prompt ends, `step_ms` of a decode
# step with all resident requests, `requests_per_s` of one engine, end to end.
_COLUMNS = {
    "prompt_len": ("prompt", "{:,.0f}"),
    "budget": ("budget", "{}"),
    "cache_gb": ("cache of a request, GB", "{:.2f}"),
    "resident": ("resident", "{:,.0f}"),
    "step_ms": ("decode step, ms", "{:.1f}"),
    "decode_tokens_per_s": ("decode, tok/s", "{:,.0f}"),
    "decode_ratio": ("of 100%", "{:.2f}"),
    "prefill_s": ("prefill, s", "{:.2f}"),
    "requests_per_s": ("requests/s", "{:.2f}"),
    "engines": ("engines", "{:,.0f}"),
}


def cost_rows(
    shape: Shape,
    machine: Machine,
    prompt_lens: Sequence[int],
    budgets: Sequence[str],
    output_len: int,
    request_rate: float,
) -> pd.DataFrame:
    """What the model says of each prompt length, without eviction and with each budget.

    Raises:
        ValueError: the weights, or one request, do not fit.
    """
    weights = shape.element_bytes * (shape.step_parameters + shape.hidden * shape.vocabulary)
    pool = machine.memory * machine.devices * CACHE_SHARE - weights
    if pool <= 0:
        raise ValueError(
            f"{weights / 1e9:.0f} GB of weights do not fit into {CACHE_SHARE:.0%} of "
            f"{machine.devices} x {machine.memory / 1e9:.0f} GB: give more --devices"
        )
    rows = []
    for prompt_len in prompt_lens:
        for budget in (None, *budgets):
            kept = prompt_len if budget is None else Budget.parse(budget).tokens_for(prompt_len, 1)
            needs = RequestNeeds.plain(shape, prompt_len, output_len, kept)
            batch = cost.resident(pool, needs)
            if not batch:
                raise ValueError(f"a prompt of {prompt_len} tokens does not fit beside the weights")
            step = cost.decode_step(shape, machine, batch, needs)
            # A thousand waves: the last one, which drains, does not count.
            requests = cost.end_to_end(shape, machine, needs, 1000 * batch, batch) / output_len
            rows.append(
                {
                    "prompt_len": prompt_len,
                    "budget": budget or "100%",
                    "cache_gb": cost.blocks_bytes(shape, kept) / 1e9,
                    "resident": batch,
                    "step_ms": 1e3 * step,
                    "decode_tokens_per_s": batch / step,
                    "prefill_s": cost.prefill(machine, needs),
                    "requests_per_s": requests,
                    "engines": ceil(request_rate / requests),
                }
            )
    frame = pd.DataFrame(rows)
    rate = frame["decode_tokens_per_s"]
    frame["decode_ratio"] = rate / rate.groupby(frame["prompt_len"]).transform("first")
    return frame[list(_COLUMNS)]


def displayed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `cost_rows` as text, under headings for readers."""
    return pd.DataFrame(
        {heading: rows[name].map(form.format) for name, (heading, form) in _COLUMNS.items()}
    )


def as_markdown(rows: pd.DataFrame) -> str:
    """The table of docs/performance.md."""
    text = displayed(rows)
    lines = [list(text.columns), *text.to_numpy().tolist()]
    made = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([made[0], "|" + "---:|" * len(text.columns), *made[1:]]) + "\n"
