# SPDX-License-Identifier: Apache-2.0
"""Admission counts blocks that requests share once: more start, and nobody is preempted for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.beside import Beside
from tests.scheduler.harness import Setup
from tests.scheduler.jobs import SMALL, Job, exact_request
from vllm_pyramid.scheduler.admission import RECHECK_STEPS, UNBOUNDED

# Nobody gives anything back, so a prefix is shared to the end.
WHOLE = replace(SMALL, budget="100%", prefix_caching=True)
# Only prompts that are processed share anything.
EVICTED = replace(SMALL, prefix_caching=True)

# These evict inside their prompts, for the first time at 40 tokens, of which 24 go.
INSIDE = replace(
    EVICTED,
    policy="keydiff",
    budget=14,
    policy_args=(("chunk.tokens", 40), ("chunk.keep", 16), ("window", 4), ("sinks", 1)),
)


class SharingJob(Job):
    """Requests whose prompts begin alike.

    Attributes:
        once: looks for which shared blocks were counted once.
    """

    once = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        shared = self.admission.shared_bundles

        def counting(name: str) -> Any:
            found = shared(name)
            self.once += any(counts for _, counts in found)
            return found

        self.admission.shared_bundles = counting  # type: ignore[method-assign]

    def count_each(self) -> None:
        """The rule without what is shared."""
        self.admission.shared_bundles = lambda _: []  # type: ignore[method-assign]

    def add_prompt(
        self,
        index: int,
        shared: int,
        prompt_len: int,
        tokens: int,
        extra: dict[str, Any] | None = None,
    ) -> None:
        prompt = [1000 + i if i < shared else 2000 + 100 * index + i for i in range(prompt_len)]
        size = self.setup.block_size
        self.add(exact_request(f"r{index}", prompt, tokens, extra, hash_block_size=size))

    def finish(self) -> None:
        """As the base's; nothing counts as shared any more."""
        super().finish()
        prefixes = self.scheduler.coordinator.prefixes.cache
        assert not prefixes.holders.counts
        assert not any(row.holders for row in prefixes._pool.bundles.values())


def _run(setup: Setup, shared: int, *, each: bool, tokens: int) -> SharingJob:
    """40 prompts of 64 tokens in a pool for 96 blocks a layer, of the stage that has most."""
    job = SharingJob(setup, 96 * max(setup.stages or (setup.num_layers,)))
    if each:
        job.count_each()
    for index in range(40):
        job.add_prompt(index, shared, 64, tokens)
    job.finish()
    return job


@pytest.mark.parametrize(("asynchronous", "stages"), [(False, ()), (True, ()), (False, (1, 2))])
def test_more_requests_of_one_prefix_run_at_once(asynchronous, stages) -> None:
    """12 of 20 blocks a layer are shared: 10 requests fit side by side, 4 if each counts all."""
    setup = replace(WHOLE, asynchronous=asynchronous, stages=stages)
    each = _run(setup, 48, each=True, tokens=16)
    once = _run(setup, 48, each=False, tokens=16)
    assert each.most_running <= 5 and once.most_running >= 9
    assert once.preemptions == each.preemptions == 0
    assert once.steps < 0.6 * each.steps
    assert once.started == [f"r{index}" for index in range(40)]


def test_prompts_of_their_own_are_admitted_as_before() -> None:
    jobs = [_run(WHOLE, 0, each=each, tokens=16) for each in (True, False)]
    assert jobs[0].steps == jobs[1].steps and jobs[0].tokens == jobs[1].tokens
    assert jobs[1].refusals > 0 and not jobs[1].once


PROPERTY = {
    "async": replace(EVICTED, asynchronous=True),
    "pyramid": replace(EVICTED, policy_args=(("window", 6),), budget="30%", asynchronous=True),
    "whole": replace(WHOLE, asynchronous=True),
    "beside": replace(EVICTED, beside=(Beside("sliding", 10), Beside("chunked", 12))),
    "stages": replace(EVICTED, stages=(1, 2)),
    "whole-stages": replace(WHOLE, stages=(2, 1)),
    "later": replace(
        EVICTED,
        policy="streaming-llm",
        policy_args=(("sinks", 2), ("schedule", "interval"), ("schedule.interval", 5)),
    ),
    "swapped": replace(EVICTED, policy_args=(("window", 6), ("values", "host"))),
    "inside": INSIDE,
    "inside-async": replace(INSIDE, asynchronous=True),
    "inside-beside": replace(INSIDE, beside=(Beside("sliding", 10), Beside("sliding", 21))),
}


@pytest.mark.long
@pytest.mark.parametrize("variant", PROPERTY)
def test_nobody_is_preempted_too_soon(variant: str) -> None:
    """What docs/design.md promises where lengths are known holds where prompts share, too."""
    setup = replace(PROPERTY[variant], max_num_batched_tokens=1024, max_num_seqs=12)
    once = refusals = 0
    request = st.tuples(
        st.sampled_from([0, 16, 40, 60]),  # tokens of the trunk
        st.integers(1, 3),  # the branch behind it
        st.integers(1, 64),
        st.integers(1, 32),
        st.sampled_from([None, None, {"kv_policy": "full"}, {"kv_budget": 20}]),
        st.integers(0, 6),  # steps before it comes
    )

    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests=st.lists(request, min_size=4, max_size=24), spare=st.integers(0, 60))
    def lives(requests: list[tuple[int, int, int, int, Any, int]], spare: int) -> None:
        nonlocal once, refusals
        job = SharingJob(setup, setup.blocks_of_longest + spare)
        for index, (shared, branch, prompt_len, tokens, extra, wait) in enumerate(requests):
            for _ in range(wait):
                job.step()
            prompt = [
                1000 + i if i < shared else 2000 + 100 * branch + i for i in range(prompt_len)
            ]
            job.add(exact_request(f"r{index}", prompt, tokens, extra, setup.block_size))
        job.finish()
        once += job.once
        refusals += job.refusals
        assert job.too_soon == 0
        for request in job.requests:
            assert request.num_preemptions == 0 or request.max_tokens > request.num_prompt_tokens
        assert job.started == [request.request_id for request in job.requests]

    lives()
    assert once > 50 and refusals > 100, "nothing was shared, or the pool was never scarce"


def test_behind_its_first_eviction_a_request_is_counted_with_all_it_may_hold() -> None:
    """Who evicts inside a prompt shares until then, and comes to its peak again."""
    job = SharingJob(INSIDE, 60 * INSIDE.num_layers)
    admission, coordinator = job.admission, job.scheduler.coordinator
    plans = {}
    for index, length in enumerate((30, 46, 64)):
        job.add_prompt(index, 16, length, 4)
        plans[length] = coordinator.plans.of(f"r{index}")
        admission.enter(job.requests[-1], plans[length])
    assert [plans[length].untouched for length in (46, 64)] == [24, 24]
    zeros = np.zeros(3, np.int64)
    numbers = admission.table.arrays([f"r{i}" for i in range(3)], zeros, zeros, 0)
    assert numbers.peak.tolist() == [UNBOUNDED, 3 * 10, 3 * 10]
    assert numbers.peak_after.tolist() == [0, 3 * (12 - 6), 3 * (16 - 6)]


@pytest.mark.parametrize(
    ("setup", "requests", "shared", "prompt_len", "tokens", "extra", "times"),
    [
        # 12 of 16 blocks a layer, until the eviction: 8 prompts fit into the step.
        (EVICTED, 8, 48, 64, 4, {}, 5 / 3),
        # A span that stays in place is shared to the end: 12 blocks of each request.
        (EVICTED, 12, 48, 64, 8, {"kv_keep": [0, 48]}, 1.5),
        # Those that evict again share until they evict.
        (replace(PROPERTY["later"], max_num_batched_tokens=1024), 12, 24, 46, 4, {}, 1.3),
        (replace(INSIDE, max_num_batched_tokens=1024), 12, 24, 46, 4, {}, 1.3),
    ],
    ids=["evicted", "kept", "later", "inside"],
)
def test_more_prompts_begin_while_they_share(
    setup: Setup,
    requests: int,
    shared: int,
    prompt_len: int,
    tokens: int,
    extra: dict[str, Any],
    times: float,
) -> None:
    """More than in a pool in which each counts all."""
    begin = []
    for each in (True, False):
        job = SharingJob(setup, 60 * setup.num_layers)
        if each:
            job.count_each()
        for index in range(requests):
            job.add_prompt(index, shared, prompt_len, tokens, extra)
        job.step()
        begin.append(len(job.scheduler.running))
        job.finish()
        assert job.too_soon == 0 and (job.preemptions == 0 or setup is not EVICTED)
        if extra:  # also behind the evictions
            begin[-1] = job.most_running
    assert begin[1] >= times * begin[0]


def test_a_refused_prompt_is_looked_at_again_when_it_shares_more() -> None:
    """The prompt before it comes in chunks: as soon as enough of it is there, both fit."""
    setup = replace(
        WHOLE,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=8,
        max_num_seqs=8,
        max_model_len=192,
    )
    job = SharingJob(setup, 52 * 3)
    job.add_prompt(0, 128, 132, 60)
    job.step()
    job.add_prompt(1, 128, 132, 4)
    admission = job.admission
    looks, lacking = [], admission.missing_blocks

    def watched(*args: Any) -> int:
        found = lacking(*args)
        looks.append((job.steps, found))
        return found

    admission.missing_blocks = watched  # type: ignore[method-assign]
    while len(job.scheduler.running) < 2:
        job.step()
    assert job.steps < RECHECK_STEPS, "only when it has waited for long"
    assert [found > 0 for _, found in looks] == [True, False]
    # Each row that it shares beyond the two of the first look is one less.
    assert looks[1][0] - looks[0][0] == -(-looks[0][1] // (3 * 2)), "looked at too soon, or late"
    job.finish()
    assert job.preemptions == 0
