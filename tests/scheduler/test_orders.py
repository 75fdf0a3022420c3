# SPDX-License-Identifier: Apache-2.0
"""When the scheduler orders evictions (`--kv-evict pressure`), and what it reports of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.scheduler.beside import Beside
from tests.scheduler.harness import make_request
from tests.scheduler.jobs import SMALL, Job, exact_request
from vllm_pyramid.scheduler.pressure import Pressure

LAYERS = SMALL.num_layers
SETUP = replace(
    SMALL,
    policy_args=(*SMALL.policy_args, ("schedule", "pressure"), ("schedule.levels", ("70%",))),
)


def _pressure(job: Job) -> Pressure:
    found = job.scheduler.pyramid.pressure
    assert found is not None
    return found


def _whole_prompt(setup: Any, blocks: int) -> Job:
    """A job with one whole prompt of 15 blocks in each layer, which generates.

    Each level loses four times as much as the one above, so orders go no further than they must.
    """
    job = Job(setup, blocks * LAYERS + 1)
    losses = job.worker._losses

    def rising(step: Any) -> dict[str, tuple[int, list[float]]]:
        found = losses(step)
        return {
            name: (point, [0.01 * 4**level for level in range(len(shares))])
            for name, (point, shares) in found.items()
        }

    worker: Any = job.worker
    worker._losses = rising
    job.add(make_request("whole", 60, 30))
    for _ in range(3):
        job.step()
    assert _pressure(job).totals()["requests_by_level"]["whole"] == 1
    return job


@pytest.mark.parametrize("watermark", [0.0, 0.2])
def test_orders_free_what_the_watermark_asks_for(watermark: float) -> None:
    """Of 30 blocks a layer 16 are held: 15 are to start, and with a watermark 6 to stay free."""
    job = _whole_prompt(replace(SETUP, watermark=watermark), 30)
    job.add(exact_request("second", 60, 5))
    for _ in range(2):  # an order, and its blocks
        job.step()
    assert "second" in job.started
    assert _pressure(job).totals()["ordered_evictions"] == 1
    job.finish()
    assert not job.preemptions


def test_a_request_that_loads_its_state_is_given_way_to() -> None:
    job = _whole_prompt(SETUP, 28)
    scheduler, pressure = job.scheduler, _pressure(job)
    job.add(request := exact_request("loads", 60, 5))
    found = scheduler.pyramid

    class Later:
        """A store whose blocks a connector fills."""

        loads_later = True

        def answer(self, hit: Any) -> Any:
            return None

    def find(request: Any, most: int, *, shared: bool) -> int:
        records = found.coordinator.plans.records
        records[request.request_id].found = Found(Later())
        return 0

    class Found:
        def __init__(self, store: Any) -> None:
            self.store, self.hit = store, None

    found.begin_step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.ways, "find", find)
        patch.setattr(found.begun, "add", lambda *_: None)
        assert found.cached_tokens(request, 59, shared=True) == 0
    found.coordinator.plans.records["loads"].found = None
    assert found.chunks.admitted is request
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert pressure.orders(scheduler.running, request, {"whole": 1}) is None, "it has its blocks"
    request.status = RequestStatus.WAITING
    assert list(pressure.orders(scheduler.running, request, {"whole": 1}) or {}) == ["whole"]


def test_an_order_that_no_token_has_seen_is_not_reported() -> None:
    """With asynchronous scheduling a request may be ordered after its last token was sampled."""
    job = _whole_prompt(replace(SETUP, asynchronous=True), 28)
    report, ended = _pressure(job).on_request_finished, dict[str, dict[str, Any]]()

    def noted(request_id: str) -> dict[str, Any]:
        ended[request_id] = report(request_id)
        return ended[request_id]

    job.worker.stop.add("whole")
    job.step()  # samples its last token, which the scheduler learns two steps later
    job.add(exact_request("second", 60, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pressure(job), "on_request_finished", noted)
        while "whole" not in ended:
            job.step()
    assert _pressure(job).totals()["ordered_evictions"] == 0 and not _pressure(job).is_pending
    assert ended["whole"]["evicted_after"] == ended["whole"]["evicted_to"] == []
    assert "lost_share" not in ended["whole"]
    assert (
        ended["whole"]["kv_budget"]
        == job.scheduler.pyramid.planner.terms(make_request("like", 60))[0].plan.budget_tokens
    )
    job.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_of_steps_under_way_count_as_generated_before_an_order(asynchronous: bool) -> None:
    job = _whole_prompt(replace(SETUP, asynchronous=asynchronous), 28)
    carry_out, generated = job.worker._carry_out, list[int]()

    def noted(request_id: str, *order: Any) -> None:
        row = job.worker.rows[request_id]
        generated.append(row.computed + 1 - row.prompt_len)
        carry_out(request_id, *order)

    worker: Any = job.worker
    worker._carry_out = noted
    job.add(exact_request("second", 60, 5))
    for _ in range(3):
        job.step()
    assert generated and generated[0] > 1
    assert [one[0] for one in _pressure(job)._requests["whole"].evictions] == generated
    job.finish()


def test_an_order_that_the_last_token_has_seen_is_reported_behind_a_preemption() -> None:
    """The step of the order was under way when its request was preempted, and ends it."""
    job = _whole_prompt(replace(SETUP, asynchronous=True), 28)
    report, ended = _pressure(job).on_request_finished, dict[str, dict[str, Any]]()

    def noted(request_id: str) -> dict[str, Any]:
        ended[request_id] = report(request_id)
        return ended[request_id]

    carry_out, worker = job.worker._carry_out, job.worker

    def with_last_token(request_id: str, *order: Any) -> None:
        job.worker.stop.add(request_id)
        carry_out(request_id, *order)

    untyped: Any = worker
    untyped._carry_out = with_last_token
    job.add(exact_request("second", 60, 5))
    while not worker.num_ordered:
        job.step()
    scheduler = job.scheduler
    (request,) = scheduler.running
    assert _pressure(job).is_pending
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pressure(job), "on_request_finished", noted)
        while job.in_flight:
            scheduler.update_from_output(*job.in_flight.popleft())
    assert len(ended["whole"]["evicted_after"]) == 1
    assert _pressure(job).totals()["ordered_evictions"] == 1
    job.finish()


def test_levels_take_no_more_memory_than_is_reserved() -> None:
    """Five requests over one prompt of 60 tokens fit into a pool of 161, but levels of two do."""
    job = Job(replace(SETUP, prefix_caching=True), 40 * LAYERS)
    prompt = list(range(60))
    for name, tokens in zip("abcde", (4, *4 * (12,)), strict=True):
        job.add(exact_request(name, prompt, tokens, hash_block_size=4))
    for _ in range(3):
        job.step()  # the worker counts its levels
    assert sorted(job.worker.marked) == ["a", "b"]
    assert _pressure(job).totals()["requests_by_level"]["whole"] == 5
    table = job.admission.table
    given_back = {name: table._of_stages[0, 0, slot] for name, slot in table._slots.items()}
    assert [name for name in "abcde" if given_back[name]] == ["a", "b"]
    while "a" in job.scheduler.requests:
        job.step()
    job.add(exact_request("f", prompt, 12, hash_block_size=4))
    while "f" not in job.started:
        job.step()
    assert sorted(job.worker.marked)[-1] == "f"
    job.finish()
    assert not job.preemptions


def test_calm_steps_are_counted_by_what_all_layers_take() -> None:
    """Layers beside those that evict take blocks of a step, too."""
    job = Job(replace(SETUP, beside=(Beside("sliding", 21, 8), Beside("draft")), drafts=8), 30)
    coordinator = job.scheduler.coordinator
    assert _pressure(job)._of_step == coordinator.get_num_blocks_to_allocate("", 1 + 8) > 3 * LAYERS
