# SPDX-License-Identifier: Apache-2.0
"""The requests that evict in one layer, on the device of the attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.plan import DeferredPlan, EvictionPoint
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.step import StepEvictions
    from vllm_pyramid.step.trace import TraceWriter
    from vllm_pyramid.step.window_mass import WindowMass

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class EvictionBatch:
    """S requests that evict in one layer. Places count from the first entry of `tables`.

    A layer that has evicted before is looked at from its first block on; the first `dead_prefixes`
    tokens of that block were evicted before.

    Attributes:
        call: the layer's attention.
        policy: what evicts: the engine's, or inside prompts the one that it has for there.
        evictions: of the step. chosen: `[S]` indices into them.
        tables: `[S, M]` int32. query_ends: `[S]` int32, one behind a request's last query.
        lens: `[S]` int32, tokens in the tables. deads: `[S]` int32. keeps: `[S]` int32, that stay.
        host_lens, host_deads, host_keeps: the same on the host.
    """

    call: AttentionInputs
    policy: Policy
    evictions: StepEvictions
    chosen: npt.NDArray[np.int64]
    tables: torch.Tensor
    query_ends: torch.Tensor
    lens: torch.Tensor
    dead_prefixes: torch.Tensor
    keeps: torch.Tensor
    host_lens: IntArray
    host_dead_prefixes: IntArray
    host_keeps: IntArray

    @property
    def longest(self) -> int:
        """Tokens of the longest table."""
        return int(self.host_lens.max())

    @property
    def max_keep(self) -> int:
        """The most tokens that stay of a request."""
        return int(self.host_keeps.max())

    @property
    def plans(self) -> Sequence[EvictionPoint | DeferredPlan]:
        """S plans."""
        return [self.evictions.plans[index] for index in self.chosen]

    # What stays in any case -----------------------------------------------------------------------

    def _protected(self) -> npt.NDArray[np.int32]:
        """First and last tokens that stay in any case, by the policy or by a plan: `[2, S]`."""
        first, last = self.policy.sinks, self.policy.window
        result = np.empty((2, len(self.chosen)), np.int32)
        for index, plan in enumerate(self.plans):
            result[:, index] = first, last
            if isinstance(plan, EvictionPoint):
                layer = self.call.layer
                result[:, index] = max(first, plan.front[layer]), max(last, plan.recent[layer])
        return result

    def protects_more_than(self, window: int, sinks: int) -> bool:
        """Whether more than `sinks` first and `window` last tokens, from place 0 on, are safe.

        True, too, where tokens are dead, or so few stay that not even these find room.
        """
        fronts, recents = self._protected()
        return bool(
            (fronts > sinks).any()
            or (recents > window).any()
            or self.host_dead_prefixes.any()
            or (self.host_keeps < sinks + window).any()
        )

    def protect(self, scores: torch.Tensor) -> torch.Tensor:
        """Mark what stays in any case with +inf and dead tokens with -inf, in a copy.

        Args:
            scores: `[S, G, >= longest]`.
        """
        # A score of -inf is no reason to keep a dead token in its place.
        scores = scores.clamp(min=torch.finfo(torch.float32).min)
        device, columns = scores.device, torch.arange(scores.shape[2], device=scores.device)
        fronts, recents = upload(self._protected(), device)
        # More than there is to keep cannot be protected: the most recent go first.
        recents = recents.minimum(self.keeps)
        fronts = fronts.minimum(self.keeps - recents)
        alive = columns >= self.dead_prefixes[:, None]
        certain = (columns < (self.dead_prefixes + fronts)[:, None]) | (
            columns >= (self.lens - recents)[:, None]
        )
        scores.masked_fill_((alive & certain)[:, None], torch.inf)
        return scores.masked_fill_(~alive[:, None], -torch.inf)

    # Evicting -------------------------------------------------------------------------------------

    def shorten(
        self, scores: torch.Tensor, trace: TraceWriter | None, mass: WindowMass | None
    ) -> torch.Tensor:
        """Select, and move the survivors of every request to the tail of its range.

        Args:
            scores: as of `Scorer.scores`.
            trace: where kept positions go. mass: of the window, if there is a trace.

        Returns:
            What was kept, as of `ops.select`.
        """
        call, layer = self.call, self.call.layer
        kept = self.policy.selector.kept(scores, self)
        if trace is not None and mass is not None:
            recalls = mass.recall(kept, self.lens, self.keeps)
            places = kept - self.dead_prefixes[:, None, None]
            for row, index in enumerate(self.chosen.tolist()):
                held = places[row, :, : self.host_keeps[row]]
                trace.record(self.evictions, index, layer, held, recalls[row])
        call.ops.compact(
            *call.moved,
            self.tables,
            kept,
            self.lens,
            self.keeps,
            max_keep=self.max_keep,
        )
        self.evictions.tokens_done[self.chosen] += (
            self.host_lens - self.host_dead_prefixes - self.host_keeps
        )
        return kept

    # One request at a time ------------------------------------------------------------------------

    def view(self, row: int) -> ScorerInputs:
        """Request `row` as a scorer sees it."""
        call, end = self.call, int(self.evictions.query_ends[self.chosen[row]])
        count = int(self.evictions.query_lens[self.chosen[row]])
        heads = call.key_cache.shape[1]
        return ScorerInputs(
            num_tokens=int(self.host_lens[row] - self.host_dead_prefixes[row]),
            window=self.policy.window,
            sinks=self.policy.sinks,
            num_query_heads=call.query.shape[1],
            num_kv_heads=heads,
            head_size=call.query.shape[2],
            first_kv_head=heads * (call.ranks.rank if call.ranks is not None else 0),
            layer=call.layer,
            num_layers=len(self.evictions.kept_lens),
            scale=call.softmax.scale,
            soft_cap=call.softmax.soft_cap,
            queries=call.query[end - count : end],
            key_cache=call.key_cache,
            value_cache=call.value_cache,
            block_row=self.tables[row],
            start=int(self.host_dead_prefixes[row]),
            key_scale=call.batch.key_scale,
            value_scale=call.batch.value_scale,
            key_scales=call.batch.key_scales,
            value_scales=call.batch.value_scales,
            logit_sinks=call.softmax.sinks,
            whole=self.evictions.numbers[self.chosen[row]] == 1,
            last_position=int(self.evictions.prompt_lens[self.chosen[row]]) - 1,
            prompt_len=int(self.evictions.of_prompts[self.chosen[row]]),
            rotary=call.rotary,
            knows_rotary=self.policy.scorer.needs_rotary,
            ranks=call.ranks,
        )

    def score_each(self, kind: str, score: Callable[[ScorerInputs], torch.Tensor]) -> torch.Tensor:
        """`score` of every request, in the columns of its table: `[S, G, longest]` float32.

        Raises:
            ValueError: a result that is not `[G, T]` float32, or has NaN.
        """
        heads = self.call.key_cache.shape[1]
        out = torch.full(
            (len(self.chosen), heads, self.longest), -torch.inf, device=self.call.query.device
        )
        for row in range(len(self.chosen)):
            view = self.view(row)
            scores = score(view)
            check_scores(kind, scores, heads, view.num_tokens)
            out[row, :, view.start : view.start + view.num_tokens] = scores
        return out

    def select_each(
        self,
        kind: str,
        select: Callable[[torch.Tensor, int], torch.Tensor],
        scores: torch.Tensor,
    ) -> torch.Tensor:
        """`select` for every request: `[S, G, max_keep]` int32, ascending, -1 behind `keeps`.

        Raises:
            ValueError: a result that is not `[G, keep]` different places.
        """
        marked = self.protect(_widened(scores, self.longest))
        heads = scores.shape[1]
        out = torch.full(
            (len(self.chosen), heads, self.max_keep), -1, dtype=torch.int32, device=scores.device
        )
        for row in range(len(self.chosen)):
            start, end = int(self.host_dead_prefixes[row]), int(self.host_lens[row])
            keep = int(self.host_keeps[row])
            chosen = select(marked[row, :, start:end], keep)
            check_selection(kind, chosen, heads, keep, end - start)
            out[row, :, :keep] = chosen.sort(dim=-1).values.int() + start
        return out


def _widened(scores: torch.Tensor, columns: int) -> torch.Tensor:
    """`scores` with columns of -inf behind: those of the window may be missing."""
    missing = columns - scores.shape[2]
    return (
        torch.nn.functional.pad(scores, (0, missing), value=-torch.inf) if missing > 0 else scores
    )


class WrongResultError(ValueError):
    """A scorer or a selector returned something else than it should; the message says what."""


def check_scores(kind: str, scores: Any, heads: int, tokens: int, function: str = "score") -> None:
    """Raise WrongResultError unless `scores` is `[heads, tokens]` float32 without NaN."""
    wanted = f"`{function}` must return a float32 tensor [G, T] = [{heads}, {tokens}]"
    if not isinstance(scores, torch.Tensor):
        raise WrongResultError(f"the scorer {kind!r} returned a {type(scores).__name__}: {wanted}")
    if scores.shape != (heads, tokens) or scores.dtype != torch.float32:
        raise WrongResultError(
            f"the scorer {kind!r} returned {list(scores.shape)} {scores.dtype}: {wanted}"
        )
    nan = scores.isnan().any()
    reason = f"the scorer {kind!r} returned NaN, which cannot be ranked"
    if scores.device.type != "cpu":
        torch._assert_async(~nan, reason)  # without waiting for the device
    elif nan:
        raise WrongResultError(reason)


def check_selection(kind: str, chosen: Any, heads: int, keep: int, tokens: int) -> None:
    """Raise WrongResultError unless `chosen` is `[heads, keep]` different places below `tokens`."""
    wanted = f"`select` must return [G, keep] = [{heads}, {keep}] different places below {tokens}"
    if not isinstance(chosen, torch.Tensor) or chosen.shape != (heads, keep):
        shape = list(chosen.shape) if isinstance(chosen, torch.Tensor) else type(chosen).__name__
        raise WrongResultError(f"the selector {kind!r} returned {shape}: {wanted}")
    if chosen.is_floating_point() or keep == 0:
        if keep:
            raise WrongResultError(f"the selector {kind!r} returned {chosen.dtype}: {wanted}")
        return
    order = chosen.sort(dim=-1).values
    wrong = (order[:, 0] < 0).any() | (order[:, -1] >= tokens).any()
    wrong = wrong | (order[:, 1:] == order[:, :-1]).any()
    if chosen.device.type != "cpu":
        torch._assert_async(~wrong, f"the selector {kind!r}: {wanted}")
    elif wrong:
        raise WrongResultError(f"the selector {kind!r} returned wrong places: {wanted}")
