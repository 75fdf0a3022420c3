# SPDX-License-Identifier: Apache-2.0
"""What is known of a prompt's retention before its scores are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan.retention import IntArray, Piece, RetentionPlan


@dataclass(frozen=True)
class DeferredPlan:
    """What is known of a prompt's retention before its scores are: a promise about the lengths.

    It evicts once, at the prompt's end.

    Attributes:
        prompt_len: tokens of the prompt. block_size: tokens of a cache block.
        num_layers: layers that share the total.
        budget_tokens: mean tokens a layer keeps, window and sinks included, or may keep at most.
        floor: tokens that every layer keeps: window and sinks.
        exact: the total is `budget_tokens` times the layers; otherwise at most that.
        fill_blocks: as in `Policy`.
        least: mean tokens a layer keeps at least.
    """

    prompt_len: int
    block_size: int
    num_layers: int
    budget_tokens: int
    floor: int
    exact: bool
    fill_blocks: bool
    least: int = 0
    inner: ClassVar[tuple[RetentionPlan, ...]] = ()
    end_number: ClassVar[int] = 1
    every: ClassVar[int] = 0
    pieces: ClassVar[tuple[Piece, ...]] = ()
    is_open: ClassVar[Literal[True]] = True

    @property
    def evicts(self) -> bool:
        """True: until it is settled, a prompt is to be treated as one that gives slots back."""
        return True

    def evictions_by(self, computed: int) -> int:
        """See `RetentionPlan.evictions_by`."""
        return int(computed >= self.prompt_len)

    def computed_at(self, number: int) -> int:
        """See `RetentionPlan.computed_at`."""
        assert number == 1, number
        return self.prompt_len

    def next_eviction(self, computed: int) -> int | None:
        """See `RetentionPlan.next_eviction`."""
        return self.prompt_len if computed < self.prompt_len else None

    def after(self, number: int) -> DeferredPlan:
        """See `RetentionPlan.after`."""
        assert number == 1, number
        return self

    def skip_after(self, number: int) -> IntArray:
        """See `RetentionPlan.skip_after`; an open plan knows only that there is none before."""
        assert number == 0, "the prompt has ended and its lengths were not solved"
        return np.zeros(self.num_layers, np.int32)

    def piece_at(self, computed: int) -> None:
        """See `RetentionPlan.piece_at`."""
        return

    @property
    def first(self) -> DeferredPlan:
        """See `RetentionPlan.first`."""
        return self

    @property
    def exact_tokens(self) -> int:
        """See `RetentionPlan.exact_tokens`."""
        return self.prompt_len

    def most_blocks(
        self,
        tokens: int,
        block_sizes: npt.NDArray[Any],
        late: int = 0,
        stages: Sequence[int] = (),
        *,
        evicted: bool = False,
    ) -> IntArray:
        """See `RetentionPlan.most_blocks`; what it will give back is not known yet."""
        return self.estimate().most_blocks(tokens, block_sizes, late, stages, evicted=evicted)

    @property
    def untouched(self) -> int:
        """See `RetentionPlan.untouched`; nothing can be promised before the lengths are solved."""
        return 0

    def most_blocks_behind(self, stages: Sequence[int]) -> npt.NDArray[np.int64]:
        """See `RetentionPlan.most_blocks_behind`: as many as it may come to, of the only stage."""
        assert len(stages) == 1, "lengths are solved from the scores of all layers"
        # Each layer's share is rounded up, and may be one block more where blocks are filled.
        kept = -(-self.budget_tokens * self.num_layers // self.block_size)
        whole = self.num_layers * (self.prompt_len // self.block_size)
        return np.array([min(kept + 2 * self.num_layers, whole)], np.int64)

    @property
    def held(self) -> IntArray:
        """Tokens held until the lengths are solved: all of them."""
        return np.full(self.num_layers, self.prompt_len, np.int32)

    @property
    def mean(self) -> int:
        """B: mean tokens a layer has to choose, or at most."""
        return self.budget_tokens - self.floor

    @property
    def least_mean(self) -> int:
        """The least that B may come to."""
        return max(self.least - self.floor, 0)

    @property
    def capacity(self) -> int:
        """C: tokens of the prompt beyond window and sinks."""
        return self.prompt_len - self.floor

    def resolve(self, keep: Sequence[int] | npt.NDArray[Any]) -> RetentionPlan:
        """The final plan from the solved lengths, once they are checked against the promise.

        Args:
            keep: `[num_layers]` tokens kept per KV head, window and sinks included.

        Raises:
            ValueError: another number of layers, a layer outside floor .. prompt, another total, or
                less than the least.
        """
        lengths = np.asarray(keep, np.int64)
        if lengths.shape != (self.num_layers,):
            raise ValueError(f"{lengths.size} lengths for {self.num_layers} layers")
        low, high = int(lengths.min()), int(lengths.max())
        if low < self.floor or high > self.prompt_len:
            raise ValueError(
                f"lengths between {low} and {high}; each layer keeps at least {self.floor} tokens "
                f"(window and sinks) and at most the prompt's {self.prompt_len}"
            )
        total, initial = int(lengths.sum()), self.budget_tokens * self.num_layers
        if total > initial or (self.exact and total != initial):
            raise ValueError(
                f"the lengths add up to {total} tokens; the budget of {self.budget_tokens} for "
                f"{self.num_layers} layers is {'' if self.exact else 'at most '}{initial}"
            )
        if total < self.least * self.num_layers:
            raise ValueError(
                f"the lengths add up to {total} tokens; {self.num_layers} layers keep at least "
                f"{self.least} each on average"
            )
        mean = -(-total // self.num_layers)
        return RetentionPlan.of(self.prompt_len, self.block_size, mean, lengths, self.fill_blocks)

    def resolved(self, keep: Sequence[int] | None) -> RetentionPlan:
        """`resolve`, of lengths that somebody reports.

        Raises:
            ValueError: as `resolve`, or no lengths are given.
        """
        if keep is None:
            raise ValueError("no lengths were reported")
        return self.resolve(keep)

    def estimate(self) -> RetentionPlan:
        """The plan with the budget in every layer alike: for estimates, never for eviction."""
        return self.resolve(np.full(self.num_layers, self.budget_tokens))


Plan: TypeAlias = RetentionPlan | DeferredPlan
