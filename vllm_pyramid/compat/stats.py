# SPDX-License-Identifier: Apache-2.0
"""Pass our counters to the front end's loggers.

Statistics from the engine core have no field for plugins, and vLLM's loggers would take ours for a
KV connector's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerManager

from vllm_pyramid.compat.side_channel import take_policy_stats
from vllm_pyramid.compat.wrap import wrap


def install(observe: Callable[[dict[str, Any], int], None]) -> None:
    """Call `observe(counters, engine index)` for every step's statistics. Idempotent."""

    def record_policy_too(
        record: Any,
        self: StatLoggerManager,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        policy_stats = take_policy_stats(scheduler_stats)
        if policy_stats is not None:
            observe(policy_stats, engine_idx or 0)
        record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    wrap(StatLoggerManager, "record", record_policy_too)
