# SPDX-License-Identifier: Apache-2.0
"""What the bench reads from vLLM's scheduler: batches, preemptions, evictions, blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Batch(NamedTuple):
    """A batch whose results have come.

    Attributes:
        prompt_tokens: of prompts, processed in it.
        decoding: requests whose whole prompt had been processed before it.
    """

    prompt_tokens: int
    decoding: int


class SchedulerLog:
    """Logs the batches that end and counts preemptions, in two wrapped methods of any scheduler.

    With asynchronous scheduling a call of the engine's step schedules one batch and then waits for
    the one before it. The time of the call belongs to the batch that ended, so batches are logged
    when their results are processed.

    Attributes:
        ended: batches that ended since this was cleared.
        preemptions: since this was set to 0.
    """

    def __init__(self, scheduler: Any) -> None:
        self.ended: list[Batch] = []
        self.preemptions = 0
        update, preempt = scheduler.update_from_output, scheduler._preempt_request

        def logging_update(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            # First: the update forgets the requests that end with it.
            self.ended.append(_batch(scheduled, scheduler.requests))
            return update(scheduled, *args, **kwargs)

        def counting_preempt(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.update_from_output = logging_update
        scheduler._preempt_request = counting_preempt


def _batch(scheduled: Any, requests: Any) -> Batch:
    cached = scheduled.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    prompt = decoding = 0
    for name, tokens in scheduled.num_scheduled_tokens.items():
        request = requests.get(name)
        if request is None:  # it ended while the batch ran; its token is dropped
            continue
        if before[name] < request.num_prompt_tokens:
            prompt += tokens
        else:
            decoding += 1
    return Batch(prompt, decoding)


def evictions_counted(scheduler: Any) -> int:
    """Return the evictions since the start of a scheduler; 0 without a policy."""
    coordinator = getattr(scheduler, "coordinator", None)
    return 0 if coordinator is None else int(coordinator.counters.num_evictions)


def pages_counted(scheduler: Any, before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the pages of generated tokens since a scheduler's start, or since an earlier count.

    They are summed over the layers: those that were read, of those that were visible; zeros where a
    policy selects none. The scheduler is vLLM's or ours.
    """
    ours = getattr(scheduler, "pyramid", None)
    totals = [] if ours is None else [hooks.totals() for hooks in ours.hooks]
    return {
        key: sum(of_hooks.get(key, 0) for of_hooks in totals) - (before or {}).get(key, 0)
        for key in ("pages_read", "pages_visible")
    }


def steps_with_room(scheduler: Any, free: int, longest: int) -> int:
    """Return the decode steps of running requests that `free` blocks allow, `longest` at most."""
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    lengths = [request.num_computed_tokens for request in scheduler.running]

    def needed(steps: int) -> int:
        return sum(
            -(-(tokens + steps) // size) - -(-tokens // size)
            for tokens in lengths
            for size in sizes
        )

    return next((steps - 1 for steps in range(1, longest + 1) if needed(steps) > free), longest)
