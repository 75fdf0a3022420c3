# SPDX-License-Identifier: Apache-2.0
"""A scheduler with the admission rule and its worker, stepped through requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.scheduler.checks import check_pool
from tests.scheduler.harness import PlainWorker, Setup, hasher, make_scheduler
from vllm_pyramid.scheduler.admission import Admission


def exact_request(
    name: str,
    prompt: int | list[int],
    tokens: int,
    extra: dict[str, Any] | None = None,
    hash_block_size: int = 0,
) -> Request:
    """A request whose answer has exactly that many tokens, which its parameters say.

    Args:
        prompt: its tokens, or how many. hash_block_size: 0 without prefix caching.
    """
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
    prompt = [1] * prompt if isinstance(prompt, int) else prompt
    block_hasher = hasher(hash_block_size) if hash_block_size else None
    return Request(name, prompt, params, None, block_hasher=block_hasher)


@dataclass
class Job:
    """A scheduler and its worker on the way through requests."""

    setup: Setup
    num_blocks: int
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)
    started: list[str] = field(default_factory=list)  # in the order of their first tokens
    refusals: int = 0
    too_soon: int = 0  # preempted before they had a token for each that was processed for them
    tokens: int = 0  # computed, those of prompts that come back counted again
    most_running: int = 0
    steps: int = 0
    since: dict[str, tuple[int, int]] = field(default_factory=dict)  # step, tokens to process

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.setup, self.num_blocks)
        self.worker = PlainWorker(self.scheduler.pyramid.policy, self.setup, self.num_blocks)
        if self.scheduler.pyramid.chunks.admission is None:
            return
        admission = self.admission
        admits = admission.admits

        def watched(request: Request, plan: Any, computed: int, running: Any) -> bool:
            answer = admits(request, plan, computed, running)
            assert answer or running, "refused though nothing runs"
            self.refusals += not answer
            self.since[request.request_id] = self.steps, request.num_tokens
            return answer

        preempt = self.scheduler._preempt_request

        def checked(request: Request, *args: Any, **kwargs: Any) -> None:
            start, tokens = self.since[request.request_id]
            self.too_soon += self.steps - start <= tokens
            preempt(request, *args, **kwargs)

        admission.admits = watched  # type: ignore[method-assign]
        self.scheduler._preempt_request = checked  # type: ignore[method-assign]

    @property
    def admission(self) -> Admission:
        """The rule by which this scheduler admits requests."""
        found = self.scheduler.pyramid.chunks.admission
        assert found is not None
        return found

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.scheduler.add_request(request)

    def step(self) -> None:
        depth = 2 if self.setup.asynchronous else 1
        while len(self.in_flight) >= depth:
            self.scheduler.update_from_output(*self.in_flight.popleft())
        output = self.scheduler.schedule()
        for name in output.num_scheduled_tokens:
            if name not in self.started:
                self.started.append(name)
        self.tokens += output.total_num_scheduled_tokens
        self.most_running = max(self.most_running, len(self.scheduler.running))
        self.in_flight.append((output, self.worker.execute(output)))
        check_pool(self.scheduler.coordinator)
        self.steps += 1

    def finish(self) -> None:
        """Until all have ended, and nothing is left of them."""
        limit = self.steps + 200 * (len(self.requests) + 1)
        while self.scheduler.requests:
            assert self.steps < limit, "no progress"
            self.step()
        while self.in_flight:
            self.scheduler.update_from_output(*self.in_flight.popleft())
        if self.scheduler.pyramid.chunks.admission is not None:
            assert not len(self.admission.table), "a request has ended and is still in the table"

    @property
    def preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests)


# In blocks of a layer: 16 of a whole prompt, 3 behind its end, 11 at its own end. A pool of four
# whole requests has 96, so eight can finish side by side.
SMALL = Setup(
    budget=10,
    policy_args=(("window", 6), ("allocator", "uniform")),
    max_num_batched_tokens=128,
    max_num_seqs=40,
    admission="forecast",
)
