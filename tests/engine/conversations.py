# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes in all the ways there are, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.support import Engine, Job, Outcome, greedy
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
        rows = [*pool.bundles.values(), *(row for rows in pool.duplicates.values() for row in rows)]
        before, self.seen = self.seen, {}
        self.most = max(self.most, len(rows))
        for row in rows:
            ids = [block.block_id for block in row.blocks]
            content = self.pages[ids].contiguous().view(torch.uint8).numpy().tobytes()
            assert before.get(row, content) == content, "a block that others may find was written"
            self.seen[row] = content


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


def ask(engine: Engine, tokens: list[int], turns: list[int], answer: int = 40) -> Outcome:
    """One turn of a conversation that resumes, whatever the cache has of its whole prompt."""
    params = greedy(answer, logprobs=2, kv_turns=turns, kv_turn_mode="resume")
    (outcome,) = engine.run([Job(tokens, params)])
    return outcome


def talk(
    engine: Engine,
    said: Sequence[list[int]],
    answer: int = 40,
    on_step: Any = None,
    like: Sequence[Outcome] = (),
    **own: Any,
) -> list[Outcome]:
    """A conversation, turn by turn; what a response says goes into the next request."""
    tokens: list[int] = []
    turns: list[int] = []
    outcomes = []
    for turn, words in enumerate(said):
        tokens = [*tokens, *words]
        settings = greedy(answer, logprobs=2, kv_turns=turns, **own)
        outcomes += engine.run([Job(tokens, settings)], on_step)
        tokens = [*tokens, *(like[turn] if like else outcomes[-1]).token_ids]
        assert outcomes[-1].report["kv_turns"] == [*turns, len(outcomes[-1].job.prompt)]
        turns = outcomes[-1].report["kv_turns"]
    return outcomes


def kept_at_end(folder: Path, outcome: Outcome) -> list[bytes]:
    """Positions that each layer keeps from the prompt's end on."""
    with np.load(folder / f"{outcome.request_id}.npz") as file:
        names = sorted(name for name in file if name.startswith("kept_"))
        return [file[name].tobytes() for name in names]
