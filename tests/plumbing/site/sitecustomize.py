# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start collect no garbage until vLLM does, and then not what they imported.

Python imports this at its start, because `conftest.py` puts this folder on the path of what
tests start. A process with vLLM has a million objects of imports, which Python looks through many
times while it imports and twice at its end, and vLLM ten times in an engine's start: half of the
time of a process that starts one small engine. What engines make is collected as ever.
"""

from __future__ import annotations

import atexit
import gc

import avx2_alone
import forked_processes

_collect, _freeze = gc.collect, gc.freeze


def _collect_first(generation: int = 2) -> int:
    """Stands for `gc.collect` until it is called: by vLLM, which has imported most by then."""
    gc.collect = _collect
    found = _collect(generation)
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()
    return found


avx2_alone.pretend()
forked_processes.install()
gc.disable()
atexit.register(_freeze)
gc.collect = _collect_first
