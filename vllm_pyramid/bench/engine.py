# SPDX-License-Identifier: Apache-2.0
"""One policy's engine in a process of its own, which is asked for one measurement after the other.

Started by `sessions.py` through a child process. The first task says what to start, the others
what to do; while it waits it sleeps. vLLM's engine core runs in this process, not in another: every
step is timed and looked into, and an idle engine leaves the machine to those that measure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vllm_pyramid.bench.holding import Holding, steps_left, to_their_end
from vllm_pyramid.bench.machine import machine
from vllm_pyramid.bench.measure import Step, Timing, summarise
from vllm_pyramid.bench.profile import profile, refusal
from vllm_pyramid.bench.watch import Watch
from vllm_pyramid.child_process import read_tasks, say

__all__ = ["Engine"]

_SETTLED_STEPS = 3  # without prefill: then nothing more comes in


class Engine:
    """A driver of vLLM's engine.

    Args:
        llm: a started `LLM`, of vLLM or of ours, whose engine core is in this process.
        block_bytes: of a block of one layer, in which all engines count.
    """

    def __init__(self, llm: Any, block_bytes: int) -> None:
        self.client = llm.llm_engine
        self.scheduler = self.client.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        cache = self.scheduler.kv_cache_config
        groups = cache.kv_cache_groups
        # Stock vLLM's blocks are of all layers, and may be of more tokens.
        layers = sum(len(group.layer_names) for group in groups) // len(groups)
        self.blocks_of_one = layers * groups[0].kv_cache_spec.page_size_bytes // block_bytes
        self._reserved: list[Any] = []
        self._sent: dict[str, float] = {}
        self._count = 0
        self._watch = Watch(self.scheduler)

    @property
    def pool_blocks(self) -> int:
        """Blocks of one layer that requests can have."""
        return (self.pool.num_gpu_blocks - 1 - len(self._reserved)) * self.blocks_of_one

    def reserve(self, blocks: int) -> None:
        """Leave requests `blocks` blocks of one layer, by holding the others.

        Raises:
            ValueError: the pool has not as many.
        """
        self.pool.free_blocks(self._reserved)
        self._reserved = []
        if self.scheduler.kv_cache_manager.enable_caching:  # stock vLLM with its prefix cache
            self.scheduler.reset_prefix_cache()
        spare = self.pool_blocks - blocks
        if spare < 0:
            raise ValueError(f"the pool has {self.pool_blocks} blocks, not {blocks}")
        self._reserved = self.pool.get_new_blocks(spare // self.blocks_of_one)

    def _held(self) -> int:
        free = self.pool.get_num_free_blocks() * self.blocks_of_one
        return self.pool_blocks - free

    def add(self, prompts: list[list[int]], max_tokens: int, budget: str | None) -> None:
        """Send requests, all at once."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_budget": budget} if budget is not None else None,
        )
        self._count += 1
        for index, prompt in enumerate(prompts):
            name = f"{self._count}-{index}"
            self.client.add_request(name, {"prompt_token_ids": prompt}, params)
            self._sent[name] = time.perf_counter()

    def step(
        self, on_output: Callable[[Any, float], None] | None = None, finished: int = 0
    ) -> Step:
        """One batch of the engine, from the end of the one before to its own."""
        ended = self._watch.ended
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
            blocks=self._held(),
        )

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        budget: str | None,
        on_finish: Callable[[], None],
    ) -> dict[str, Any]:
        """A whole job.

        Raises:
            RuntimeError: it did not generate what was asked for, or evicted nothing.
        """
        self._watch.preemptions = 0
        self.add(prompts, max_tokens, budget)
        first: dict[str, float] = {}
        timings: list[Timing] = []
        reports: list[dict[str, Any]] = []
        steps: list[Step] = []

        def on_output(output: Any, now: float) -> None:
            name = output.request_id
            if output.outputs[0].token_ids:
                first.setdefault(name, now)
            if output.finished:
                sent = self._sent.pop(name)
                tokens = len(output.outputs[0].token_ids)
                timings.append(Timing(first[name] - sent, now - sent, tokens))
                if output.kv_transfer_params:
                    reports.append(output.kv_transfer_params)
                on_finish()

        while self.client.has_unfinished_requests():
            steps.append(self.step(on_output, len(timings)))
        wrong = [timing.tokens for timing in timings if timing.tokens != max_tokens]
        if len(timings) != len(prompts) or wrong:
            raise RuntimeError(
                f"{len(prompts)} requests for {max_tokens} tokens: {len(timings)} came back, "
                f"of other lengths: {wrong}"
            )
        evicted = sum(report["evicted_tokens"] > 0 for report in reports)
        if budget is not None and evicted != len(prompts):
            raise RuntimeError(
                f"with the budget {budget} only {evicted} of {len(prompts)} requests report that "
                "they evicted something"
            )
        return asdict(summarise(steps, timings, self._watch.preemptions))

    def fill(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        budget: str | None,
        on_prefill: Callable[[int], None],
    ) -> dict[str, Any]:
        """Send requests and go on until as many decode as find room.

        Returns:
            resident: requests that decode. to_their_end: so many of them finish for certain with
                none thrown out, since the pool holds them all as long as they get.
            before_queueing: requests that had come in when the first had to wait for room; all, if
                none had to. blocks: held, of one layer. peak_blocks: the most meanwhile.
            tokens_left: the fewest that one of them still has to generate. steps_left: decode steps
                until one of them would have to be thrown out.

        Raises:
            RuntimeError: requests ended, or lost their place, before all that fit were in, or did
                not evict.
        """
        self._watch.preemptions = 0
        evictions = self._evictions()
        self.add(prompts, max_tokens, budget)
        resident, before_queueing, idle, peak = 0, None, 0, 0
        while idle < _SETTLED_STEPS:  # what an eviction frees is free a step later
            step = self.step()
            on_prefill(max(0, step.decoding - resident))
            resident, peak = max(resident, step.decoding), max(peak, step.blocks)
            idle = 0 if step.prompt_tokens else idle + 1
            if idle and resident and before_queueing is None:
                before_queueing = step.decoding
        if self._watch.preemptions or step.decoding != resident:
            raise RuntimeError(
                f"{self._watch.preemptions} requests were thrown out and "
                f"{resident - step.decoding} have ended before all that fit were in: ask for a "
                "longer --output-len"
            )
        evicted = self._evictions() - evictions
        if budget is not None and evicted < resident:
            raise RuntimeError(
                f"with the budget {budget} {resident} requests decode, and the scheduler counts "
                f"{evicted} evictions"
            )
        running = [Holding.of(self.scheduler, request) for request in self.scheduler.running]
        free = self.pool.get_num_free_blocks()
        usable = self.pool.num_gpu_blocks - 1 - len(self._reserved)
        tokens_left = min(r.max_tokens - r.num_output_tokens for r in self.scheduler.running)
        return {
            "resident": resident,
            "to_their_end": to_their_end(running, usable),
            "before_queueing": before_queueing,
            "blocks": step.blocks,
            "peak_blocks": peak,
            "tokens_left": tokens_left,
            "steps_left": steps_left(running, free, tokens_left),
        }

    def _evictions(self) -> int:
        """Evictions since the start; 0 without a policy."""
        coordinator = getattr(self.scheduler, "coordinator", None)
        return 0 if coordinator is None else int(coordinator.num_evictions)

    def steps(self, count: int) -> dict[str, Any]:
        """`count` decode steps of the requests that are in.

        Raises:
            RuntimeError: a step was not one of them: a prompt came in, or a request ended.
        """
        steps = [self.step() for _ in range(count)]
        batches = {step.decoding for step in steps}
        if len(batches) != 1 or any(step.prompt_tokens for step in steps):
            raise RuntimeError(
                f"the requests that decode changed during the measurement: {sorted(batches)}"
            )
        return {"seconds": [step.seconds for step in steps], "batch": batches.pop()}

    def profile(self, count: int) -> dict[str, Any]:
        """As many decode steps, every other one with timers (see `profile.profile`)."""
        return profile(self.client, lambda: self.steps(1)["seconds"][0], count)

    def clear(self) -> None:
        """End every request."""
        self.client.abort_request(list(self._sent))
        self._sent.clear()
        core = self.client.engine_core.engine_core
        # Asynchronous scheduling may have a batch under way, whose requests are gone.
        while self.scheduler.has_requests() or core.batch_queue:
            self.client.step()


def start(task: dict[str, Any]) -> Engine:
    """The engine that a task describes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.platforms import current_platform

    args = dict(task["engine_args"])
    if task["policy"] is None:
        from vllm import LLM
    else:
        from vllm_pyramid import LLM

        args["kv_policy"] = task["policy"]
    if current_platform.is_cpu():
        args.setdefault("enforce_eager", True)
    return Engine(LLM(task["model"], **args), task["block_bytes"])


def main() -> None:
    """Entry point of `python -m vllm_pyramid.bench.engine`."""
    engine: Engine | None = None
    for task in read_tasks():
        do = task.pop("do")
        if do == "start":
            engine = start(task)
            say(done={"pool_blocks": engine.pool_blocks})
        elif do == "machine":
            say(done=machine())
        else:
            assert engine is not None
            say(done=_serve(engine, do, task))


def _serve(engine: Engine, do: str, task: dict[str, Any]) -> Any:
    if do == "reserve":
        return engine.reserve(**task)
    if do == "run":
        return engine.run(**task, on_finish=lambda: say(progress=1))
    if do == "fill":
        return engine.fill(**task, on_prefill=lambda new: say(progress=new))
    if do == "steps":
        return engine.steps(**task)
    if do == "profile":
        return engine.profile(**task)
    if do == "profile_refusal":
        return refusal(engine.client)
    if do == "clear":
        return engine.clear()
    raise ValueError(f"unknown task {do!r}")


if __name__ == "__main__":
    main()
