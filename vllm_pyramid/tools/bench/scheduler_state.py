# SPDX-License-Identifier: Apache-2.0
"""What `engine.py` observes of vLLM's scheduler: batches, preemptions, blocks of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_pyramid.tools.bench.memory import tokens_until_eviction


class Batch(NamedTuple):
    """A batch whose results have come.

    Attributes:
        prompt_tokens: of prompts, processed in it.
        decoding: requests whose whole prompt had been processed before it.
    """

    prompt_tokens: int
    decoding: int


class SchedulerLog:
    """Logs the batches that end and counts preemptions.

    With asynchronous scheduling a call of the engine's step schedules one batch and then waits for
    the one before it. The time of the call belongs to the batch that ended, so batches are logged
    when their results are processed.

    Args:
        scheduler: vLLM's or ours. Two of its methods are wrapped, for good.

    Attributes:
        ended: batches that ended since this was cleared. preemptions: since this was set to 0.
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
        if request is None:  # it ended while the batch ran; nobody gets its token
            continue
        if before[name] < request.num_prompt_tokens:
            prompt += tokens
        else:
            decoding += 1
    return Batch(prompt, decoding)


@dataclass(frozen=True)
class BlockGrowth:
    """The blocks that a running request holds, and those it will need.

    Attributes:
        blocks: it holds now. tokens: that have or had a slot in them. left: further tokens, at
            most; if it evicts on the way, until it has.
        block_sizes: tokens of a block, in each of its block tables.
    """

    blocks: int
    tokens: int
    left: int
    block_sizes: tuple[int, ...]

    @classmethod
    def of(cls, scheduler: Any, request: Any) -> BlockGrowth:
        """Of a running request of vLLM's scheduler."""
        tables = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        groups = scheduler.kv_cache_config.kv_cache_groups
        # The newest token gets its slot in the next step, and the last one never does.
        end = request.num_prompt_tokens + request.max_tokens - 1
        left = end - request.num_computed_tokens
        if (until_eviction := tokens_until_eviction(scheduler, request)) is not None:
            left = min(left, until_eviction)
        blocks = sum(not block.is_null for table in tables for block in table)
        sizes = tuple(group.kv_cache_spec.block_size for group in groups)
        return cls(blocks, request.num_computed_tokens, max(left, 0), sizes)

    def after(self, steps: int) -> int:
        """Blocks that it holds after so many further tokens."""
        tokens = self.tokens + min(steps, self.left)
        return self.blocks + sum(
            -(-tokens // size) - -(-self.tokens // size) for size in self.block_sizes
        )


def finish_without_preemption(running: Sequence[BlockGrowth], blocks: int) -> int:
    """How many of the requests `blocks` blocks hold when all are as long as they get.

    So many finish without preemption in any order. Of more, the last may be preempted.
    """
    used = count = 0
    for most in sorted(request.after(request.left) for request in running):
        used += most
        if used > blocks:
            break
        count += 1
    return count


def steps_with_room(running: Sequence[BlockGrowth], free: int, longest: int) -> int:
    """Decode steps of all the requests for which `free` blocks are enough, at most `longest`."""
    now = sum(request.blocks for request in running)
    for steps in range(1, longest + 1):
        if sum(request.after(steps) for request in running) - now > free:
            return steps - 1
    return longest
