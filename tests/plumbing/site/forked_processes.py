# SPDX-License-Identifier: Apache-2.0
"""Fork vLLM's engine cores and workers from the process that starts them.

vLLM spawns them on a CPU: each is a fresh Python that imports PyTorch and vLLM again, for twelve
seconds of a core, which was most of what tests with servers did. vLLM has code for both ways, and
forks by default where it may. With more than one OpenMP thread a forked process could not compute,
so processes without `OMP_NUM_THREADS=1` go on to spawn theirs, as do those with
`PYRAMID_TEST_SPAWN=1`: those that tests start as a user would. Further front ends are spawned, too:
prometheus_client reads the variable of their common folder when it is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import Any

# The module that chooses how vLLM starts its processes.
CHOOSER = "vllm.utils.system_utils"

_get_context = multiprocessing.get_context


def _forks() -> bool:
    return os.environ.get("OMP_NUM_THREADS") == "1" and os.environ.get("PYRAMID_TEST_SPAWN") != "1"


def _context(method: str | None = None) -> Any:
    """Stand for `multiprocessing.get_context`: of vLLM's choice, return the one that forks."""
    if method == "spawn" and sys._getframe(1).f_globals.get("__name__") == CHOOSER and _forks():
        method = "fork"
    return _get_context(method)


def install() -> None:
    """Let this process fork what it would spawn, if it may by then."""
    multiprocessing.get_context = _context
    # A front end's event loop is told of signals through a socket, which a fork would share.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
