# SPDX-License-Identifier: Apache-2.0
"""The plan of a request whose lengths are known: a tuple of eviction points.

    computed tokens   0 ......... p_1 ......... p_2 ......... n ..... n + i ..... n + 2 i ...
    number            0            1             2            3         4            5
                                 `inner`                    `end`            `later`

Number 0 stands for "no eviction yet". Points inside the prompt come next, then the prompt's end
(`end_number`), then one after every `every` generated tokens, if there are any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan.eviction_point import (
    EvictionPoint,
    IntArray,
    Piece,
    PlanMismatchError,
    read_only,
)


@dataclass(frozen=True, eq=False)
class RetentionPlan:
    """When a request evicts and what each layer keeps then.

    Attributes:
        points: the evictions inside the prompt, in order, and the one at its end; skips never fall
            from one to the next.
        every: tokens between two evictions after the prompt's end; 0 if there are none.
        later: returns the point after the prompt's end at which that number of tokens is computed.
        pieces: in which layers drop tokens between one another; empty for most prompts.
        whole: `[num_layers]` bool, the tables from which no prompt evicts; None: there are none.
    """

    points: tuple[EvictionPoint, ...]
    every: int = 0
    later: Callable[[int], EvictionPoint] | None = None
    pieces: tuple[Piece, ...] = ()
    whole: npt.NDArray[np.bool_] | None = None
    is_deferred: ClassVar[Literal[False]] = False
    waits_for_orders: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    @property
    def num_bytes(self) -> int:
        """Bytes of memory at most, with what is computed when it is asked for."""
        parts = sum(point.num_bytes for point in self.points)
        parts += sum(piece.num_bytes for piece in self.pieces)
        return 1200 + self.end.keep.nbytes + 60 * len(self.points) + parts

    @cached_property
    def inner(self) -> tuple[EvictionPoint, ...]:
        """The evictions inside the prompt."""
        return self.points[:-1]

    @cached_property
    def end(self) -> EvictionPoint:
        """The eviction at the prompt's end, at which there may be nothing to give back."""
        return self.points[-1]

    @cached_property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.end.computed

    @cached_property
    def block_size(self) -> int:
        """Tokens of a cache block."""
        return self.end.block_size

    @cached_property
    def num_layers(self) -> int:
        """Layers that the plan is for."""
        return self.end.num_layers

    @cached_property
    def budget_tokens(self) -> int:
        """Mean tokens that a layer keeps of the prompt, rounded up."""
        return self.end.budget_tokens

    @cached_property
    def in_place(self) -> int:
        """The first tokens that stay in their blocks at all evictions; see `EvictionPoint`."""
        return self.end.in_place

    @cached_property
    def evicts(self) -> bool:
        """Whether any layer gives a slot back, at the prompt's end or perhaps later."""
        return self.every > 0 or bool(self.end.skip.any())

    # Numbers of evictions -----------------------------------------------------------------------

    @cached_property
    def end_number(self) -> int:
        """The number of the eviction at the prompt's end."""
        return len(self.points)

    @cached_property
    def _inner_tokens(self) -> tuple[int, ...]:
        return tuple(point.computed for point in self.inner)

    def evictions_by(self, computed: int) -> int:
        """Return the number of the latest eviction once `computed` tokens have been computed."""
        if computed >= self.prompt_len:
            later = (computed - self.prompt_len) // self.every if self.every else 0
            return self.end_number + later
        return bisect_right(self._inner_tokens, computed)

    def computed_at(self, number: int) -> int:
        """Return the tokens computed at an eviction, `number` >= 1."""
        if number < self.end_number:
            return self.points[number - 1].computed
        return self.prompt_len + (number - self.end_number) * self.every

    def next_eviction(self, computed: int) -> int | None:
        """Return the tokens computed at the first eviction after `computed` tokens, or None."""
        number = self.evictions_by(computed) + 1
        if number > self.end_number and not self.every:
            return None
        return self.computed_at(number)

    def after(self, number: int) -> EvictionPoint:
        """Return the point from which eviction `number` >= 1 takes its lengths."""
        if number <= self.end_number:
            return self.points[number - 1]
        assert self.later is not None, f"eviction {number} of a plan that has {self.end_number}"
        return self.later(self.computed_at(number))

    @cached_property
    def _no_skip(self) -> IntArray:
        return read_only(np.zeros_like(self.end.skip))

    def skip_after(self, number: int) -> IntArray:
        """Return the skips that hold from an eviction on; zeros before the first."""
        return self.after(number).skip if number else self._no_skip

    @property
    def giving(self) -> list[int]:
        """The numbers of the evictions up to the prompt's end at which a layer gives slots back."""
        skips = np.stack([self._no_skip, *(point.skip for point in self.points)])
        numbers: list[int] = (np.flatnonzero(np.diff(skips, axis=0).any(axis=1)) + 1).tolist()
        return numbers

    def piece_at(self, computed: int) -> Piece | None:
        """Return the piece that begins at a step's end, `computed`; None without pieces."""
        if not self.pieces or computed >= self.prompt_len:
            return None
        piece = self.pieces[computed // self.pieces[0].end]
        if piece.start != computed:
            raise PlanMismatchError(
                f"a step ended inside a piece, at token {computed}: the next one begins at "
                f"{piece.start}; scheduler and worker disagree about the KV policy; report this"
            )
        return piece

    # What others may share ----------------------------------------------------------------------

    @cached_property
    def exact_tokens(self) -> int:
        """The first tokens whose KV is that of the full cache, where there is an eviction."""
        return self.points[0].computed

    @cached_property
    def untouched(self) -> int | None:
        """The first tokens whose slots no eviction writes, in any layer; None: all of them.

        Evicting moves survivors to `skip` and beyond, behind those that stay in place, so slots
        before the smallest skip of the first eviction, and as many more as stay in place, hold what
        prefill wrote there until their blocks are given back. Slots of tables that are whole always
        do.
        """
        if not self.evicts:
            return None
        skip = self.points[0].skip
        if self.pieces:
            return 0
        return int((skip if self.whole is None else skip[~self.whole]).min()) + self.in_place

    # Resolving, as a `DeferredPlan` is ----------------------------------------------------------

    def estimate(self) -> RetentionPlan:
        """Return the plan itself; see `DeferredPlan.estimate`."""
        return self

    def resolved(self, keep: Sequence[int] | None) -> RetentionPlan:
        """Return the plan itself; ValueError if lengths are given although they were known."""
        if keep is not None:
            raise ValueError("lengths were decided for a request whose lengths are known")
        return self

    # Other plans made from this one -------------------------------------------------------------

    def repeated(self, every: int, later: Callable[[int], EvictionPoint]) -> RetentionPlan:
        """Return the plan with further evictions during generation; see `every` and `later`."""
        return replace(self, every=every, later=later)

    def with_inner(self, inner: Sequence[EvictionPoint]) -> RetentionPlan:
        """Return the plan with evictions inside the prompt.

        Points at which no layer has anything to give back are left out. Where a point would skip
        more of a layer than a later one, it keeps what the later one needs.
        """
        found = [self.end]
        for point in reversed(inner):
            skip = found[-1].skip
            if (point.skip > skip).any():
                skip = np.minimum(point.skip, skip) // point.block_size * point.block_size
                keep = np.maximum(point.keep, point.computed - skip)
                point = replace(point, skip=read_only(skip), keep=read_only(keep))
            if not point.skip.any():
                break
            found.append(point)
        return replace(self, points=tuple(reversed(found)))

    @classmethod
    def of_pieces(
        cls, prompt_len: int, block_size: int, keep: npt.NDArray[Any], pieces: Sequence[Piece]
    ) -> RetentionPlan:
        """Build the plan that holds what its pieces hold; each gives up whole blocks if these are
        filled.

        `keep`, `[num_layers]`, has the tokens that the method keeps of all pieces together.
        """
        held = sum((piece.held for piece in pieces), np.zeros(len(keep), np.int32))
        skip = prompt_len - held
        mean = -(-int(keep.sum()) // len(keep))
        kept_pieces = tuple(pieces) if skip.any() else ()
        none = read_only(np.zeros_like(keep))
        end = EvictionPoint(
            prompt_len,
            block_size,
            mean,
            read_only(keep),
            read_only(skip),
            front=none,
            recent=none,
            in_pieces=bool(kept_pieces),
        )
        return cls((end,), pieces=kept_pieces)
