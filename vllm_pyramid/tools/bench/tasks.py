# SPDX-License-Identifier: Apache-2.0
"""One policy's engine in a process, which gets one task after the other from `processes.py`.

The first task says what to start, the others what to do; between tasks the process sleeps. vLLM's
engine core runs in this process, so that every step can be timed and observed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm_pyramid.tools.bench.engine import Engine
from vllm_pyramid.tools.child_process import read_tasks, say


def start(task: dict[str, Any]) -> Engine:
    """Start the engine that a task describes."""
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


Methods = Mapping[str, Callable[..., Any]]


def main(more: Callable[[Engine], Methods] = lambda engine: {}) -> None:
    """Do the tasks of standard input, those of `more` too."""
    engine: Engine | None = None
    for task in read_tasks():
        do = task.pop("do")
        if do == "start":
            engine = start(task)
            say(done={"pool_blocks": engine.pool_blocks})
            continue
        assert engine is not None
        methods: Methods = {
            "reserve": engine.reserve,
            "run": partial(engine.run, on_finish=lambda: say(progress=1)),
            "fill": partial(engine.fill, on_prefill=lambda new: say(progress=new)),
            "steps": engine.steps,
            **more(engine),
        }
        say(done=methods[do](**task))


if __name__ == "__main__":
    main()
