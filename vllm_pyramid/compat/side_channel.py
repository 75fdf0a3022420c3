# SPDX-License-Identifier: Apache-2.0
"""Carry our data in vLLM's messages between processes.

Worker to scheduler: `ModelRunnerOutput` is pickled, so an extra attribute survives; so does one of
`SchedulerOutput` on the way to the workers. Scheduler to front end: only declared fields survive;
`SchedulerStats.kv_connector_stats` is a free dictionary, unused without a KV connector.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_pyramid.plan import Eviction

_REPORT = "vllm_pyramid_report"
_MESSAGES = "vllm_pyramid_messages"
_BLOCK_COPIES = "vllm_pyramid_block_copies"
_STATS = "vllm_pyramid"
# Of a step's messages: blocks that take copies of what evictions overwrite, by request; where
# requests resumed their sessions; what is copied between the device and the tier below its pool.
PREFIXES, SESSIONS, TIER = "prefixes", "sessions", "tier"
# Of a step's messages: to which levels requests are evicted before it. Of its reports: which
# requests got levels in it, and what these lose.
LEVELS = "levels"
# Of a step's messages: the requests for whose levels no memory is left, and which get none in it.
WITHOUT_LEVELS = "without_levels"
# Of a step's reports: how many files of the host cache could not be written.
HOST_CACHE = "host_cache"


class StepReport(NamedTuple):
    """A worker's report on a step.

    Attributes:
        evictions: the evictions, by request id.
        methods: the reports for the scheduler's hooks, by their names.
        failures: kind and reason of the requests that must end with an error, by id.
        dropped_traces: how many traces could not be written.
    """

    evictions: dict[str, Eviction]
    methods: dict[str, Any]
    failures: dict[str, tuple[str, str]]
    dropped_traces: int


class HostCopy(NamedTuple):
    """The copy of one slot of the host cache.

    `blocks` are ids of the device's, at most one for each layer; they take the slot's first places.
    """

    slot: int
    blocks: list[int]


class HostFill(NamedTuple):
    """What a slot of the host cache gets from a file: the bytes of each rank's first blocks."""

    slot: int
    contents: list[bytes]


class FileSave(NamedTuple):
    """A bundle of which each worker writes its part to a file.

    Attributes:
        path: of the first part (see `bundle_file.part_path`).
        begins: for each rank the first bytes of its file; those of its layers' blocks follow.
        blocks: ids of the device's blocks, of all layers.
    """

    path: str
    begins: list[bytes]
    blocks: list[int]


class FileOrders(NamedTuple):
    """Files of a worker: bundles to remove, then blocks to save as they were before the step."""

    removed: list[str]
    saved: list[FileSave]


class HostCopies(NamedTuple):
    """What a step copies between the device and the host cache, in order.

    Attributes:
        stored: from the device or a file to the host, before all else that the step does.
        loaded: from the host to the device, when blocks of the device have been copied.
        files: what is done with files, first of all; None without any.
    """

    stored: list[HostCopy | HostFill]
    loaded: list[HostCopy]
    files: FileOrders | None = None


def attach_report(output: ModelRunnerOutput, report: StepReport) -> ModelRunnerOutput:
    """Attach a report to a step's output."""
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        output = copy.copy(output)  # one object shared by the whole process
    setattr(output, _REPORT, report)
    return output


def read_report(output: ModelRunnerOutput) -> StepReport:
    """Return the report that `attach_report` sent, or an empty one."""
    return getattr(output, _REPORT, StepReport({}, {}, {}, 0))


def attach_messages(output: SchedulerOutput, messages: dict[str, Any]) -> None:
    """Tell the workers what the stores and the tier want of them in a step, by name."""
    if messages:
        setattr(output, _MESSAGES, messages)


def read_messages(output: SchedulerOutput) -> dict[str, Any]:
    """Return what `attach_messages` sent."""
    messages: dict[str, Any] = getattr(output, _MESSAGES, {})
    return messages


def attach_block_copies(
    output: SchedulerOutput, of_stages: Sequence[list[KVCacheBlockCopy]]
) -> None:
    """Tell the workers which blocks to copy before the step, a list for each pipeline stage.

    vLLM's own field reaches the workers of all stages, so it stays empty where there are several.
    """
    if len(of_stages) == 1:
        if output.kv_cache_block_copies:
            raise RuntimeError(
                f"vLLM orders {len(output.kv_cache_block_copies)} copies of blocks, which would be "
                "lost: ours take their place; report this"
            )
        output.kv_cache_block_copies = of_stages[0] or None
    elif any(of_stages):
        setattr(output, _BLOCK_COPIES, of_stages)


def read_block_copies(output: SchedulerOutput, stage: int) -> Sequence[KVCacheBlockCopy]:
    """Return what `attach_block_copies` sent to the workers of a stage."""
    of_stages: Sequence[list[KVCacheBlockCopy]] | None = getattr(output, _BLOCK_COPIES, None)
    return (output.kv_cache_block_copies or ()) if of_stages is None else of_stages[stage]


def attach_policy_stats(stats: SchedulerStats, policy_stats: dict[str, Any]) -> None:
    """Attach the policy's counters to a step's statistics."""
    if stats.kv_connector_stats is not None:
        raise RuntimeError("a KV connector sends statistics, and one is refused with a KV policy")
    stats.kv_connector_stats = {_STATS: policy_stats}


def take_policy_stats(stats: SchedulerStats | None) -> dict[str, Any] | None:
    """Remove and return the counters, so that vLLM's loggers see no KV connector."""
    if stats is None or not stats.kv_connector_stats or _STATS not in stats.kv_connector_stats:
        return None
    policy_stats: dict[str, Any] = stats.kv_connector_stats.pop(_STATS)
    if not stats.kv_connector_stats:
        stats.kv_connector_stats = None
    return policy_stats
