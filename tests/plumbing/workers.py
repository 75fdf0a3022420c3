# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own on few cores, for `child.py`: forked, and asleep while they wait.

vLLM starts each in a fresh Python, which imports for eight seconds of a core, and lets it poll for
its next message for a second. Where a file starts twelve of them on two cores, that is most of its
time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Module of this folder that the process imports from which workers are forked.
SERVER = "fork_server"


def sleep_while_waiting() -> None:
    """Whoever polls for a message of another process sleeps between two looks.

    vLLM has it yield its core, and wait for a notice only after a second without a message. To wait
    for the notice at once is no way out: now and then one is missed, for a minute.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = partial(time.sleep, 0.0003)


class InEnvironment:
    """A function of a worker, with these environment variables, as if it had been started so."""

    def __init__(self, function: Callable[..., Any], environment: dict[str, str]) -> None:
        self._function, self._environment = function, environment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert SERVER in sys.modules, "the process that forks workers could not import it"
        os.environ.clear()
        os.environ.update(self._environment)
        return self._function(*args, **kwargs)


class Context:
    """Multiprocessing's context of a fork server, whose processes get this one's environment."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([SERVER])

    def Process(self, *, target: Callable[..., Any], **others: Any) -> Any:
        return self._context.Process(target=InEnvironment(target, dict(os.environ)), **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def fork_workers() -> None:
    """Workers of engines of this process are forked from one that has imported what they need."""
    from vllm.v1.executor import multiproc_executor

    # Python 3.11 does not hand its path on to the fork server.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    context = Context()
    multiproc_executor.get_mp_context = lambda: context
