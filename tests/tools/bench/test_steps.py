# SPDX-License-Identifier: Apache-2.0
"""What the bench reads from the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pyramid.tools.bench.engine import Engine
from vllm_pyramid.tools.bench.scheduler_log import Batch, SchedulerLog, steps_with_room

pytestmark = pytest.mark.cpu


def _scheduled(new: dict[str, int], cached: dict[str, int], **tokens: int) -> Any:
    """A `SchedulerOutput`: computed tokens of new and of running requests, tokens of each."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed)
            for name, computed in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
        num_scheduled_tokens=tokens,
    )


class BatchQueue:
    """An engine as vLLM's with asynchronous scheduling: a call schedules one batch and takes the
    results of the one before. Its scheduler is itself.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.to_schedule, self.under_way = batches, []
        self.requests = {name: SimpleNamespace(num_prompt_tokens=8) for name in "ab"}
        self.waiting: list[Any] = []
        self.pool = SimpleNamespace(num_gpu_blocks=10, get_num_free_blocks=lambda: 4)
        self.kv_cache_manager = SimpleNamespace(block_pool=self.pool)
        spec = SimpleNamespace(page_size_bytes=64)
        group = SimpleNamespace(layer_names=["0"], kv_cache_spec=spec)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group, group])
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))

    def update_from_output(self, scheduled: Any, output: Any) -> None:
        self.requests.pop(output, None)

    def _preempt_request(self, request: Any) -> None:
        pass

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        if self.to_schedule:
            self.under_way.append(self.to_schedule.pop(0))
            if len(self.under_way) < 2:
                return []
        scheduled, ends = self.under_way.pop(0)
        self.update_from_output(scheduled, ends)
        return []


def test_batches_are_logged_when_they_end() -> None:
    queue = BatchQueue(
        [
            (_scheduled({"a": 0}, {}, a=8), None),
            (_scheduled({"b": 0}, {"a": 8}, a=1, b=6), None),
            (_scheduled({}, {"a": 9, "b": 6}, a=1, b=2), "a"),
            # Scheduled before `a` was known to have ended: its token is nobody's.
            (_scheduled({}, {"a": 10, "b": 8}, a=1, b=1), "b"),
        ]
    )
    engine = Engine(SimpleNamespace(llm_engine=queue), 64)
    steps = [engine.step() for _ in range(4)]
    assert [(step.prompt_tokens, step.decoding) for step in steps] == [
        *((8, 0), (6, 1), (2, 1), (0, 1))
    ]
    assert not queue.has_unfinished_requests()


def test_preemptions_are_counted() -> None:
    queue = BatchQueue([])
    log = SchedulerLog(queue)
    queue._preempt_request(None)
    queue.update_from_output(_scheduled({}, {}), None)
    assert log.preemptions == 1 and log.ended == [Batch(0, 0)]


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
