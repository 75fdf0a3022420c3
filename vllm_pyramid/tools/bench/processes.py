# SPDX-License-Identifier: Apache-2.0
"""The engines of a bench, each in a process.

All start before the first measurement and stay. One measures at a time while the others sleep. So
variants can alternate within seconds, and other load on the machine affects all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_pyramid.tools.bench.job import Variant
from vllm_pyramid.tools.bench.prepare import Prepared
from vllm_pyramid.tools.child_process import Child


def gpu_share(engines: int) -> float:
    """Return the share of a GPU's memory for each of `engines` engines."""
    return round(0.9 / engines, 3)


class Engines:
    """The processes of a bench, which run `module`; use it in a `with` statement.

    Variants of one policy may `share` an engine, since each request has its own budget, unless they
    have to hold requests at the same time.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        share: bool,
        on_stage: Callable[[str], None],
        module: str = "vllm_pyramid.tools.bench.tasks",
    ) -> None:
        self._module = module
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
        """Start a process and its engine, in memory equal to the others'.

        ValueError: the engine has a block a layer more or less.
        """
        prepared, job, threads = self._prepared, self._job, self._prepared.threads
        environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        child = Child(
            [sys.executable, "-m", self._module],
            f"the engine {variant.name!r}",
            offline=Path(prepared.model).is_dir(),
            environment=environment | variant.environment,
        )
        self._children[key] = self._stack.enter_context(child)
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
        """Have a variant's process do something (see `tasks.main`), and return its answer."""
        for message in self._children[self._key(variant)].ask({"do": do, **arguments}):
            if "done" in message:
                return message["done"]
            on_progress(message["progress"])
        raise AssertionError("an answer ends with `done`")

    def limit_pool(self, variant: Variant, pool_prompts: float) -> None:
        """Leave an engine the blocks of `pool_prompts` whole requests only."""
        wanted = self._job.pool_blocks(variant, pool_prompts)
        blocks = min(wanted, self._pool_blocks[self._key(variant)])
        self.ask(variant, "reserve", blocks=blocks)
