# SPDX-License-Identifier: Apache-2.0
"""What the bench reads from the scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_pyramid.tools.bench.scheduler_log import steps_with_room

pytestmark = pytest.mark.cpu


def test_room_by_hand() -> None:
    """Two tables; the last blocks of two requests have 8 tokens left, that of the third one."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group, group]),
        running=[SimpleNamespace(num_computed_tokens=tokens) for tokens in (40, 40, 47)],
    )
    steps = [steps_with_room(scheduler, free, 30) for free in (0, 1, 2, 5, 6, 7, 8, 12)]
    # They need 2 blocks from the 2nd step on, 6 from the 9th, 8 from the 18th, 12 from the 25th.
    assert steps == [1, 1, 8, 8, 17, 17, 24, 30]
