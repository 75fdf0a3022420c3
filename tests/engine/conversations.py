# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes in all the ways there are, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.support import (
    Engine,
    Job,
    Outcome,
    assert_same_tokens,
    greedy,
    random_prompts,
)
from tests.scheduler.checks import check_pool


class Rows:
    """Looks at every row of the pool after every step: its bytes never change while it is there."""

    def __init__(self, engine: Engine) -> None:
        worker = engine.core.model_executor.driver_worker.worker
        # Groups have one layer each, so all layers' caches are views of one memory.
        caches = [cache for cache in worker.model_runner.kv_caches if cache.numel()]
        assert len({cache.data_ptr() for cache in caches}) == 1
        # K and V may come before the blocks.
        cache, axis = caches[0], caches[0].shape.index(engine.pool.num_gpu_blocks)
        self.pages = cache.movedim(axis, 0)
        self.seen: dict[Any, bytes] = {}
        self.most = 0

    def __call__(self, engine: Engine) -> None:
        check_pool(engine.coordinator)
        pool = engine.pool
        rows = [*pool.bundles.values(), *(row for twins in pool.twins.values() for row in twins)]
        before, self.seen = self.seen, {}
        self.most = max(self.most, len(rows))
        for row in rows:
            ids = [block.block_id for block in row.blocks]
            content = self.pages[ids].contiguous().view(torch.uint8).numpy().tobytes()
            assert before.get(row, content) == content, "a block that others may find was written"
            self.seen[row] = content


def cached_tokens(outcomes: Sequence[Outcome]) -> list[int]:
    """Of each request, tokens of its prompt that were in the cache."""
    return [outcome.output.num_cached_tokens for outcome in outcomes]


def traces(folder: Path, outcomes: Sequence[Outcome]) -> list[list[bytes]]:
    """What every request kept, in the order of the requests."""
    found = []
    for outcome in outcomes:
        kept = []
        for path in sorted(folder.glob(f"{outcome.request_id}*.npz")):
            with np.load(path) as file:
                names = sorted(name for name in file if name.startswith("kept_"))
                kept += [file[name].tobytes() for name in names]
        found.append(kept)
    return found


def conversation() -> list[list[Job]]:
    """Waves of requests that share prefixes in all the ways there are."""
    answer = partial(greedy, logprobs=2)
    system, first, second, tail, short = random_prompts([300, 200, 150, 40, 90])
    own = {"kv_budget": 96}
    whole = {"kv_policy": "full"}
    turn = Job([*system, *first], answer(24))
    waves = [
        [turn, Job([*system, *second], answer(10), arrival=1)],
        # The same prompt again, with another budget, and whole; then a longer and a shorter one.
        [Job(turn.prompt, answer(12)), Job(turn.prompt, answer(6, **own))],
        [Job(turn.prompt, answer(20, **whole)), Job([*turn.prompt, *tail], answer(8))],
        [Job([*system, *tail], answer(8, **whole)), Job(system[:200], answer(8))],
        # Two at once that compute the same, and one that is given up in the middle.
        [
            Job([*tail, *second], answer(6)),
            Job([*tail, *second], answer(6)),
            Job([*tail, *second, *first], answer(30), abort_after=3),
        ],
        [Job([*tail, *second, *first], answer(8)), Job([*tail, *second], answer(3, **whole))],
        # In one step: the second one reads what the first one has just written.
        [Job(short, answer(6)), Job(short, answer(6))],
    ]
    return waves


def run_waves(engine: Engine, waves: list[list[Job]], on_step: Any) -> list[Outcome]:
    outcomes = []
    for wave in waves:
        outcomes += engine.run(
            [Job(job.prompt, job.params, job.arrival, job.abort_after) for job in wave], on_step
        )
    engine.check_whole()
    return outcomes


def ask(engine: Engine, tokens: list[int], turns: list[int], answer: int = 40) -> Outcome:
    """One turn of a conversation."""
    (outcome,) = engine.run([Job(tokens, greedy(answer, logprobs=2, kv_turns=turns))])
    return outcome


def talk(
    engine: Engine,
    said: Sequence[list[int]],
    answer: int = 40,
    on_step: Any = None,
    like: Sequence[Outcome] = (),
) -> list[Outcome]:
    """A conversation, turn by turn; what a response says goes into the next request.

    Args:
        like: the outcomes of another engine, whose responses go there in place of this one's.
    """
    tokens: list[int] = []
    turns: list[int] = []
    outcomes = []
    for turn, words in enumerate(said):
        tokens = [*tokens, *words]
        outcomes += engine.run([Job(tokens, greedy(answer, logprobs=2, kv_turns=turns))], on_step)
        tokens = [*tokens, *(like[turn] if like else outcomes[-1]).token_ids]
        assert outcomes[-1].report["kv_turns"] == [*turns, len(outcomes[-1].job.prompt)]
        turns = outcomes[-1].report["kv_turns"]
    return outcomes


def kept_at_end(folder: Path, outcome: Outcome) -> list[bytes]:
    """Positions that each layer keeps from the prompt's end on."""
    with np.load(folder / f"{outcome.request_id}.npz") as file:
        names = sorted(name for name in file if name.startswith("kept_"))
        return [file[name].tobytes() for name in names]


@dataclass
class FourTurns:
    """What came of four turns and the third once more: outcomes, and positions that they kept."""

    outcomes: list[Outcome]
    kept: list[list[bytes]]

    def check_same(self, other: FourTurns) -> None:
        """Check that answers are the same up to near ties, and all else without exception."""
        assert_same_tokens(self.outcomes, other.outcomes)
        reports = [[outcome.report for outcome in run.outcomes] for run in (self, other)]
        assert reports[0] == reports[1]
        assert self.kept == other.kept


def four_turns(
    engine: Engine,
    folder: Path,
    said: Sequence[int],
    *,
    hits: bool,
    on_step: Any = None,
    like: FourTurns | None = None,
) -> FourTurns:
    """Four turns, and the third once more; hits are all that was computed, in whole blocks of 16.

    Args:
        folder: of the engine's traces. said: tokens of what a user says in each turn; the ends of
            all but the last one evict. hits: whether prefix caching is on. like: of an engine with
            hits, whose answers these turns go on from.
    """
    answer = 40
    prompts = random_prompts(list(said), seed=3)
    outcomes = talk(engine, prompts, answer, on_step, like.outcomes if like else ())
    third = outcomes[2]
    outcomes.append(ask(engine, third.job.prompt, third.report["kv_turns"][:-1], answer))
    resumed = [outcome.report.pop("resumed_tokens") for outcome in outcomes]
    before = [outcome.job.prompt for outcome in (*outcomes[:3], outcomes[1])]
    whole = [0, *((len(prompt) + answer - 1) // 16 * 16 for prompt in before)]
    assert resumed == (whole if hits else [0] * 5)
    assert [outcome.cached for outcome in outcomes] == resumed
    assert [outcome.report["inner_evictions"] for outcome in outcomes] == [0, 1, 2, 3, 2]
    assert outcomes[2].token_ids == outcomes[4].token_ids
    assert outcomes[2].report == outcomes[4].report
    return FourTurns(outcomes, [kept_at_end(folder, outcome) for outcome in outcomes])
