# SPDX-License-Identifier: Apache-2.0
"""What each layer keeps at one eviction of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class EvictionPoint:
    """What each layer keeps once `computed` tokens have been computed.

    All arrays are `[num_layers]` int32 and read-only.

    Attributes:
        computed: tokens computed by then; at the prompt's end, the tokens of the prompt.
        block_size: tokens of a cache block.
        budget_tokens: the mean of `keep` without `protected`, rounded up.
        keep: tokens the policy keeps per KV head, window and sinks included: the paper's number,
            and `protected`.
        skip: tokens whose slots are given back: `computed - keep`, rounded down to a block if the
            policy fills blocks. Survivors stand in positions `skip .. computed - 1`.
        front: how many of the first tokens that a layer holds stay, whatever their scores.
        recent: how many of the last tokens that a layer holds stay, whatever their scores.
        in_pieces: the layers gave up these slots while they ran, piece by piece (`Piece`).
        protected: tokens of spans that every layer and KV head keeps beside the budget.
        in_place: how many of the first tokens stay in their blocks, whole blocks of them. Their
            blocks take the places from `skip` on in the layers' tables; nothing is moved.
    """

    computed: int
    block_size: int
    budget_tokens: int
    keep: IntArray
    skip: IntArray
    front: IntArray
    recent: IntArray
    in_pieces: bool = False
    protected: int = 0
    in_place: int = 0
    is_deferred: ClassVar[Literal[False]] = False

    @classmethod
    def of(
        cls,
        computed: int,
        block_size: int,
        budget_tokens: int,
        keep: npt.NDArray[Any],
        fill_blocks: bool,
        *,
        front: npt.NDArray[Any] | int = 0,
        recent: npt.NDArray[Any] | int = 0,
    ) -> EvictionPoint:
        """Build the point that keeps `keep`, `[num_layers]` whole numbers."""
        rows, zeros = keep[None], np.zeros_like(keep)[None]
        stays = {"front": zeros + front, "recent": zeros + recent}
        return cls.of_all([computed], block_size, [budget_tokens], rows, fill_blocks, **stays)[0]

    @classmethod
    def of_all(
        cls,
        computed: Sequence[int],
        block_size: int,
        budget_tokens: Sequence[int],
        keep: npt.NDArray[Any],
        fill_blocks: bool,
        *,
        front: npt.NDArray[Any],
        recent: npt.NDArray[Any],
    ) -> list[EvictionPoint]:
        """Build T points at once; `keep`, `front` and `recent` are `[T, num_layers]`."""
        skip = np.array(computed, np.int64)[:, None] - keep
        if fill_blocks:
            skip = skip // block_size * block_size
        rows = (read_only(values) for values in (keep, skip, front, recent))
        return [
            cls(tokens, block_size, mean, *arrays)
            for tokens, mean, *arrays in zip(computed, budget_tokens, *rows, strict=True)
        ]

    def beside(self, protected: int, in_place: int = 0) -> EvictionPoint:
        """Return the point with `protected` tokens of spans more, all of which stay in every layer.

        What is given back does not change. A layer whose share of recent tokens would leave no room
        for its first ones has fewer recent ones, so that nothing that stays competes with spans.
        """
        return replace(
            self,
            computed=self.computed + protected,
            keep=read_only(self.keep + protected),
            recent=read_only(np.minimum(self.recent, np.maximum(self.keep - self.front, 0))),
            protected=protected,
            in_place=in_place,
        )

    def skipping(self, skip: IntArray) -> EvictionPoint:
        """Return the point with these skips; the point itself if they are its own."""
        if skip.tobytes() == self.skip.tobytes():  # in less time than an array operation takes
            return self
        held = self.computed - skip
        keep = np.where(skip < self.skip, held, np.minimum(self.keep, held))
        return replace(self, skip=read_only(skip), keep=read_only(keep))

    @property
    def num_layers(self) -> int:
        """Layers that the point is for."""
        return len(self.keep)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory at most, with the arrays that are computed when they are asked for."""
        return 800 + 7 * (128 + self.keep.nbytes)

    @cached_property
    def held(self) -> IntArray:
        """Tokens that stay per KV head, `computed - skip`: `keep`, or up to a block more."""
        return read_only(self.computed - self.skip)

    @cached_property
    def blocks(self) -> IntArray:
        """Blocks that each layer holds after the eviction, a partly filled last one included."""
        return self.blocks_in(np.array(self.block_size))

    def blocks_in(self, block_sizes: npt.NDArray[Any]) -> IntArray:
        """Return `blocks` for layers with blocks of different sizes, `[num_layers]`.

        `block_size` is a multiple of each, so that skipped blocks are whole in all layers.
        """
        return read_only(-(-self.computed // block_sizes) - self.skip // block_sizes)

    @cached_property
    def blocks_behind(self) -> IntArray:
        """Whole blocks of the tokens so far that this eviction writes to, `[num_layers]`."""
        first = (self.skip + self.in_place) // self.block_size
        return read_only(self.computed // self.block_size - first)


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens `start .. end - 1` of a prompt, computed in one step; each layer passes fewer on.

    Attributes:
        recent: the last tokens, which score the others and are kept. sinks: first ones, kept too.
        before: `[num_layers]` int32, tokens held of the pieces before it.
        held: `[num_layers]` int32, tokens of it that are held: what layer l + 1 computes is what
            layer l holds, so it never rises.
    """

    start: int
    end: int
    recent: int
    sinks: int
    before: IntArray
    held: IntArray

    @property
    def tokens(self) -> int:
        """Tokens of the piece, all of which the first layer computes."""
        return self.end - self.start

    @property
    def num_bytes(self) -> int:
        """Bytes of memory at most, with the array that is computed when it is asked for."""
        return 600 + 3 * (128 + self.held.nbytes)

    @cached_property
    def enters(self) -> IntArray:
        """Tokens of the piece that each layer computes, `[num_layers]` int32."""
        return np.concatenate([[self.tokens], self.held[:-1]]).astype(np.int32)


class Eviction(NamedTuple):
    """What the worker did at one eviction of a request.

    Attributes:
        tokens: evicted now, summed over all layers.
        keep: tokens that the policy keeps in each layer, if the prompt's scores decided; else None.
        number: which eviction of the request, see `RetentionPlan.end_number`.
    """

    tokens: int
    keep: tuple[int, ...] | None = None
    number: int = 1


def read_only(values: npt.NDArray[Any]) -> IntArray:
    """Return a read-only int32 copy."""
    result = values.astype(np.int32)
    result.flags.writeable = False
    return result


class PlanMismatchError(RuntimeError):
    """A worker is to do something that a request's plan rules out.

    It may then hold another number of tokens than the scheduler believes, whose blocks would go to
    other requests too early. So the engine stops, not one request.
    """
