# SPDX-License-Identifier: Apache-2.0
"""The requests that layers shorten, on the device of the attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.kernels.records import WindowBatch
from vllm_pyramid.plan import DeferredPlan, EvictionPoint, IntArray
from vllm_pyramid.policy.kept_spans import leading
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.failures import METHOD, Failure
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.step_evictions import StepEvictions
    from vllm_pyramid.step.trace import TraceWriter
    from vllm_pyramid.step.window_mass import WindowMass

# The fields of a batch with a number for each row.
_LISTS = ("lens", "dead_prefixes", "keeps", "query_ends")
_ON_HOST = ("shortened", "layers", *(f"host_{name}" for name in _LISTS))
_ON_DEVICE = ("tables", *_LISTS)


@dataclass(frozen=True)
class EvictionBatch:
    """S tables that are shortened, each of a request in a layer. Places count from its first entry.

    They are of one layer, or of several whose caches are one tensor (`step/eviction_rows.py`): a
    request then has a row for each layer. Tables begin with the first block that the layer holds,
    in which tokens may have been evicted before.

    Attributes:
        call: the layer's attention; of several layers the first one's, with the last queries of all
            requests in all of these layers.
        policy: the engine's policy, or the one that it has for evictions inside prompts.
        shortened: `[S]` indices into the step's `evictions`. layers: `[S]`, the layer of each row.
        tables: `[S, M]` int32. query_ends: `[S]` int32, one behind a request's last query.
        lens: `[S]` int32, tokens in the tables. keeps: `[S]` int32, tokens that stay.
        dead_prefixes: `[S]` int32, the first tokens of the tables, which were evicted before.
        host_lens, host_dead_prefixes, host_keeps, host_query_ends: the same on the host.
        num_queries: of each request in `call.query`; None: all of the step's.
        has_all_queries: whether each request has as many, whatever its chunk.
    """

    call: AttentionInputs
    policy: Policy
    evictions: StepEvictions
    shortened: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]
    tables: torch.Tensor
    query_ends: torch.Tensor
    lens: torch.Tensor
    dead_prefixes: torch.Tensor
    keeps: torch.Tensor
    host_lens: IntArray
    host_dead_prefixes: IntArray
    host_keeps: IntArray
    host_query_ends: IntArray
    num_queries: int | None = None
    has_all_queries: bool = False

    @property
    def longest(self) -> int:
        """The tokens of the longest table."""
        return int(self.host_lens.max())

    @property
    def max_keep(self) -> int:
        """The most tokens that stay of a request."""
        return int(self.host_keeps.max())

    @property
    def plans(self) -> Sequence[EvictionPoint | DeferredPlan]:
        """The S plans."""
        return [self.evictions.plans[index] for index in self.shortened]

    @property
    def request_ids(self) -> list[str]:
        """The names of the S requests."""
        return [self.evictions.request_ids[index] for index in self.shortened]

    @property
    def where(self) -> str:
        """The layers, in words."""
        first, last = int(self.layers.min()), int(self.layers.max())
        return f"layer {first}" if first == last else f"layers {first} to {last}"

    def last_queries(self, window: int) -> WindowBatch:
        """Return the last `window` queries of the requests, for kernels that score by them."""
        call = self.call
        return WindowBatch(
            call.query,
            call.key_cache,
            self.tables,
            self.query_ends,
            self.lens,
            window,
            max_prompt_len=self.longest,
            key_scale=call.key_scale,
            key_scales=call.key_scales,
        )

    def only(self, rows: Sequence[int]) -> EvictionBatch:
        """Return some rows of the batch."""
        index = upload(np.array(rows, np.int64), self.tables.device)
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in _ON_HOST},
            **{name: getattr(self, name)[index] for name in _ON_DEVICE},
        )

    def evicting_to(self, evictions: StepEvictions) -> EvictionBatch:
        """Return the same rows with the points of other evictions of the same requests."""
        keeps = evictions.kept_lens[self.layers, self.shortened]
        on_device = upload(keeps, self.tables.device)
        return replace(self, evictions=evictions, keeps=on_device, host_keeps=keeps)

    # What stays in any case -----------------------------------------------------------------------

    def _protected(self) -> npt.NDArray[np.int32]:
        """Return the first and last tokens that stay in any case: `[2, S]`."""
        sinks, window = self.policy.sinks, self.policy.window
        result = np.empty((2, len(self.shortened)), np.int32)
        for index, plan in enumerate(self.plans):
            front = max(sinks, leading(self.evictions.keep[self.shortened[index]]))
            result[:, index] = front, window
            if isinstance(plan, EvictionPoint):
                layer = self.layers[index]
                result[:, index] = max(front, plan.front[layer]), max(window, plan.recent[layer])
        return result

    def _kept_spans(self) -> torch.Tensor | None:
        return self.evictions.kept_spans(self.shortened, self.call.query.device)

    def protects_more_than(self, window: int, sinks: int) -> bool:
        """Return whether kernels must be told more than `sinks` first and `window` last tokens.

        That is so where a plan or spans protect more tokens, where tokens were evicted before, and
        where a request keeps fewer tokens than `sinks + window`.
        """
        fronts, recents = self._protected()
        return bool(
            (fronts > sinks).any()
            or (recents > window).any()
            or self.host_dead_prefixes.any()
            or (self.host_keeps < sinks + window).any()
            or self._kept_spans() is not None
        )

    def protect(self, scores: torch.Tensor) -> torch.Tensor:
        """Return a copy, `[S, G, >= longest]`, with +inf for tokens that stay and -inf for dead
        tokens.

        `scores` are `[S, G, columns]`; columns of the window may be missing.
        """
        if (missing := self.longest - scores.shape[2]) > 0:
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        # A token whose score is -inf must still be preferred to a dead one.
        scores = scores.clamp(min=torch.finfo(torch.float32).min)
        device, columns = scores.device, torch.arange(scores.shape[2], device=scores.device)
        fronts, recents = upload(self._protected(), device)
        # No more tokens can be protected than are kept: the most recent have precedence.
        recents = recents.minimum(self.keeps)
        fronts = fronts.minimum(self.keeps - recents)
        alive = columns >= self.dead_prefixes[:, None]
        protected = (columns < (self.dead_prefixes + fronts)[:, None]) | (
            columns >= (self.lens - recents)[:, None]
        )
        if (spans := self._kept_spans()) is not None:
            protected[:, : spans.shape[1]] |= spans
        scores.masked_fill_((alive & protected)[:, None], torch.inf)
        return scores.masked_fill_(~alive[:, None], -torch.inf)

    # Evicting -------------------------------------------------------------------------------------

    def select(
        self, scores: torch.Tensor, trace: TraceWriter | None = None, mass: WindowMass | None = None
    ) -> torch.Tensor:
        """Return the places that stay by `Scorer.scores`, as of `ops.select`: `[S, G, max_keep]`
        int32.

        `trace` writes kept positions; then there is a `mass` of the window.
        """
        kept = self.policy.selector.kept(scores, self)
        if trace is not None and mass is not None:
            recalls = mass.recall(kept, self.lens, self.keeps)
            places = kept - self.dead_prefixes[:, None, None]
            for row, index in enumerate(self.shortened.tolist()):
                held = places[row, :, : self.host_keeps[row]]
                trace.record(self.evictions, index, int(self.layers[row]), held, recalls[row])
        return kept

    def compact(self, kept: torch.Tensor) -> None:
        """Move the survivors of every request, except what stays in place, to its range's tail."""
        call, (moving, counts, most) = self.call, self.moving(kept)
        call.ops.compact(*call.moved, self.tables, moving, self.lens, counts, max_keep=most)
        moved = self.host_lens - self.host_dead_prefixes - self.host_keeps
        np.add.at(self.evictions.tokens_done, self.shortened, moved)

    def moving(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the survivors that move, as of `kept`; how many, `[S]`; and the most of a row."""
        in_place = np.array([plan.in_place for plan in self.plans], np.int32)
        if not in_place.any():
            return kept, self.keeps, self.max_keep
        most, first = int((self.host_keeps - in_place).max()), upload(in_place, kept.device)
        places = torch.arange(most, device=kept.device) + first[:, None, None]
        places = places.clamp_(max=kept.shape[2] - 1).expand(-1, kept.shape[1], -1)
        return kept.gather(2, places), self.keeps - first, most

    # One request at a time ------------------------------------------------------------------------

    def with_queries(self, queries: torch.Tensor) -> EvictionBatch:
        """Return the batch with other queries, `[S, W, H, D]`: each request's W last ones."""
        rows, count = queries.shape[:2]
        ends = count * np.arange(1, rows + 1, dtype=np.int32)
        return replace(
            self,
            call=replace(self.call, batch=replace(self.call.batch, query=queries.flatten(0, 1))),
            query_ends=upload(ends, self.query_ends.device),
            host_query_ends=ends,
            num_queries=count,
            has_all_queries=True,
        )

    def scorer_inputs(self, row: int) -> ScorerInputs:
        """Return request `row` for a scorer; behind a prompt that stays, what may be evicted."""
        call, evictions, index = self.call, self.evictions, int(self.shortened[row])
        end, count = int(self.host_query_ends[row]), int(evictions.query_lens[index])
        if self.num_queries is not None:
            count = self.num_queries if self.has_all_queries else min(count, self.num_queries)
        if (layer := int(self.layers[row])) != call.layer:
            call = replace(call, layer=layer)
        start = int(self.host_dead_prefixes[row])
        if self.policy.schedule.keeps_prompts:
            start += int(evictions.prompt_lens[index])
        return ScorerInputs.of_request(
            call,
            self.policy,
            num_layers=len(evictions.kept_lens),
            num_tokens=int(self.host_lens[row]) - start,
            queries=call.query[end - count : end],
            block_row=self.tables[row],
            start=start,
            whole=bool(evictions.eviction_numbers[index] == 1),
            last_position=int(evictions.points[index]) - 1,
            prompt_len=int(evictions.prompt_lens[index]),
        )

    def score_each(self, kind: str, score: Callable[[ScorerInputs], torch.Tensor]) -> torch.Tensor:
        """Score one request at a time, into the columns of its table: `[S, G, longest]` float32.

        A request whose call raises, or does not return `[G, T]` float32, has failed.
        """
        heads = self.call.key_cache.shape[1]
        out = torch.full(
            (len(self.shortened), heads, self.longest), -torch.inf, device=self.call.query.device
        )
        for row in range(len(self.shortened)):
            inputs = self.scorer_inputs(row)
            try:
                scores = score(inputs)
                check_scores(kind, scores, heads, inputs.num_tokens)
            except Exception as error:
                asks = self.policy.scorer.asks_ranks
                self._failed(row, f"the scorer {kind!r}", error, peers_wait=asks)
                continue
            out[row, :, inputs.start : inputs.start + inputs.num_tokens] = scores
        return out

    def select_each(
        self, kind: str, select: Callable[[torch.Tensor, int], torch.Tensor], scores: torch.Tensor
    ) -> torch.Tensor:
        """Select of one request at a time: `[S, G, max_keep]` int32, ascending, -1 behind `keeps`.

        A request whose call raises, or does not return `[G, keep]` different places, has failed;
        its first tokens are selected.
        """
        marked = self.protect(scores)
        heads = scores.shape[1]
        out = torch.full(
            (len(self.shortened), heads, self.max_keep), -1, dtype=torch.int32, device=scores.device
        )
        for row in range(len(self.shortened)):
            start, end = int(self.host_dead_prefixes[row]), int(self.host_lens[row])
            keep = int(self.host_keeps[row])
            first = torch.arange(keep, dtype=torch.int32, device=scores.device)
            try:
                selected = select(marked[row, :, start:end], keep)
                wrong = check_selection(kind, selected, heads, keep, end - start)
                places = torch.where(wrong, first, selected.sort(dim=-1).values.int())
                reason = f"the selector {kind!r} returned places that do not exist, or one twice"
                self.evictions.failures.flag(
                    Failure(METHOD, reason), self.request_ids[row : row + 1], wrong[None]
                )
            except Exception as error:
                self._failed(row, f"the selector {kind!r}", error)
                places = first
            out[row, :, :keep] = places + start
        return out

    def _failed(self, row: int, what: str, error: Exception, *, peers_wait: bool = False) -> None:
        self.evictions.failures.add_error(
            self.request_ids[row : row + 1], what, error, peers_wait=peers_wait
        )


class WrongResultError(ValueError):
    """A scorer or a selector returned a result of the wrong type, shape or values."""


def check_scores(kind: str, scores: Any, heads: int, tokens: int, function: str = "score") -> None:
    """Raise WrongResultError unless `scores` is `[heads, tokens]` float32."""
    wanted = f"`{function}` must return a float32 tensor [G, T] = [{heads}, {tokens}]"
    if not isinstance(scores, torch.Tensor):
        raise WrongResultError(f"the scorer {kind!r} returned a {type(scores).__name__}: {wanted}")
    if scores.shape != (heads, tokens) or scores.dtype != torch.float32:
        raise WrongResultError(
            f"the scorer {kind!r} returned {list(scores.shape)} {scores.dtype}: {wanted}"
        )


def check_selection(kind: str, selected: Any, heads: int, keep: int, tokens: int) -> torch.Tensor:
    """Raise WrongResultError unless `selected` is `[heads, keep]` whole numbers.

    Returns a truth value on the device: whether some are no places of `tokens`, or the same.
    """
    wanted = f"`select` must return [G, keep] = [{heads}, {keep}] different places below {tokens}"
    if not isinstance(selected, torch.Tensor) or selected.shape != (heads, keep):
        is_tensor = isinstance(selected, torch.Tensor)
        returned = list(selected.shape) if is_tensor else type(selected).__name__
        raise WrongResultError(f"the selector {kind!r} returned {returned}: {wanted}")
    if selected.is_floating_point() and keep:
        raise WrongResultError(f"the selector {kind!r} returned {selected.dtype}: {wanted}")
    order = selected.sort(dim=-1).values
    is_place = (order >= 0) & (order < tokens)
    return ~is_place.all() | (order[:, 1:] == order[:, :-1]).any()
