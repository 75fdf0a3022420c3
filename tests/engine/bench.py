# SPDX-License-Identifier: Apache-2.0
"""An engine that serves a row of the matrix, and what makes one engine enough for all properties.

A pool becomes small where its blocks are taken (`small_pool`), a request misses all prefixes by a
`cache_salt` of its own (`fresh`), and chunks become others by the live scheduler's tokens of a step
(`step_tokens`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conversations import traces
from tests.engine.matrix import ENGINE, WHOLE, Case
from tests.engine.oracles import EvictedModel
from tests.engine.paged_paper import SummaryCheck
from tests.engine.support import Engine, Job, Outcome, assert_same_tokens, greedy, random_prompts
from tests.scheduler.checks import check_pool
from vllm_pyramid.methods.pages import SelectPages
from vllm_pyramid.policy import Policy

LENGTHS = (20, 57, 130, 300, 520)
# Around window, block and chunk.
EDGES = (1, 7, 8, 9, 16, 17, 255, 512, 513)
# What a request reports of the chunks that its prompt came in, and of what it computed twice.
OF_CHUNKS = {"v_bytes_written", "v_bytes_read", "v_bytes_read_per_token"}
OF_CHUNKS |= {"resumed_tokens", "resumed"}
OF_COMPUTING = {"pages_read", "pages_visible", "attended_tokens"}
SALTS = itertools.count()


def fresh(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs once more, each behind a salt of its own: all that is cached is a miss."""
    return [
        Job(job.prompt, job.params, job.arrival, job.abort_after, salt=f"fresh{next(SALTS)}")
        for job in jobs
    ]


@dataclass
class Bench:
    """A running engine, and what its answers are compared with."""

    engine: Engine
    case: Case
    folder: Path
    path: Path
    full: list[Outcome] | None = None

    def __post_init__(self) -> None:
        selects = isinstance(self.policy.attend, SelectPages)
        self.summaries = SummaryCheck() if selects else None

    def look(self, engine: Engine) -> None:
        """Check after a step: every block is somebody's, and summaries are those of their keys."""
        check_pool(engine.coordinator)
        if self.summaries is not None:
            self.summaries(engine)

    @property
    def policy(self) -> Policy:
        """The policy that the engine serves."""
        policy: Policy = self.engine.scheduler.pyramid.policy
        return policy

    @property
    def keeps_prompts(self) -> bool:
        """Whether answers alone are evicted from: the first eviction comes behind some tokens."""
        return self.policy.schedule.keeps_prompts

    def jobs(self, lengths: Sequence[int] = LENGTHS, tokens: int = 0, **own: Any) -> list[Job]:
        params = greedy(tokens or self.case.tokens, logprobs=2, **own)
        return fresh([Job(prompt, params) for prompt in random_prompts(lengths, seed=5)])

    def settings(self) -> list[dict[str, Any]]:
        """Settings of requests, of which one batch has several."""
        beyond = [self.case.beyond] if self.case.beyond else []
        return [{}, WHOLE, *beyond, *self.case.own]

    @property
    def watches(self) -> bool:
        """Whether blocks that others may find can be watched: no step is under way behind one."""
        return self.case.shares and not self.case.settings.get("async_scheduling")

    @cached_property
    def alone(self) -> list[Outcome]:
        """Answers of requests one by one."""
        return [self.engine.run([job])[0] for job in self.jobs()]

    @cached_property
    def model(self) -> EvictedModel:
        return EvictedModel(str(self.path))

    def check_same(
        self,
        found: Sequence[Outcome],
        expected: Sequence[Outcome],
        *,
        kept: bool = True,
        again: bool = False,
    ) -> None:
        """Check tokens up to near ties, reports and kept positions without exception."""
        assert_same_tokens(found, expected, self.case.near)
        own = OF_CHUNKS | OF_COMPUTING if again else OF_CHUNKS
        ours, theirs = (
            [{key: one.report[key] for key in one.report.keys() - own} for one in run]
            for run in (found, expected)
        )
        assert ours == theirs
        if kept and self.case.evicts and self.case.traced:
            assert traces(self.folder, found) == traces(self.folder, expected)


@contextmanager
def small_pool(engine: Engine, blocks: int) -> Iterator[None]:
    """Leave `blocks` blocks in the pool, and start whatever fits; what was cached is gone."""
    pool = engine.pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "num_gpu_blocks", blocks + 1)
            patch.setattr(engine.scheduler.pyramid.chunks, "admission", None)
            yield
    finally:
        pool.free_blocks(taken)


@contextmanager
def step_tokens(engine: Engine, tokens: int) -> Iterator[None]:
    """Give the steps of the live scheduler at most `tokens` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "max_num_scheduled_tokens", tokens)
        yield


def edge_jobs(tokens: int = 12, **own: Any) -> list[Job]:
    """Return requests around all boundaries, in one batch and in chunks."""
    lengths = (*EDGES, *LENGTHS)
    params = greedy(tokens, logprobs=3, **own)
    return fresh([Job(prompt, params) for prompt in random_prompts(lengths, seed=1)])


def stock_blocks(bench: Bench, tokens: int) -> int:
    """Return the blocks that a sequence holds in layers that do not evict."""
    groups = bench.engine.coordinator.stock_groups
    return int(groups.blocks_of(tokens, ENGINE["max_num_batched_tokens"])) if groups else 0


def whole_blocks(bench: Bench, tokens: int) -> int:
    """Return the blocks that a sequence holds of which nothing is evicted."""
    whole = bench.engine.coordinator.layer_blocks.full(tokens)
    return int(whole) + stock_blocks(bench, tokens)
