# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes: `vllm-pyramid bench throughput --decode-only --profile`.

`profile` runs PyTorch's profiler in the engine's process; `table` shows the operators of every
variant next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

WINDOWS = 2  # of the length of the timed ones
_SHOWN = 20  # operators with the most time
OUTSIDE = "outside of operators"


def profile(step: Callable[[], float], count: int) -> dict[str, Any]:
    """Run `count` steps under PyTorch's profiler.

    Args:
        step: runs one step, and returns its seconds.

    Returns:
        `step_ms`: the mean step. `operators_ms`: milliseconds of each operator in a mean step,
        without operators that it calls; the rest of the step, which is Python's, is `OUTSIDE`.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        step_ms = 1e3 * sum(step() for _ in range(count)) / count
    operators = {
        event.key: event.self_cpu_time_total / 1e3 / count for event in profiler.key_averages()
    }
    operators[OUTSIDE] = step_ms - sum(operators.values())
    return {"step_ms": step_ms, "operators_ms": operators}


def table(profiles: Sequence[dict[str, Any]]) -> str:
    """Return the milliseconds of the operators that take most, in the step of each variant."""
    import pandas as pd

    columns = {f"{one['label']}, batch {one['batch']}": one for one in profiles}
    made = pd.DataFrame({name: one["operators_ms"] for name, one in columns.items()}).fillna(0.0)
    made = made.loc[made.max(axis="columns").sort_values(ascending=False).index[:_SHOWN]]
    made.loc["the step"] = {name: one["step_ms"] for name, one in columns.items()}
    return f"ms of a decode step under PyTorch's profiler\n{made.map('{:.2f}'.format).to_string()}"
