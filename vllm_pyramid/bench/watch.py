# SPDX-License-Identifier: Apache-2.0
"""What a scheduler does, noted batch by batch, for `engine.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Batch", "Watch"]


@dataclass(frozen=True)
class Batch:
    """A batch whose results have come.

    Attributes:
        prompt_tokens: of prompts, processed in it.
        decoding: requests that had their whole prompt behind them before it.
    """

    prompt_tokens: int
    decoding: int


class Watch:
    """Notes the batches that end, and the requests that are thrown out.

    With asynchronous scheduling (the default on a GPU) a call of the engine's step schedules one
    batch and then waits for the one before it. Its time belongs to the batch that ended, so batches
    are noted where their results are taken and not where they are scheduled.

    Args:
        scheduler: of vLLM, a policy's or not.

    Attributes:
        ended: batches whose results have come since this was cleared. preemptions: requests thrown
            out to make room, since this was set to 0.
    """

    def __init__(self, scheduler: Any) -> None:
        self.ended: list[Batch] = []
        self.preemptions = 0
        update, preempt = scheduler.update_from_output, scheduler._preempt_request

        def noting_update(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            # First: the update forgets the requests that end with it.
            self.ended.append(_batch(scheduled, scheduler.requests))
            return update(scheduled, *args, **kwargs)

        def counting_preempt(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.update_from_output = noting_update
        scheduler._preempt_request = counting_preempt


def _batch(scheduled: Any, requests: Any) -> Batch:
    cached = scheduled.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    prompt = decoding = 0
    for name, tokens in scheduled.num_scheduled_tokens.items():
        request = requests.get(name)
        if request is None:  # ended while the batch ran: nobody gets what was computed for it
            continue
        if before[name] < request.num_prompt_tokens:
            prompt += tokens
        else:
            decoding += 1
    return Batch(prompt, decoding)
