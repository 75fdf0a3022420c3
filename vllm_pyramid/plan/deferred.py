# SPDX-License-Identifier: Apache-2.0
"""The plan of a request whose lengths are decided from its prompt's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan.eviction_point import (
    EvictionPoint,
    IntArray,
    Piece,
    PlanMismatchError,
    read_only,
)
from vllm_pyramid.plan.retention import RetentionPlan


@dataclass(frozen=True)
class DeferredPlan:
    """Bounds of the lengths before the prompt's scores are known; it evicts once, at its end.

    It answers the questions of a `RetentionPlan`, and stands for its only eviction point until its
    lengths are decided.

    Attributes:
        num_layers: layers; they share the total, or some of them each the total of these.
        budget_tokens: mean tokens that a layer keeps, window and sinks included; an upper bound
            unless `exact`, which makes the total `budget_tokens` times the layers.
        floor: tokens that every layer keeps: window and sinks.
        fill_blocks: as in `Policy`.
        min_tokens: the lower bound of the mean tokens that a layer keeps.
        safe: tokens beyond `floor` that every layer keeps, at most `mean`.
    """

    prompt_len: int
    block_size: int
    num_layers: int
    budget_tokens: int
    floor: int
    exact: bool
    fill_blocks: bool
    min_tokens: int = 0
    safe: int = 0
    inner: ClassVar[tuple[EvictionPoint, ...]] = ()
    end_number: ClassVar[int] = 1
    every: ClassVar[int] = 0
    in_place: ClassVar[int] = 0
    pieces: ClassVar[tuple[Piece, ...]] = ()
    in_pieces: ClassVar[bool] = False
    is_deferred: ClassVar[Literal[True]] = True
    waits_for_orders: ClassVar[bool] = False
    # A prompt counts as one that gives slots back until its lengths are decided.
    evicts: ClassVar[Literal[True]] = True
    # Before that nothing can be promised to others.
    untouched: ClassVar[int] = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory at most, with the array that is computed when it is asked for."""
        return 800 + 4 * self.num_layers

    # The questions of a `RetentionPlan` ---------------------------------------------------------

    def evictions_by(self, computed: int) -> int:
        """Return the number of the latest eviction once `computed` tokens have been computed."""
        return int(computed >= self.prompt_len)

    def computed_at(self, number: int) -> int:
        """Return the tokens computed at the only eviction, number 1."""
        assert number == 1, number
        return self.prompt_len

    def next_eviction(self, computed: int) -> int | None:
        """Return the tokens computed at the eviction, or None behind it."""
        return self.prompt_len if computed < self.prompt_len else None

    def after(self, number: int) -> DeferredPlan:
        """Return the plan itself, in place of the point of eviction 1."""
        assert number == 1, number
        return self

    def skip_after(self, number: int) -> IntArray:
        """Return zeros, the skips before the eviction; those behind it are not known."""
        if number != 0:
            raise PlanMismatchError(
                f"a prompt of {self.prompt_len} tokens has ended and its lengths were not decided; "
                "report this"
            )
        return read_only(np.zeros(self.num_layers, np.int32))

    def piece_at(self, computed: int) -> None:
        """Return None: no prompt with decided lengths is computed in pieces."""
        return

    @property
    def exact_tokens(self) -> int:
        """The first tokens whose KV is that of the full cache: the prompt."""
        return self.prompt_len

    @cached_property
    def held(self) -> IntArray:
        """Tokens held until the lengths are decided: all of them."""
        return read_only(np.full(self.num_layers, self.prompt_len))

    # What the lengths are decided by ------------------------------------------------------------

    @property
    def mean(self) -> int:
        """B: mean tokens that a layer chooses beyond window and sinks; a bound unless `exact`."""
        return self.budget_tokens - self.floor

    @property
    def min_mean(self) -> int:
        """The lower bound of B."""
        return max(self.min_tokens - self.floor, 0)

    @property
    def capacity(self) -> int:
        """C: tokens of the prompt beyond window and sinks."""
        return self.prompt_len - self.floor

    # Its lengths --------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """The fewest tokens that a layer keeps."""
        return self.floor + self.safe

    @property
    def most(self) -> int:
        """What a layer cannot exceed: what all others leave of the total."""
        return self.most_among(self.num_layers)

    def most_among(self, count: int) -> int:
        """Return what one of `count` layers cannot exceed that have a total of their own."""
        left = self.budget_tokens * count - self.least * (count - 1)
        return min(self.prompt_len, left)

    def end_point(self, keep: Sequence[int] | npt.NDArray[Any]) -> EvictionPoint:
        """Check the decided lengths of layers that share a total; return their part of the point.

        `keep`, `[layers]`, has the tokens kept per KV head, window and sinks included; of all
        layers, or of some whose mean is bounded as that of all is. ValueError: a layer outside
        least .. prompt, or a total that breaks the plan's bounds.
        """
        lengths = np.asarray(keep, np.int64)
        count, low, high = len(lengths), int(lengths.min()), int(lengths.max())
        if low < self.least or high > self.prompt_len:
            safe = f" and {self.safe} more" if self.safe else ""
            raise ValueError(
                f"lengths between {low} and {high}; each layer keeps at least {self.floor} tokens "
                f"(window and sinks){safe}, and at most the prompt's {self.prompt_len}"
            )
        total, bound = int(lengths.sum()), self.budget_tokens * count
        if total > bound or (self.exact and total != bound):
            raise ValueError(
                f"the lengths add up to {total} tokens; the budget of {self.budget_tokens} for "
                f"{count} layers is {'' if self.exact else 'at most '}{bound}"
            )
        if total < self.min_tokens * count:
            raise ValueError(
                f"the lengths add up to {total} tokens; {count} layers keep at least "
                f"{self.min_tokens} each on average"
            )
        mean = -(-total // count)
        return EvictionPoint.of(self.prompt_len, self.block_size, mean, lengths, self.fill_blocks)

    def resolve(self, keep: Sequence[int] | npt.NDArray[Any]) -> RetentionPlan:
        """Check the decided lengths of all layers as `end_point` does; return the final plan."""
        if np.shape(keep) != (self.num_layers,):
            raise ValueError(f"{np.size(keep)} lengths for {self.num_layers} layers")
        return RetentionPlan((self.end_point(keep),))

    def resolved(self, keep: Sequence[int] | None) -> RetentionPlan:
        """Resolve the plan with the lengths that a worker reports; ValueError for None."""
        if keep is None:
            raise ValueError("no lengths were reported")
        return self.resolve(keep)

    def estimate(self) -> RetentionPlan:
        """Return the plan with equal lengths in all layers: for estimates, never for eviction."""
        return self.resolve(np.full(self.num_layers, self.budget_tokens))


Plan: TypeAlias = RetentionPlan | DeferredPlan
