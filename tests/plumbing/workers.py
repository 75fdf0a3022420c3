# SPDX-License-Identifier: Apache-2.0
"""Ranks that sleep while they wait, for `child.py`: they share few cores.

vLLM lets each poll for its next message for a second. Where a file has twelve of them on two cores,
that is most of its time.
"""

from __future__ import annotations

import time
from functools import partial


def sleep_while_waiting() -> None:
    """Whoever polls for a message of another process sleeps between two looks.

    vLLM has it yield its core, and wait for a notice only after a second without a message. To wait
    for the notice at once is no way out: now and then one is missed, for a minute.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = partial(time.sleep, 0.0003)
