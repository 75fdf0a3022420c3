# SPDX-License-Identifier: Apache-2.0
"""The engines and peers of a bench, each in a process of its own.

All start before the first measurement and stay. One measures at a time while the others sleep. So
variants can alternate within seconds, and other load on the machine meets all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_pyramid.tools.bench.cost import Machine
from vllm_pyramid.tools.bench.job import KVPRESS, PRESSES, Variant
from vllm_pyramid.tools.bench.prepare import Prepared
from vllm_pyramid.tools.bench.samples import Sample, peer_sample
from vllm_pyramid.tools.child_process import Child


def gpu_share(engines: int) -> float:
    """The share of a GPU's memory for each of so many engines that are alive at once."""
    return round(0.9 / engines, 3)


class Engines:
    """The processes of a bench; use it in a `with` statement.

    Variants of one policy share an engine, since each request has its own budget, unless they have
    to hold requests at the same time.

    Args:
        share: whether they may. on_stage: told what is being done.
    """

    def __init__(self, prepared: Prepared, *, share: bool, on_stage: Callable[[str], None]) -> None:
        self._prepared, self._job, self._share = prepared, prepared.job, share
        self._children: dict[str, Child] = {}
        self._stack = ExitStack()
        self._pool_blocks: dict[str, int] = {}
        first: dict[str, Variant] = {}
        for variant in prepared.variants:
            first.setdefault(self._key(variant), variant)
        try:
            for key, variant in first.items():
                on_stage(f"starting {key}")
                self._start(key, variant, len(first))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _key(self, variant: Variant) -> str:
        return variant.name if self._share else variant.label

    def _start(self, key: str, variant: Variant, processes: int) -> None:
        """Start a process and its model.

        Raises:
            ValueError: an engine has a block a layer more or less than the others. Equal memory is
                what is compared.
        """
        prepared, job, threads = self._prepared, self._job, self._prepared.threads
        python, module = sys.executable, ["-m", "vllm_pyramid.tools.bench.engine"]
        if variant.is_peer:
            python = prepared.peer_python or python
            module = ["-P", str(Path(__file__).with_name("peer.py"))]
        environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        child = Child(
            [python, *module],
            f"the {'peer' if variant.is_peer else 'engine'} {variant.name!r}",
            offline=Path(prepared.model).is_dir(),
            environment=environment | variant.environment,
        )
        self._children[key] = self._stack.enter_context(child)
        if variant.is_peer:
            press = PRESSES.get(variant.policy.removeprefix(KVPRESS))
            self.ask(
                variant,
                "start",
                model=prepared.model,
                dtype=job.shape.dtype,
                random=prepared.random,
                press=press,
            )
            return
        arguments: dict[str, Any] = (
            {} if threads else {"gpu_memory_utilization": gpu_share(processes)}
        )
        arguments |= {"load_format": "dummy"} if prepared.random else {}
        answer = self.ask(
            variant,
            "start",
            model=prepared.model,
            policy=None if variant.is_stock else variant.policy,
            engine_args=arguments | job.engine_arguments(variant),
            block_bytes=job.block_bytes(variant),
        )
        blocks, wanted = answer["pool_blocks"], job.pool_blocks(variant, job.pool_prompts)
        if variant.is_stock:
            blocks = min(blocks, wanted)
            self.ask(variant, "reserve", blocks=blocks)
        if abs(blocks - wanted) > job.shape.layers:
            raise ValueError(
                f"the engine with {key!r} has {blocks} blocks of a layer instead of {wanted}: "
                "leave num_gpu_blocks_override, block_size and the like out of --engine-args"
            )
        self._pool_blocks[key] = blocks

    def ask(
        self,
        variant: Variant,
        do: str,
        on_progress: Callable[[int], None] = lambda _: None,
        **arguments: Any,
    ) -> Any:
        """Have a variant's process do something; see `engine.main` and `peer.main`."""
        for message in self._children[self._key(variant)].ask({"do": do, **arguments}):
            if "done" in message:
                return message["done"]
            on_progress(message["progress"])
        raise AssertionError("an answer ends with `done`")

    def machine(self) -> Machine | None:
        """Rates of this machine, measured by one of the engines; None if there is none."""
        for variant in self._prepared.variants:
            if not variant.is_peer:
                return Machine(**self.ask(variant, "machine"))
        return None

    def limit_pool(self, variant: Variant, pool_prompts: float) -> None:
        """Leave an engine blocks for so many whole requests only. Peers have no block pool."""
        if not variant.is_peer:
            wanted = self._job.pool_blocks(variant, pool_prompts)
            blocks = min(wanted, self._pool_blocks[self._key(variant)])
            self.ask(variant, "reserve", blocks=blocks)

    def run(
        self,
        variant: Variant,
        prompts: list[list[int]],
        max_tokens: int,
        on_progress: Callable[[int], None],
        later: list[list[list[int]]] | None = None,
    ) -> Sample:
        """A whole job. Progress counts requests, or conversations, that have finished.

        Args:
            later: what follows the prompts once they are answered; peers get no conversations.
        """
        task = {"prompts": prompts, "max_tokens": max_tokens, **self._budget(variant)}
        if not variant.is_peer:
            resume = self._job.resume and not variant.is_stock
            task |= {"later": later, "concurrency": self._job.concurrency, "resume": resume}
        answer: Sample = self.ask(variant, "run", on_progress, **task)
        return peer_sample(answer) if variant.is_peer else answer

    def fill(self, variant: Variant, on_progress: Callable[[int], None]) -> Sample:
        """Prefill as many requests as are admitted, ready to decode (see `Engine.fill`)."""
        task = {"prompts": self._job.prompts(0), **self._budget(variant)}
        if not variant.is_peer:
            task["max_tokens"] = self._job.output_len
        answer: Sample = self.ask(variant, "fill", on_progress, **task)
        return answer

    def _budget(self, variant: Variant) -> dict[str, Any]:
        if not variant.is_peer:
            return {"budget": variant.budget}
        kept = None if variant.budget is None else variant.tokens_kept(self._job.prompt_len)
        return {"keep": kept, "batch": self._job.peer_batch(variant)}
