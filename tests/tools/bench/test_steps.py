# SPDX-License-Identifier: Apache-2.0
"""What is observed of the scheduler, and the rates of a peer's batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pyramid.tools.bench import peer as peer_module
from vllm_pyramid.tools.bench.engine import Engine
from vllm_pyramid.tools.bench.peer import Peer
from vllm_pyramid.tools.bench.scheduler_state import (
    Batch,
    BlockGrowth,
    SchedulerLog,
    finish_without_preemption,
    steps_with_room,
)

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


def _growth(blocks: int, tokens: int, left: int) -> BlockGrowth:
    return BlockGrowth(blocks, tokens, left, (16, 16))


def test_room_by_hand() -> None:
    # Two tables: 4 blocks now, of 40 tokens the newest 24 at least; 8 more fill the last blocks.
    growth = _growth(4, 40, 30)
    assert [growth.after(steps) for steps in (0, 8, 9, 24, 25, 30, 99)] == [4, 4, 6, 6, 8, 8, 8]
    three = [growth, _growth(5, 40, 30), _growth(4, 47, 1)]
    # At their ends 8, 9 and 4 blocks: the two smallest need 12, all 21.
    assert [finish_without_preemption(three, blocks) for blocks in (3, 4, 11, 12, 20, 21)] == [
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    # Two of them need two blocks each in the 9th step, and again in the 25th.
    assert [steps_with_room(three, free, 30) for free in (0, 3, 4, 7, 8)] == [8, 8, 24, 24, 30]


def test_a_peers_rate_is_that_of_full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(peer_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Timed(Peer):
        def __init__(self) -> None:
            self.size = 0

        def prefill(self, prompts: list[list[int]], keep: int | None) -> None:
            self.size = len(prompts)
            clock[0] += 100.0

        def step(self) -> None:
            clock[0] += 2.0 if self.size == 4 else 1.5

    answer = Timed().run([[1]] * 9, 11, None, batch=4)
    assert answer["decode_tokens_per_s"] == 2.0 and answer["batch"] == 4
    assert answer["seconds"] == 300 + 20 + 20 + 15 and len(answer["timings"]) == 9
    few = Timed().run([[1]] * 3, 11, None, batch=4)
    assert few["decode_tokens_per_s"] == 2.0 and few["batch"] == 3
