# SPDX-License-Identifier: Apache-2.0
"""What is kept of one prompt: known beforehand, or solved from its scores.

    Policy.plan(prompt_len, ...) ---> RetentionPlan               lengths known beforehand
                                 \\-> OpenPlan --settle(keep)--> RetentionPlan

Both answer the same questions; `is_open` tells them apart. Everything that frees blocks or hides
tokens works with a `RetentionPlan` alone. Where the policy evicts inside the prompt or during
generation too, it has one for every eviction: `RetentionPlan.after`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens `start .. end - 1` of a prompt that are processed in one step and thinned in it.

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

    @cached_property
    def enters(self) -> IntArray:
        """Tokens of the piece that each layer computes, `[num_layers]` int32."""
        return np.concatenate([[self.tokens], self.held[:-1]]).astype(np.int32)


@dataclass(frozen=True, eq=False)
class RetentionPlan:
    """What is kept of one prompt, per layer. All arrays are `[num_layers]` int32 and read-only.

    Attributes:
        prompt_len: tokens of the prompt; in the plan of a later eviction, tokens computed by then.
        block_size: tokens of a cache block.
        budget_tokens: the mean of `keep`, rounded up; at most `prompt_len`.
        keep: tokens the policy keeps per KV head, window and sinks included: the paper's number.
        skip: tokens whose slots are given back: `prompt_len - keep`, rounded down to a block if
            the policy fills blocks. Survivors stand in positions `skip .. prompt_len - 1`.
        front: how many of the first tokens that a layer holds stay in any case.
        recent: how many of the last tokens that a layer holds stay in any case.
        inner: the plans of evictions inside the prompt, in order, each of the tokens computed by
            then; skips never fall from one to the next, nor to this one's.
        every: tokens between two evictions after the prompt's; 0 if none follows.
        later: the plan of a later eviction, by the tokens computed by then.
        pieces: of a prompt that is thinned between layers; none where it is evicted from at its
            end, or keeps everything.
    """

    prompt_len: int
    block_size: int
    budget_tokens: int
    keep: IntArray
    skip: IntArray
    front: IntArray
    recent: IntArray
    inner: tuple[RetentionPlan, ...] = ()
    every: int = 0
    later: Callable[[int], RetentionPlan] | None = None
    pieces: tuple[Piece, ...] = ()
    is_open: ClassVar[Literal[False]] = False
    exact: ClassVar[bool] = True

    @property
    def num_layers(self) -> int:
        """Layers that the plan is for."""
        return len(self.keep)

    @classmethod
    def of(
        cls,
        prompt_len: int,
        block_size: int,
        budget_tokens: int,
        keep: npt.NDArray[Any],
        fill_blocks: bool,
        *,
        front: npt.NDArray[Any] | int = 0,
        recent: npt.NDArray[Any] | int = 0,
    ) -> RetentionPlan:
        """The plan that keeps `keep`, `[num_layers]` whole numbers, once."""
        skip = prompt_len - keep
        if fill_blocks:
            skip = skip // block_size * block_size
        zeros = np.zeros_like(keep)
        return cls(
            prompt_len,
            block_size,
            budget_tokens,
            _read_only(keep),
            _read_only(skip),
            front=_read_only(zeros + front),
            recent=_read_only(zeros + recent),
        )

    def estimate(self) -> RetentionPlan:
        """The plan itself; see `DeferredPlan.estimate`."""
        return self

    def resolved(self, keep: Sequence[int] | None) -> RetentionPlan:
        """The plan itself.

        Raises:
            ValueError: lengths are given, and they were known.
        """
        if keep is not None:
            raise ValueError("lengths were solved for a request whose lengths are known")
        return self

    def repeated(self, every: int, later: Callable[[int], RetentionPlan]) -> RetentionPlan:
        """The same with evictions every so many tokens; see `every` and `later`."""
        return replace(self, every=every, later=later)

    def with_inner(self, inner: Sequence[RetentionPlan]) -> RetentionPlan:
        """The same with evictions inside the prompt; see `inner`.

        Those in which no layer has anything to give are left out. Where an inner plan would skip
        more of a layer than a later one, it keeps what the later one needs.
        """
        found: list[RetentionPlan] = []
        skip = self.skip
        for plan in reversed(inner):
            if (plan.skip > skip).any():
                skip = np.minimum(plan.skip, skip) // plan.block_size * plan.block_size
                keep = np.maximum(plan.keep, plan.prompt_len - skip)
                plan = replace(plan, skip=_read_only(skip), keep=_read_only(keep))
            skip = plan.skip
            if not skip.any():
                break
            found.append(plan)
        return replace(self, inner=tuple(reversed(found)))

    # Evictions are numbered: 0 is "none yet", then come those inside the prompt, the prompt's end
    # (`end_number`), and those after it.

    @property
    def end_number(self) -> int:
        """The number of the eviction at the prompt's end."""
        return len(self.inner) + 1

    @cached_property
    def _points(self) -> tuple[int, ...]:
        """Tokens computed at each eviction inside the prompt."""
        return tuple(plan.prompt_len for plan in self.inner)

    def evictions_by(self, computed: int) -> int:
        """The number of the latest eviction once `computed` tokens have been computed."""
        if computed >= self.prompt_len:
            later = (computed - self.prompt_len) // self.every if self.every else 0
            return self.end_number + later
        return bisect_right(self._points, computed)

    def computed_at(self, number: int) -> int:
        """Tokens computed at an eviction, `number` >= 1."""
        if number < self.end_number:
            return self.inner[number - 1].prompt_len
        return self.prompt_len + (number - self.end_number) * self.every

    def next_eviction(self, computed: int) -> int | None:
        """Tokens computed at the first eviction after `computed` tokens, or None."""
        number = self.evictions_by(computed) + 1
        if number > self.end_number and not self.every:
            return None
        return self.computed_at(number)

    def after(self, number: int) -> RetentionPlan:
        """What is kept from an eviction on, `number` >= 1."""
        if number < self.end_number:
            return self.inner[number - 1]
        if number == self.end_number:
            return self
        assert self.later is not None, f"eviction {number} of a plan that does not go on"
        return self.later(self.computed_at(number))

    @property
    def first(self) -> RetentionPlan:
        """What is kept from the first eviction on: until then all KV is that of the full cache."""
        return self.after(1)

    def skip_after(self, number: int) -> IntArray:
        """The skips that hold from an eviction on; none before the first."""
        return self.after(number).skip if number else np.zeros_like(self.skip)

    @property
    def giving(self) -> list[int]:
        """The numbers of the evictions up to the prompt's end at which a layer gives slots back."""
        skips = np.concatenate([self._inner_ends[1], self.skip[None]])
        numbers: list[int] = (np.flatnonzero(np.diff(skips, axis=0).any(axis=1)) + 1).tolist()
        return numbers

    def tokens_a_step(self, longest: int) -> tuple[int, int]:
        """Prompt tokens that its steps compute on average, which end at evictions: at least.

        Args:
            longest: tokens of a chunk at most.

        Returns:
            The least such mean from the prompt's beginning or one of its evictions on; and the most
            tokens that one step computes.
        """
        stretches = np.diff(self._inner_ends[0], prepend=0)[::-1]
        steps = -(-stretches // longest)
        means = stretches.cumsum() // np.maximum(steps.cumsum(), 1)
        return max(int(means.min()), 1), min(int(stretches.max()), longest)

    @cached_property
    def _inner_ends(self) -> tuple[IntArray, IntArray]:
        """Of the stretches of a prompt up to each eviction: `[m]` ends and `[m, num_layers]` skips.

        The last one ends with the prompt.
        """
        ends = [*(plan.prompt_len for plan in self.inner), self.prompt_len]
        skips = [np.zeros_like(self.skip), *(plan.skip for plan in self.inner)]
        return np.array(ends, np.int32), np.stack(skips)

    def most_blocks(
        self,
        tokens: int,
        block_sizes: npt.NDArray[Any],
        late: int = 0,
        stages: Sequence[int] = (),
        *,
        evicted: bool = False,
    ) -> IntArray:
        """Blocks of each layer when all together hold most, until `tokens` are computed.

        Args:
            tokens: the prompt's at least. block_sizes: `[num_layers]`, see `blocks_in`.
            late: tokens that may be computed before blocks are back from an eviction.
            stages: layers of each pipeline stage, where stages have pools of their own: then it
                is when the layers of a stage together hold most, for each stage by itself.
            evicted: look only at what comes behind the first eviction; 0 if nothing does.

        Returns:
            `[num_layers]`; their sum is the request's peak. Where it evicts after the prompt's end,
            an upper bound of it.
        """
        assert tokens >= self.prompt_len
        ends, skips = self._inner_ends
        ends = np.minimum(ends + late, tokens)
        moments = -(-ends[:, None] // block_sizes) - skips // block_sizes
        if evicted:
            moments[0] = 0
        if tokens > self.prompt_len and not self.every:
            end = -(-tokens // block_sizes) - self.skip // block_sizes
            moments = np.concatenate([moments, end[None]])
        elif tokens > self.prompt_len:
            # What all layers keep grows with the evictions until it is the budget, though not what
            # each of them keeps; up to the next one `every` tokens come; and of each layer's blocks
            # the last may be filled in part, and the first with tokens beyond what is kept.
            end, last = self.end_number, self.evictions_by(tokens)
            keeps = np.stack([self.after(number).keep for number in (end, last)])
            if len(stages) > 1 and np.ptp(keeps, axis=1).any():  # a stage's share may fall again
                numbers = range(end, last + 1)
                keeps = np.stack([self.after(number).keep for number in numbers])
            of_stages = stages or (self.num_layers,)
            totals = np.add.reduceat(keeps, np.cumsum((0, *of_stages[:-1])), axis=1).max(axis=0)
            means = np.repeat(-(-totals // np.array(of_stages)), of_stages)
            most = -(-(means + self.every + late) // block_sizes) + 2
            moments = np.concatenate([moments, np.minimum(most, -(-tokens // block_sizes))[None]])
        ends_of_stages = np.cumsum(stages or (self.num_layers,))[:-1]
        peaks = [
            of_stage[int(of_stage.sum(axis=1).argmax())]
            for of_stage in np.split(moments, ends_of_stages, axis=1)
        ]
        return _read_only(np.concatenate(peaks))

    @classmethod
    def of_pieces(
        cls, prompt_len: int, block_size: int, keep: npt.NDArray[Any], pieces: Sequence[Piece]
    ) -> RetentionPlan:
        """The plan that holds what its pieces hold. `keep` is `[num_layers]`, their sums unfilled.

        Each piece gives up whole blocks of its own, if the policy fills blocks.
        """
        held = sum((piece.held for piece in pieces), np.zeros(len(keep), np.int32))
        skip = prompt_len - held
        mean = -(-int(keep.sum()) // len(keep))
        thinned = tuple(pieces) if skip.any() else ()
        none = _read_only(np.zeros_like(keep))
        return cls(
            prompt_len,
            block_size,
            mean,
            _read_only(keep),
            _read_only(skip),
            front=none,
            recent=none,
            pieces=thinned,
        )

    def piece_at(self, computed: int) -> Piece | None:
        """The piece that comes after `computed` tokens; None where the plan asks for no pieces.

        A piece is processed in one step, so `computed` is where one begins.
        """
        if not self.pieces or computed >= self.prompt_len:
            return None
        piece = self.pieces[computed // self.pieces[0].end]
        assert piece.start == computed, f"a step ended inside a piece, at token {computed}"
        return piece

    @cached_property
    def untouched(self) -> int | None:
        """The first tokens whose slots no eviction writes, in any layer; None: all of them.

        Evicting moves survivors to `skip` and what follows, so what stands before the least skip of
        the first eviction is what prefill wrote there, until the blocks are given back.
        """
        if not self.evicts:
            return None
        return 0 if self.pieces else int(self.first.skip.min())

    @property
    def exact_tokens(self) -> int:
        """The first tokens whose KV is that of the full cache, where there is an eviction."""
        return self.first.prompt_len

    @cached_property
    def blocks_behind(self) -> IntArray:
        """Whole blocks of the tokens so far that this eviction writes to, `[num_layers]`."""
        return _read_only(self.prompt_len // self.block_size - self.skip // self.block_size)

    def most_blocks_behind(self, stages: Sequence[int]) -> npt.NDArray[np.int64]:
        """`blocks_behind` of the first eviction, `[stages]`.

        Args:
            stages: layers of each pipeline stage.
        """
        starts = np.cumsum([0, *stages[:-1]])
        behind: npt.NDArray[np.int64] = np.add.reduceat(
            self.first.blocks_behind.astype(np.int64), starts
        )
        return behind

    @cached_property
    def held(self) -> IntArray:
        """Tokens really kept per KV head, `prompt_len - skip`: `keep`, or up to a block more."""
        return _read_only(self.prompt_len - self.skip)

    @cached_property
    def blocks(self) -> IntArray:
        """Blocks each layer holds after the eviction, the prompt's last one included."""
        return _read_only(-(-self.prompt_len // self.block_size) - self.skip // self.block_size)

    def blocks_in(self, block_sizes: npt.NDArray[Any]) -> IntArray:
        """`blocks` where layers have blocks of different sizes: `block_sizes` is `[num_layers]`.

        `block_size` is then a multiple of each, so that skipped blocks are whole in all of them.
        """
        return _read_only(-(-self.prompt_len // block_sizes) - self.skip // block_sizes)

    @cached_property
    def evicts(self) -> bool:
        """True if any layer gives a slot back, at the prompt's end or perhaps later."""
        return self.every > 0 or bool(self.skip.any())


class Eviction(NamedTuple):
    """What the worker did at one eviction of a request.

    Attributes:
        tokens: evicted now, summed over all layers.
        keep: tokens that the policy keeps in each layer, where they were solved from the prompt's
            scores; None where the scheduler knows them.
        number: which eviction of the request, see `RetentionPlan.end_number`.
    """

    tokens: int
    keep: tuple[int, ...] | None = None
    number: int = 1


def _read_only(values: npt.NDArray[Any]) -> IntArray:
    result = values.astype(np.int32)
    result.flags.writeable = False
    return result
