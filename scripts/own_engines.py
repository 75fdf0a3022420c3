# SPDX-License-Identifier: Apache-2.0
"""Engines of the benches: each in a process of its own that waits for work, or in this one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any


def stay_in_process(threads: str, *, stock: bool = False) -> None:
    """Set, before vLLM is imported, that it stays in this process and logs errors alone.

    Args:
        threads: that OpenMP has.
        stock: no plugin is loaded, this package included.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": threads,
    }
    if stock:
        os.environ["VLLM_PLUGINS"] = ""


def start_engines(
    target: Callable[..., None], arguments: Mapping[str, tuple[Any, ...]]
) -> dict[str, Connection]:
    """Start a process for each name, one after another, and return what its work goes through.

    Args:
        target: of a process: takes its end of the pipe and the arguments of its name, sends
            "ready" once, and ends at None.
        arguments: of each name.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, own in arguments.items():
        ours, theirs = spawn.Pipe()
        spawn.Process(target=target, args=(theirs, *own), daemon=True).start()
        assert ours.recv() == "ready"
        pipes[name] = ours
    return pipes
