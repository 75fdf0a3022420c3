# SPDX-License-Identifier: Apache-2.0
"""Many short requests in a pool that is too small: nothing leaks, nothing changes.

`PYRAMID_SOAK=3000` runs that many requests instead of the hundred of the normal test run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.paged_paper import SummaryCheck
from tests.engine.support import Engine, EnginePool, Job, count_preemptions, greedy
from tests.scheduler.checks import check_pool

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

NUM_REQUESTS = int(os.environ.get("PYRAMID_SOAK", "100"))
LAYERS = 4
MAX_LEN = 384
BLOCKS_OF_ONE = MAX_LEN // 16 * LAYERS
WINDOW = 8
# Four layers, of which the lowest reads everything; the fewest tokens that can be read are 33.
ATTEND = {"budget": 64, "dense_layers": 1, "sinks": 16, "recent": 16, "min_tokens": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "select": {"kv_policy_args": {"attend": ATTEND}},
    "select-evicted": {"kv_policy_args": {"attend": ATTEND}},
    # Heads of one layer that keep everything, some and nothing but their ends.
    "duoattention": {
        "kv_policy_args": {
            "mask": [[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]],
            "share": 7 / 16,
            "heads.sinks": 8,
            "heads.recent": 40,
        }
    },
    # Evicts during generation, so that requests are preempted between evictions.
    "h2o": {"kv_budget": 40, "kv_policy_args": {"interval": 32}},
    "scissorhands": {
        "kv_budget": 40,
        "kv_policy_args": {"interval": 48, "queries": 30, "window": 4},
    },
    # Pieces that leave room for others' decode steps, and lengths that fall within four layers.
    "pyramidinfer": {
        "kv_policy_args": {
            "piece_tokens": 80,
            "min_context": 8,
            "interval": 1,
            "decay_ratio": 0.5,
        }
    },
    # The same, and what has been generated is thinned too.
    "thin_generated": {
        "kv_policy": "pyramidinfer",
        "kv_policy_args": {
            "piece_tokens": 80,
            "min_context": 8,
            "interval": 1,
            "decay_ratio": 0.5,
            "schedule": "thin_generated",
            "gen_window": 32,
            "gen_interval": 16,
            "gen_compress_ratio": 0.8,
        },
    },
}


SELECTING = ("select", "select-evicted")


def _jobs(policy: str, *, aborts: bool) -> list[Job]:
    """The same requests on every call: lengths, budgets, arrivals and who gives up."""
    source = random.Random(7)
    jobs = []
    arrival = 0
    for index in range(NUM_REQUESTS):
        n = source.choice([1, 5, 16, 33, source.randrange(1, 320), source.randrange(40, 160)])
        # Long answers to short prompts, so that requests are preempted after they have evicted.
        max_tokens = source.choice([1, 2, source.randrange(10, 60), source.randrange(60, 200)])
        max_tokens = min(max_tokens, MAX_LEN - n)
        budget: int | str = source.randrange(WINDOW + 1, 80)
        key = "kv_attend_budget" if policy in SELECTING else "kv_budget"
        if policy in SELECTING:
            budget += 33 - WINDOW
        if policy in ("pyramidinfer", "thin_generated"):
            budget = f"{budget + 20}%"
        own = {} if policy == "duoattention" else {key: budget}  # which has no budget
        extra = source.choice([{}, {}, own, {"kv_policy": "full"}])
        prompt = [source.randrange(8, 512) for _ in range(n)]
        gives_up = source.randrange(1, 30) if source.random() < 0.1 else None
        arrival += source.choice([0, 0, 0, 1])
        params = greedy(max_tokens, **(extra if policy != "full" else {}))
        jobs.append(Job(prompt, params, arrival, gives_up if aborts else None, f"soak{index}"))
    return jobs


def _run(
    engines: EnginePool, model: Path, policy: str, *, contended: bool
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Tokens of the requests that ended by themselves, and how often requests were preempted."""
    settings: dict[str, Any] = {
        "kv_policy": policy,
        "kv_admission": "prompt",  # start whatever fits, so that many have to go again
        **SETTINGS.get(policy, {}),
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 32 if contended else 4,
        # Two of the longest requests, or more than all four together can need.
        "num_gpu_blocks_override": (2 if contended else 5) * BLOCKS_OF_ONE + 1,
    }
    engine = engines.get(model, **settings)
    engine.shuffle_blocks()

    summaries = SummaryCheck()

    def check(engine: Engine) -> None:
        check_pool(engine.coordinator)
        if policy in SELECTING:
            summaries(engine)

    with count_preemptions(engine) as preemptions:
        outcomes = engine.run(_jobs(policy, aborts=contended), check)
    engine.check_whole()
    reports = [o.report for o in outcomes if o.output is not None]
    evicts = policy not in ("full", "select")
    assert not evicts or sum(report["evicted_tokens"] > 0 for report in reports) > 5
    if policy in SELECTING:
        read, seen = (sum(r[f"pages_{key}"] for r in reports) for key in ("read", "visible"))
        assert summaries.pages > NUM_REQUESTS and 0 < read < seen
    tokens = {o.job.name: o.token_ids for o in outcomes if o.output is not None}
    return tokens, preemptions


def _changed(
    engines: EnginePool, model: Path, policy: str
) -> tuple[dict[str, Any], int, dict[str, int]]:
    """Requests whose tokens contention changed; requests compared; preemptions."""
    alone, none = _run(engines, model, policy, contended=False)
    assert none["all"] == 0 and len(alone) == NUM_REQUESTS
    contended, preemptions = _run(engines, model, policy, contended=True)
    changed = {
        name: (tokens, alone[name]) for name, tokens in contended.items() if tokens != alone[name]
    }
    return changed, len(contended), preemptions


@pytest.mark.parametrize(
    "policy",
    [
        *("pyramidkv", "xkv"),
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in (
                *("h2o", "scissorhands", "pyramidinfer", "thin_generated", "duoattention"),
                *SELECTING,
            )
        ),
    ],
)
def test_soak(engines: EnginePool, tiny_model: Callable[[str], Path], policy: str) -> None:
    """Chunks, mixed batches, preemption, resumption and aborts; greedy tokens in float32."""
    model = tiny_model("llama-mha")
    changed, compared, preemptions = _changed(engines, model, policy)
    print(f"{compared} requests, preemptions {preemptions}, {len(changed)} changed")
    # Select evicts nothing, and heads that stream need 112 tokens for it.
    kind = "all" if policy in ("select", "duoattention") else "evicted"
    assert preemptions[kind] >= NUM_REQUESTS // 40
    assert NUM_REQUESTS * 0.8 < compared < NUM_REQUESTS  # some were aborted
    if changed:
        # Sums in another order may change a tie, but then they do for `full` as well.
        of_full, _, _ = _changed(engines, model, "full")
        assert changed.keys() <= of_full.keys(), {
            name: tokens for name, tokens in changed.items() if name not in of_full
        }
