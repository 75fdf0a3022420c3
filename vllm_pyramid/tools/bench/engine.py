# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine, driven step by step in the process that measures, so that steps can be timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_pyramid.policy.request_keys import RESUME
from vllm_pyramid.tools.bench.samples import Request, Sample, Step, engine_sample
from vllm_pyramid.tools.bench.scheduler_log import (
    SchedulerLog,
    evictions_counted,
    pages_counted,
    steps_with_room,
)

_SETTLED_STEPS = 3  # without prefill: then no further request is admitted


def sampling(max_tokens: int, budget: str | None, **own: Any) -> Any:
    """Return parameters for exactly `max_tokens` greedy tokens, with the request's settings."""
    from vllm import SamplingParams

    if budget is not None:
        own["kv_budget"] = budget
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=own or None,
    )


@dataclass
class _Talk:
    """A conversation.

    Attributes:
        prompt: its latest. turns: what the user adds after that. ends: tokens of earlier prompts.
    """

    prompt: list[int]
    turns: list[list[int]]
    ends: list[int] = field(default_factory=list)


class Engine:
    """Drives vLLM's engine step by step.

    `llm` is a started `LLM`, vLLM's or ours, with its engine core in this process. All engines
    count blocks of `block_bytes`, the size of a block of one layer of ours.
    """

    def __init__(self, llm: Any, block_bytes: int) -> None:
        self.client = llm.llm_engine
        self.scheduler = self.client.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        # Stock vLLM's blocks are of all layers, and may be of more tokens.
        layers = sum(len(group.layer_names) for group in groups) // len(groups)
        self.blocks_of_one = layers * groups[0].kv_cache_spec.page_size_bytes // block_bytes
        self._reserved: list[Any] = []
        self._sent: dict[str, float] = {}
        self._count = 0
        self.log = SchedulerLog(self.scheduler)

    @property
    def pool_blocks(self) -> int:
        """Blocks of one layer that requests can have."""
        return (self.pool.num_gpu_blocks - 1 - len(self._reserved)) * self.blocks_of_one

    def reserve(self, blocks: int) -> None:
        """Leave `blocks` blocks of one layer to requests, by allocating all others."""
        self.pool.free_blocks(self._reserved)
        self._reserved = []
        if self.scheduler.kv_cache_manager.enable_caching:  # stock vLLM with its prefix cache
            self.scheduler.reset_prefix_cache()
        spare = self.pool_blocks - blocks
        if spare < 0:
            raise ValueError(f"the pool has {self.pool_blocks} blocks, not {blocks}")
        self._reserved = self.pool.get_new_blocks(spare // self.blocks_of_one)

    def send(self, prompt: list[int], params: Any, salt: str | None = None) -> str:
        """Send a request, which finds what came with the same `salt`; return its new name."""
        self._count += 1
        name = str(self._count)
        salted = {} if salt is None else {"cache_salt": salt}
        self.client.add_request(name, {"prompt_token_ids": prompt, **salted}, params)
        self._sent[name] = time.perf_counter()
        return name

    def step(
        self, on_output: Callable[[Any, float], None] | None = None, finished: int = 0
    ) -> Step:
        """Run one batch of the engine, from the end of the one before to its own."""
        ended = self.log.ended
        ended.clear()
        outputs: list[Any] = []
        begin = time.perf_counter()
        # With asynchronous scheduling the first call only sends a batch off.
        while not ended and self.client.has_unfinished_requests():
            outputs += self.client.step()
        end = time.perf_counter()
        if on_output is not None:
            for output in outputs:
                on_output(output, end)
        return Step(
            seconds=end - begin,
            prompt_tokens=sum(batch.prompt_tokens for batch in ended),
            decoding=max((batch.decoding for batch in ended), default=0),
            waiting=bool(self.scheduler.waiting),
            finished=finished,
            blocks=self.pool_blocks - self.pool.get_num_free_blocks() * self.blocks_of_one,
        )

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        budget: str | None,
        on_finish: Callable[[], None],
        later: list[list[list[int]]] | None = None,
        concurrency: int | None = None,
        resume: bool = False,
    ) -> Sample:
        """Run a whole job of requests or conversations.

        RuntimeError: it generated other lengths than `max_tokens`, or evicted nothing.

        Args:
            later: the turns that follow each prompt. A turn is sent when the one before has been
                answered, and begins with it and its answer.
            concurrency: prompts under way at once; None: all.
            on_finish: called when the last turn of a prompt has been answered.
            resume: requests say where the turns before them ended.
        """
        self.log.preemptions = 0
        pages = pages_counted(self.scheduler)
        later = later or [[] for _ in prompts]
        expected = len(prompts) + sum(map(len, later))
        waiting = [_Talk(*one) for one in zip(prompts, later, strict=True)]
        talks: dict[str, _Talk] = {}
        first: dict[str, float] = {}
        requests: list[Request] = []
        steps: list[Step] = []

        def send(talk: _Talk) -> None:
            own = {"kv_turns": list(talk.ends), "kv_turn_mode": RESUME} if resume else {}
            talks[self.send(talk.prompt, sampling(max_tokens, budget, **own))] = talk

        def on_output(output: Any, now: float) -> None:
            name, tokens = output.request_id, output.outputs[0].token_ids
            if tokens:
                first.setdefault(name, now)
            if not output.finished:
                return
            sent, prompt_len = self._sent.pop(name), len(output.prompt_token_ids)
            evicted = (output.kv_transfer_params or {}).get("evicted_tokens", 0) > 0
            cached = output.num_cached_tokens or 0
            requests.append(
                Request(first[name] - sent, now - sent, len(tokens), prompt_len, cached, evicted)
            )
            talk = talks.pop(name)
            if talk.turns:
                prompt = [*talk.prompt, *tokens, *talk.turns[0]]
                send(_Talk(prompt, talk.turns[1:], [*talk.ends, len(talk.prompt)]))
                return
            on_finish()
            if waiting:
                send(waiting.pop(0))

        for _ in range(min(concurrency or len(prompts), len(prompts))):
            send(waiting.pop(0))
        while self.client.has_unfinished_requests():
            steps.append(self.step(on_output, len(requests)))
        wrong = [request.tokens for request in requests if request.tokens != max_tokens]
        if len(requests) != expected or wrong:
            raise RuntimeError(
                f"{expected} requests for {max_tokens} tokens: {len(requests)} came back, "
                f"of other lengths: {wrong}"
            )
        evicted = sum(request.evicted for request in requests)
        if budget is not None and evicted != expected:
            raise RuntimeError(
                f"with the budget {budget} only {evicted} of {expected} requests report that "
                "they evicted something"
            )
        sample = engine_sample(steps, requests, self.log.preemptions)
        return sample | pages_counted(self.scheduler, pages)

    def fill(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        budget: str | None,
        on_prefill: Callable[[int], None],
    ) -> Sample:
        """Send requests and step until as many decode as are admitted.

        Returns a sample, and `tokens_left`: the fewest that a request still has to generate;
        `steps_left`: decode steps until a request would be preempted. RuntimeError: requests
        finished or were preempted before all were admitted that fit, or did not evict.
        """
        self.log.preemptions = 0
        evictions = evictions_counted(self.scheduler)
        for prompt in prompts:
            self.send(prompt, sampling(max_tokens, budget))
        resident, before_queueing, idle, peak = 0, None, 0, 0
        while idle < _SETTLED_STEPS:  # what an eviction frees is free a step later
            step = self.step()
            on_prefill(max(0, step.decoding - resident))
            resident, peak = max(resident, step.decoding), max(peak, step.blocks)
            idle = 0 if step.prompt_tokens else idle + 1
            if idle and resident and before_queueing is None:
                before_queueing = step.decoding
        if self.log.preemptions or step.decoding != resident:
            raise RuntimeError(
                f"{self.log.preemptions} requests were preempted and "
                f"{resident - step.decoding} finished before all that fit were admitted: give a "
                "longer --output-len"
            )
        evicted = evictions_counted(self.scheduler) - evictions
        if budget is not None and evicted < resident:
            raise RuntimeError(
                f"with the budget {budget} {resident} requests decode, and the scheduler counts "
                f"{evicted} evictions"
            )
        free = self.pool.get_num_free_blocks()
        tokens_left = min(r.max_tokens - r.num_output_tokens for r in self.scheduler.running)
        return {
            "resident_max": resident,
            "before_queueing": before_queueing,
            "decode_blocks": step.blocks,
            "peak_blocks": peak,
            "tokens_left": tokens_left,
            "steps_left": steps_with_room(self.scheduler, free, tokens_left),
        }

    def steps(self, count: int) -> dict[str, Any]:
        """Run `count` decode steps of the running requests.

        RuntimeError: a prompt was admitted or a request finished meanwhile.
        """
        pages = pages_counted(self.scheduler)
        steps = [self.step() for _ in range(count)]
        batches = {step.decoding for step in steps}
        if len(batches) != 1 or any(step.prompt_tokens for step in steps):
            raise RuntimeError(
                f"the requests that decode changed during the measurement: {sorted(batches)}"
            )
        seconds = [step.seconds for step in steps]
        read = pages_counted(self.scheduler, pages)
        return {"seconds": seconds, "batch": batches.pop(), **read}
