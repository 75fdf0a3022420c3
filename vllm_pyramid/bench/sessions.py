# SPDX-License-Identifier: Apache-2.0
"""The engines and peers of a bench, each in a process of its own, and what they are asked.

All are started before the first measurement and stay. One at a time measures; the others sleep in a
read. So A and B can take turns within seconds, and whatever else the machine does meets both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_pyramid.bench.cost import Machine
from vllm_pyramid.bench.measure import Measurement, Timing, latencies
from vllm_pyramid.bench.plan import KVPRESS, PRESSES, Plan, Variant
from vllm_pyramid.child_process import Child

__all__ = ["Sessions", "gpu_share"]

Stage = Callable[[str], None]
Progress = Callable[[int], None]


def gpu_share(engines: int) -> float:
    """Of a GPU's memory, for each of the engines that are alive at once on it."""
    return round(0.9 / engines, 3)


class Sessions:
    """The processes of a bench; use it in a `with` statement.

    Variants that differ in the budget alone share an engine, since each request names its own,
    unless they are to hold requests at the same time.

    Args:
        share: whether they may.
        model: folder or name. random: its weights are made up. threads: of each, on the CPU; None
            where a GPU computes. peer_python: of the environment that has kvpress.
    """

    def __init__(
        self,
        plan: Plan,
        variants: Sequence[Variant],
        model: str,
        *,
        random: bool,
        share: bool,
        threads: int | None,
        peer_python: str | None,
        on_stage: Stage,
    ) -> None:
        self.plan = plan
        self._share = share
        self._children: dict[str, Child] = {}
        self._stack = ExitStack()
        self._pool_blocks: dict[str, int] = {}
        offline = Path(model).is_dir()
        engines = len({self._key(variant) for variant in variants})
        environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        try:
            for variant in variants:
                if self._key(variant) in self._children:
                    continue
                on_stage(f"starting {self._key(variant)}")
                python = peer_python if variant.is_peer and peer_python else sys.executable
                module = ["-m", "vllm_pyramid.bench.engine"]
                if variant.is_peer:
                    module = ["-P", str(Path(__file__).with_name("peer.py"))]
                child = Child(
                    [python, *module],
                    f"the {'peer' if variant.is_peer else 'engine'} {variant.policy!r}",
                    offline=offline,
                    environment={**environment, **variant.environment},
                )
                self._children[self._key(variant)] = self._stack.enter_context(child)
                self._start(variant, model, random, engines if threads is None else 0)
            self._check_pools(variants)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _key(self, variant: Variant) -> str:
        return variant.policy if self._share else variant.label

    def _start(self, variant: Variant, model: str, random: bool, sharing: int) -> None:
        """Start a model. `sharing`: processes that share a GPU, 0 on the CPU."""
        if variant.is_peer:
            task: dict[str, Any] = {
                "model": model,
                "dtype": self.plan.shape.dtype,
                "random": random,
                "press": PRESSES.get(variant.policy.removeprefix(KVPRESS)),
            }
            self._ask(variant, do="start", **task)
            return
        arguments = self.plan.arguments_of(variant)
        if sharing:
            arguments.setdefault("gpu_memory_utilization", gpu_share(sharing))
        if random:
            arguments.setdefault("load_format", "dummy")
        answer = self._ask(
            variant,
            do="start",
            model=model,
            policy=None if variant.is_stock else variant.policy,
            engine_args=arguments,
            block_bytes=self.plan.block_bytes,
        )
        blocks = answer["pool_blocks"]
        if variant.is_stock:
            blocks = min(blocks, self.plan.pool_blocks(variant, self.plan.pool_prompts))
            self._ask(variant, do="reserve", blocks=blocks)
        self._pool_blocks[self._key(variant)] = blocks

    def _check_pools(self, variants: Sequence[Variant]) -> None:
        """Equal memory is what is compared: refuse to go on without.

        Raises:
            ValueError: an engine has more than a block a layer more or less than was asked for.
        """
        for variant in variants:
            if variant.is_peer:
                continue
            wanted = self.plan.pool_blocks(variant, self.plan.pool_prompts)
            blocks = self._pool_blocks[self._key(variant)]
            if abs(blocks - wanted) > self.plan.shape.layers:
                raise ValueError(
                    f"the engine with {self._key(variant)!r} has {blocks} blocks of a layer "
                    f"instead of {wanted}: leave num_gpu_blocks_override, block_size and the like "
                    "out of --engine-args"
                )

    def _ask(self, variant: Variant, on_progress: Progress | None = None, **task: Any) -> Any:
        for message in self._children[self._key(variant)].ask(task):
            if "done" in message:
                return message["done"]
            if on_progress is not None:
                on_progress(message["progress"])
        raise AssertionError("an answer ends with `done`")

    def machine(self) -> Machine:
        """Rates of this machine, measured by one of the engines; zeros if there is none."""
        for key in self._pool_blocks:
            for message in self._children[key].ask({"do": "machine"}):
                return Machine(message["done"]["bandwidth"], message["done"]["flops"])
        return Machine(0.0, 0.0)

    def limit_pool(self, variant: Variant, pool_prompts: float) -> None:
        """Let a pool hold so many whole requests only. Peers have no pool."""
        if not variant.is_peer:
            wanted = self.plan.pool_blocks(variant, pool_prompts)
            blocks = min(wanted, self._pool_blocks[self._key(variant)])
            self._ask(variant, do="reserve", blocks=blocks)

    def _arguments(self, variant: Variant) -> dict[str, Any]:
        if not variant.is_peer:
            return {"budget": variant.budget}
        kept = None
        if variant.budget is not None:
            kept = variant.peer_keeps(self.plan.prompt_len)
        return {"keep": kept, "batch": self.plan.peer_batch(variant)}

    def run(
        self, variant: Variant, prompts: list[list[int]], max_tokens: int, on_progress: Progress
    ) -> Measurement:
        """A whole job; progress counts requests that have ended."""
        task = {"prompts": prompts, "max_tokens": max_tokens, **self._arguments(variant)}
        answer = self._ask(variant, on_progress, do="run", **task)
        if not variant.is_peer:
            return Measurement(**answer)
        timings = [Timing(*timing) for timing in answer["timings"]]
        ttft_ms, tpot_ms = latencies(timings)
        return Measurement(
            output_tokens=sum(timing.tokens for timing in timings),
            seconds=answer["seconds"],
            decode_tokens_per_s=answer["decode_tokens_per_s"],
            decode_batch=answer["batch"],
            prefill_share=answer["prefill_seconds"] / answer["seconds"],
            resident_max=answer["batch"],
            peak_blocks=None,
            decode_blocks=None,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
        )

    def fill(
        self, variant: Variant, prompts: list[list[int]], max_tokens: int, on_progress: Progress
    ) -> dict[str, Any]:
        """As many requests as find room, ready to decode (see `Engine.fill`)."""
        task: dict[str, Any] = {"prompts": prompts, **self._arguments(variant)}
        if not variant.is_peer:
            task["max_tokens"] = max_tokens
        answer: dict[str, Any] = self._ask(variant, on_progress, do="fill", **task)
        return answer

    def steps(self, variant: Variant, count: int) -> dict[str, Any]:
        """Decode steps of those requests: `seconds` of each, and `batch`."""
        answer: dict[str, Any] = self._ask(variant, do="steps", count=count)
        return answer

    def profile(self, variant: Variant, count: int) -> dict[str, Any]:
        """As many steps, every other one with timers (see `profile.profile`)."""
        answer: dict[str, Any] = self._ask(variant, do="profile", count=count)
        return answer

    def profile_refusal(self, variant: Variant) -> str:
        """Why that cannot be; empty where it can."""
        reason: str = self._ask(variant, do="profile_refusal")
        return reason

    def clear(self, variant: Variant) -> None:
        """End those requests."""
        if not variant.is_peer:
            self._ask(variant, do="clear")
