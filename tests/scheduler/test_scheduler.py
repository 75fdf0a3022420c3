# SPDX-License-Identifier: Apache-2.0
"""Single situations of the schedulers that the state machine meets too seldom, and the reports."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.scheduler.checks import check_pool
from tests.scheduler.harness import PlainWorker, Setup, make_request, make_scheduler
from vllm_pyramid.compat import page_server
from vllm_pyramid.compat.side_channel import (
    StepReport,
    attach_report,
    read_report,
    take_policy_stats,
)

SYNC = Setup()
ASYNC = Setup(asynchronous=True)


class Pair:
    """A scheduler and its worker; steps whose output waits are in `in_flight`."""

    def __init__(self, setup: Setup, spare_blocks: int = 0) -> None:
        num_blocks = setup.blocks_of_longest + spare_blocks
        self.scheduler = make_scheduler(setup, num_blocks)
        self.coordinator = self.scheduler.coordinator
        self.worker = PlainWorker(self.scheduler.pyramid.policy, setup, num_blocks)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, *args: Any, **kwargs: Any) -> None:
        self.scheduler.add_request(make_request(*args, **kwargs))

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.worker.execute(output)))
        check_pool(self.coordinator)
        return output

    def process(self) -> dict[int, Any]:
        return self.scheduler.update_from_output(*self.in_flight.popleft())

    def step(self) -> dict[int, Any]:
        self.schedule()
        return self.process()


def test_an_id_that_is_taken_leaves_the_first_request_as_it_is() -> None:
    """vLLM's answer is an assertion; the plan must still be that of the request which runs."""
    pair = Pair(SYNC)
    pair.add("r", 40)
    plan = pair.scheduler.coordinator.plans.of("r")
    with pytest.raises(AssertionError, match="duplicate request id"):
        pair.add("r", 20)
    assert pair.scheduler.coordinator.plans.of("r") is plan


@pytest.mark.parametrize(
    ("prompt_len", "chunks"),
    [(64, [64]), (65, [59, 6]), (69, [63, 6]), (70, [64, 6]), (71, [64, 7]), (80, [64, 16])],
)
def test_the_last_chunk_carries_the_window(prompt_len: int, chunks: list[int]) -> None:
    pair = Pair(SYNC)
    pair.add("r", prompt_len)
    seen = []
    for _ in chunks:
        seen.append(pair.schedule().num_scheduled_tokens["r"])
        pair.process()
    assert seen == chunks
    assert pair.coordinator.plans.confirmed("r") is not None


def test_full_requests_are_not_cut() -> None:
    pair = Pair(SYNC)
    pair.add("r", 65, extra_args={"kv_policy": "full"})
    assert pair.schedule().num_scheduled_tokens == {"r": 64}
    pair.process()
    assert pair.schedule().num_scheduled_tokens == {"r": 1}


def test_prompts_whose_logits_are_made_have_the_chunks_that_are_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As replays ask for them; other requests are not cut."""
    monkeypatch.setattr(page_server, "is_server", lambda: True)
    settings = (("kv_shadow", "100%"),)
    pair = Pair(Setup(max_model_len=1024, max_num_batched_tokens=1024, further=settings))
    for name, chunks in (("replay", [256, 256, 88]), ("other", [600])):
        request: Any = make_request(name, 600, max_tokens=1, extra_args={"kv_policy": "full"})
        if name == "replay":
            request.sampling_params.prompt_logprobs = 0
        pair.scheduler.add_request(request)
        seen = []
        while name in pair.scheduler.requests:
            seen.append(pair.schedule().num_scheduled_tokens[name])
            pair.process()
        assert seen == chunks


def test_the_statistics_count_layers_when_they_change() -> None:
    pair = Pair(SYNC)
    pair.add("r", 40)
    plan = pair.scheduler.pyramid.policy.plan(40, 3, 4)
    messages = []
    for _ in range(4):
        (outputs,) = pair.step().values()
        messages.append(take_policy_stats(outputs.scheduler_stats))
    prefill, eviction, *decode = messages
    assert prefill is not None and eviction is not None
    assert prefill["before"] is None
    # Counted when the worker confirms; the blocks go back when the next step is scheduled.
    assert prefill["now"]["evictions"] == 1
    assert prefill["now"]["tokens_evicted"] == plan.end.skip.tolist()
    assert prefill["now"]["blocks_freed"] == [0, 0, 0]
    assert prefill["now"]["blocks_held"] == [10, 10, 10]
    assert eviction["before"] == prefill["now"]
    assert eviction["now"] == {
        "evictions": 1,
        "tokens_evicted": plan.end.skip.tolist(),
        "blocks_freed": (plan.end.skip // 4).tolist(),
        "blocks_held": (plan.end.blocks + 1).tolist(),
        "tokens_held": (plan.end.held + 1).tolist(),
        "policy": [pair.scheduler.pyramid.policy.name, str(pair.scheduler.pyramid.policy.budget)],
        "pool_blocks": pair.worker.num_blocks,
    }
    assert decode == [None, None]


def test_a_request_that_ends_with_its_first_token_is_counted() -> None:
    pair = Pair(SYNC)
    pair.add("r", 40, max_tokens=1)
    pair.step()
    plan = pair.scheduler.pyramid.policy.plan(40, 3, 4)
    assert pair.coordinator.counters.num_evictions == 1
    assert pair.coordinator.counters.tokens_evicted.tolist() == plan.end.skip.tolist()
    assert pair.coordinator.counters.held_blocks.tolist() == [0, 0, 0]


def test_a_preempted_answer_needs_what_its_request_holds_not_all_its_tokens() -> None:
    """Where prompts may be longer than the pool, it would wait for ever."""
    setup = Setup(
        budget=14,
        policy_args=(("chunk.tokens", 24), ("chunk.keep", 18), ("window", 6)),
        max_model_len=192,
    )
    pair = Pair(setup, spare_blocks=11)
    pair.add("r", [7] * 64, 32, {"kv_budget": "60%", "kv_keep": [0, 30]})
    request = pair.scheduler.requests["r"]
    assert request.max_tokens == 17, "more would not fit"
    while request.num_output_tokens < 12:
        pair.step()
    whole = setup.num_layers * -(-request.num_tokens // setup.block_size)
    assert whole > pair.worker.num_blocks, "it would fit without an eviction"
    assert pair.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(20):
        pair.step()
    assert request.is_finished() and request.num_output_tokens == 17


def test_answers_that_are_computed_again_share_the_rows_that_workers_reserve() -> None:
    """Each token of theirs chooses pages: 256 in a step, beside one of each request."""
    sizes = {"budget": 24, "dense_layers": 1, "sinks": 4, "recent": 4}
    setup = Setup(
        policy="select",
        budget="100%",
        policy_args=tuple((f"attend.{name}", size) for name, size in sizes.items()),
        max_model_len=256,
        max_num_batched_tokens=512,
    )
    pair = Pair(setup, spare_blocks=2 * setup.blocks_of_longest)
    for name in ("a", "b", "c"):
        pair.add(name, 40, 200)
    requests = list(pair.scheduler.requests.values())
    while requests[-1].num_output_tokens < 140:
        pair.step()
    assert pair.scheduler.reset_prefix_cache(reset_running_requests=True)
    steps = []
    for _ in range(3):
        scheduled = pair.schedule().num_scheduled_tokens
        steps.append([scheduled[name] for name in ("a", "b", "c")])
        pair.process()
    assert steps == [[180, 40 + 256 - 140, 40], [1, 24, 140], [1, 1, 1]]
    assert [request.num_output_tokens for request in requests] == [143, 142, 142]


# Lengths that the worker solves ------------------------------------------------------------------

SOLVED = Setup(policy="xkv")


@pytest.mark.parametrize(
    ("setup", "change", "message"),
    [
        (SYNC, lambda e: None, "the worker did not evict"),
        (SYNC, lambda e: e._replace(keep=(12, 12, 12)), "whose lengths are known"),
        (SOLVED, lambda e: None, "the worker did not evict"),
        (SOLVED, lambda e: e._replace(keep=None), "no lengths were reported"),
        (SOLVED, lambda e: e._replace(keep=e.keep[:-1]), "2 lengths for 3 layers"),
        (SOLVED, lambda e: e._replace(keep=(12, 12, 13)), "up to 37 tokens; the budget .* is 36"),
        (SOLVED, lambda e: e._replace(keep=(12, 12, 11)), "up to 35 tokens; the budget .* is 36"),
        (SOLVED, lambda e: e._replace(keep=(5, 19, 12)), "each layer keeps at least 6"),
        (SOLVED, lambda e: e._replace(tokens=e.tokens + 4), "evicted .* tokens, the plan says"),
    ],
)
def test_a_report_that_breaks_the_promise_stops_the_engine(setup, change, message) -> None:
    pair = Pair(setup)
    pair.add("r", 40)
    output = pair.scheduler.schedule()
    result = pair.worker.execute(output)
    changed = change(read_report(result).evictions["r"])
    attach_report(result, StepReport({} if changed is None else {"r": changed}, {}, {}, 0))

    def go_on() -> None:
        pair.scheduler.update_from_output(output, result)
        pair.scheduler.schedule()

    with pytest.raises(RuntimeError, match=message):
        go_on()
    assert (
        not pair.coordinator.plans.has_evicted("r")
        and not pair.coordinator.counters.blocks_freed.any()
    )
