# SPDX-License-Identifier: Apache-2.0
"""Admission: a prompt starts if it will not be preempted before it was worth its prefill.

    blocks of one request
      |        __ whole prompt
      |       |  |           ____/ its end
      |       |  |      ____/
      |    ___|  |_____/
      +------------------------------> steps
         start   evicted

vLLM starts a prompt as soon as all of it fits. With eviction nearly every prompt fits, once: those
that run hold little yet. Later they grow, the pool runs out, and vLLM preempts the newest, whose
prompt then has to be processed again. So we add up what all of them will hold at each moment that
matters, right before one of them gives blocks back, and compare the greatest sum with the pool.

How far ahead? Who is preempted loses what was processed for it, its prompt and its answer so
far, and keeps the answer's tokens. So we look as many steps ahead as the candidate has tokens to
process: an answer that is no longer than its prompt then reaches its end, and a longer one has got
a token for each token processed, if its place is ever needed for older ones. To look to the end of
long answers would waste the pool: those that start together also end together, and until then
half of it would lie idle.

Blocks that several requests have in their tables are counted once where that decides. They have
them until their first eviction.

Looking at the memory of all future moments instead of at the sum of all ends, and taking the
lengths of answers from those that have ended, is the idea of the Past-Future scheduler (Gong et
al., ASPLOS 2025, arXiv:2507.10150, which samples each length from their distribution; we take the
mean, and know more: what eviction gives back).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request, RequestStatus

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.plan import Plan, RetentionPlan, tokens_per_step

Numbers = npt.NDArray[np.int64]

# Tokens of an answer before one has ended: the order of a chat's answer. A wrong guess costs what
# vLLM's own rule costs (too short), or a batch that fills up later (too long), until some have
# ended.
FIRST_GUESS = 128
# Answers over which their mean is taken, about: what was asked hours ago says little.
AVERAGING_WINDOW = 64
# Steps after which a request that was refused is looked at again in any case: as ends come nearer,
# it grows less until they are there.
RECHECK_STEPS = 32
# Steps of one request with drafts over which their mean is taken, about.
STEPS = 512
# Moments that are looked at, at most; more are taken together, and then count as one in which
# nothing has been given back since the one before.
MOST_EVENTS = 32
UNBOUNDED = 1 << 40


class AnswerLengths:
    """Tokens of an answer, on average over those that have ended; recent ones weigh more.

    An answer that was cut off at `max_tokens` would have gone on: its tokens count, its end does
    not. That is the maximum-likelihood mean of lifetimes some of which are cut off, where an end is
    equally likely at every token. If all are cut off, the mean grows until `max_tokens` bounds it.
    """

    def __init__(self) -> None:
        self._tokens, self._ends = float(FIRST_GUESS), 1.0

    @property
    def mean(self) -> float:
        if self._tokens >= UNBOUNDED * self._ends:  # none ends by itself
            return float(UNBOUNDED)
        return self._tokens / self._ends

    def add(self, tokens: int, cut_off: bool) -> None:
        """An answer has ended."""
        keep = 1 - 1 / AVERAGING_WINDOW
        self._tokens = keep * self._tokens + tokens
        self._ends = keep * self._ends + (not cut_off)


class Pace:
    """Tokens that a request gets in a step, on average: more than one where drafts are accepted."""

    def __init__(self) -> None:
        self.mean = 1.0

    def add(self, tokens: int) -> None:
        """A request with drafts got so many tokens in a step."""
        self.mean += (tokens - self.mean) / STEPS


def answer_bounds(request: Request, max_model_len: int) -> tuple[int, int]:
    """The fewest and the most tokens of a request's answer; equal where nothing can end it early.

    `max_tokens` alone says little: clients ask for thousands and get hundreds.
    """
    most = max(min(request.max_tokens, max_model_len - request.num_prompt_tokens), 1)
    params = request.sampling_params
    if params is None:
        return 1, most
    if params.ignore_eos and not params.stop and not params.stop_token_ids:
        return most, most
    return min(max(params.min_tokens, 1), most), most


class Admission:
    """The rule, and what it knows of every request that has stood at the head of the queue.

    It says no only while others run, so something always ends, and never lets one request overtake
    another. What it refused it looks at again when blocks have been given back, or some steps
    later.

    Args:
        step_tokens: of a step, at most. longest_chunk: of one request in a step. lag: steps that
            are under way when the next is scheduled: so much later do blocks come back. ahead:
            places for drafts, behind a request's last token.
    """

    def __init__(
        self,
        coordinator: LockstepCoordinator,
        *,
        max_model_len: int,
        step_tokens: int,
        longest_chunk: int,
        lag: int,
        ahead: int = 0,
    ) -> None:
        self.lengths = AnswerLengths()
        self.pace = Pace()
        self._coordinator = coordinator
        self._max_model_len = max_model_len
        self._step_tokens, self._longest_chunk = step_tokens, longest_chunk
        self._lag, self._ahead = lag, ahead
        # A row a request, in the columns of `_lacking`: five, and four a pipeline stage.
        self._table = np.zeros((16, 5 + 4 * len(coordinator.stages)), np.int64)
        self._rows: dict[str, int] = {}
        self._unused = list(range(len(self._table)))
        self._refused: tuple[str, int] | None = None
        self._waits = 0  # steps since the look that refused it
        self._enough = 0  # tokens that it would have to find in the cache to fit by what it shares

    def admits(
        self, request: Request, plan: Plan, computed: int, running: Sequence[Request]
    ) -> bool:
        """Whether the first of the waiting requests may start, or start again.

        Args:
            plan: of the request. computed: its tokens that are in the cache.
            running: all that run, in the order in which they get tokens.
        """
        name = request.request_id
        now = name, self._coordinator.num_releases
        if (
            running
            and self._refused == now
            and self._waits < RECHECK_STEPS
            and computed < self._enough
        ):
            self._waits += 1
            return False
        self._enter(request, plan)
        if not running:
            return True
        rows = [self._rows[other.request_id] for other in running]
        processed = [*(other.num_computed_tokens for other in running), computed]
        in_flight = [*(other.num_in_flight_tokens for other in running), 0]
        rows.append(self._rows[name])
        names = [*(other.request_id for other in running), name]
        for stage in range(len(self._coordinator.stages)):
            if lacking := self._lacking(names, rows, processed, in_flight, stage):
                more = -(-lacking // int(self._coordinator.row_blocks[stage]))
                self._enough = computed + more * self._coordinator.largest_block
                self._refused, self._waits = now, 0
                return False
        return True

    def evicted(self, request_id: str, resolved: RetentionPlan, number: int) -> None:
        """The worker has evicted: from now on it is known exactly what the request gives back."""
        if number >= resolved.end_number:
            of_stages = self._given_back(resolved, number)
            self._table[self._rows[request_id], 5::4] = of_stages

    def ended(self, request: Request) -> None:
        """A request has ended, whether it ever ran or not."""
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._unused.append(row)
        least, most = answer_bounds(request, self._max_model_len)
        failed = request.status in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)
        # One that could have no other length says nothing about the others.
        if least < most and request.num_output_tokens and not failed:
            cut_off = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            self.lengths.add(request.num_output_tokens, cut_off)

    def _enter(self, request: Request, plan: Plan) -> None:
        row = self._rows.get(request.request_id)
        if row is None:
            if not self._unused:
                self._unused.extend(range(len(self._table), 2 * len(self._table)))
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            row = self._rows[request.request_id] = self._unused.pop()
        least, most = answer_bounds(request, self._max_model_len)
        plan = plan.estimate()
        # All pieces but the last, which is the rest, are as long as the first; so are chunks.
        chunk = min([self._longest_chunk, *(piece.tokens for piece in plan.pieces[:1])])
        most_in_step = 0
        if plan.inner:
            chunk, most_in_step = tokens_per_step(plan, chunk)
        # One that evicts inside its prompt, or evicted while it generated, never holds all of it;
        # heads come back some steps late, and so many tokens are computed in each.
        whole: Numbers | int = UNBOUNDED
        later: Numbers | int = 0
        if plan.inner or plan.every:
            late = self._lag * max(plan.every, min(most_in_step, self._step_tokens))
            most_blocks = partial(self._coordinator.most_blocks, request.request_id)
            whole = most_blocks(request.num_tokens, late)
            later = most_blocks(request.num_tokens, late, evicted=True)
        prompt_len = request.num_prompt_tokens
        self._table[row, :5] = (prompt_len, least, most, request.num_tokens, chunk)
        self._table[row, 5::4] = self._given_back(plan, plan.end_number)
        self._table[row, 6::4] = self._bound(plan, prompt_len + most - 1)
        self._table[row, 7::4] = whole
        self._table[row, 8::4] = later

    def _given_back(self, plan: RetentionPlan, number: int) -> Numbers:
        coordinator = self._coordinator
        return coordinator.stages.sums(plan.skip_after(number) // coordinator.block_sizes)

    def _bound(self, plan: RetentionPlan, end: int) -> Numbers | int:
        """Blocks that a request holds behind its prompt at most, if it evicts again and again.

        What is held after an eviction grows until it is the budget; up to the next one `every`
        tokens come, and the first block may be filled in part.
        """
        if not plan.every:
            return UNBOUNDED
        held = plan.after(plan.evictions_by(end)).held
        most = np.maximum(held, plan.end.held) + plan.every + self._lag
        coordinator = self._coordinator
        return coordinator.stages.sums(-(-most // coordinator.block_sizes) + 1)

    def _lacking(
        self,
        names: list[str],
        rows: list[int],
        computed_tokens: list[int],
        in_flight: list[int],
        stage: int,
    ) -> int:
        """Blocks that a stage's pool lacks for these requests, the candidate last, if any.

        We look as far ahead as the module says. Step 0 is the one that is being scheduled. All
        arrays are `[requests]`, `held` is `[moments, requests]`. Of what is not known, the worse is
        taken: a prompt that takes several steps is held whole until the latest step in which it may
        be done, and grows from the first.
        """
        pool = self._coordinator.usable_blocks[stage]
        blocks_of = partial(self._coordinator.whole_blocks, stage=stage)
        columns = [*range(5), *range(5 + 4 * stage, 9 + 4 * stage)]
        of_rows = self._table[rows][:, columns].T
        prompt, least, most, target, chunk, given_back, bound, peak, later = of_rows
        computed = np.array(computed_tokens)
        in_prompt = computed < target
        done = np.where(in_prompt, target, computed + 1)  # tokens with a place after step 0
        end = prompt + self._expected(np.maximum(done - prompt, 0), least, most) - 1
        end = np.maximum(end, done)

        is_whole = in_prompt | (computed - np.array(in_flight) < prompt)
        ahead, pace = self._ahead, self.pace.mean
        late = math.ceil((1 + self._lag) * pace)
        whole = np.minimum(blocks_of(np.minimum(target + late, end) + ahead), peak)
        at_end = np.minimum(blocks_of(end + ahead) - given_back, bound)
        beside: Numbers | int = 0  # what layers that do not evict hold, after the prompt
        if stock_groups := self._coordinator.stock_groups:
            beside = stock_groups.blocks_of(end + ahead, late)
            at_end = at_end + beside
            in_chunks = np.minimum(chunk, self._step_tokens) * (1 + self._lag)
            windows = stock_groups.blocks_of(np.minimum(target + late, end) + ahead, in_chunks)
            whole, later = whole + windows, later + windows
        if np.where(is_whole, np.maximum(at_end, whole), at_end).sum() <= pool:
            return 0  # whatever comes when

        left = np.where(in_prompt, target - computed, 0)
        step_tokens = max(self._step_tokens - int((~in_prompt).sum()), 1)
        # One more: a chunk may be cut so that the last one carries the observation window.
        steps = np.maximum(-(-left.cumsum() // step_tokens), -(-left // chunk)) + 1
        steps = np.where(in_prompt, steps, 0)
        last = np.ceil((end - done) / pace).astype(np.int64) + steps + self._lag
        prompts = np.flatnonzero(is_whole)
        whole, whole_until = whole[prompts], steps[prompts] + self._lag

        horizon = steps[-1] + target[-1] + self._lag
        moments = np.unique(np.minimum(np.concatenate([last, whole_until]), horizon))
        moments = moments[:: len(moments) // -MOST_EVENTS][::-1]  # the last one among them
        before = np.concatenate([[-1], moments[:-1]])[:, None]
        grown = np.ceil(moments * pace).astype(np.int64)[:, None]
        held = blocks_of(np.minimum(done + grown, end) + ahead) - given_back
        held = np.minimum(held, bound) + beside
        part = held[:, prompts]
        held[:, prompts] = np.where(whole_until > before, np.maximum(part, whole), part)
        total = held.sum(axis=1, where=last > before)
        if total.max() <= pool:
            return 0
        blocks, has = self._shared(names, stage)
        if not len(blocks):
            return int(total.max() - pool)
        # Now each of these blocks once, as long as anybody is counted without his share of them.
        # Who gives nothing back has them to his end, others until they evict. Behind that they
        # share nothing, and may come to hold as much again where they evict inside the prompt.
        share = blocks @ has
        to_end = given_back == 0
        until = np.full_like(last, -1)
        until[prompts] = whole_until
        until = np.where(to_end, last, until)
        held[:, prompts] = part
        held -= np.where(to_end, share, 0)
        part, rest = held[:, prompts], np.maximum(whole - share[prompts], later[prompts])
        held[:, prompts] = np.where(whole_until > before, np.maximum(part, rest), part)
        once = held.sum(axis=1, where=last > before)
        once += (np.where(has, until, -1).max(axis=1) > before) @ blocks
        return max(int(np.minimum(total, once).max() - pool), 0)

    def _shared(self, names: list[str], stage: int) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Blocks of a stage that several of these requests have, the candidate with its hit.

        Returns:
            `[sets]` blocks that the same requests have, and `[sets, requests]` who has them.
        """
        places = {name: index for index, name in enumerate(names)}
        of_row = int(self._coordinator.row_blocks[stage])
        sets: list[tuple[int, list[int]]] = []
        for holders, rows in self._coordinator.rows_shared(names[-1]).items():
            indices = [places[name] for name in holders if name in places]
            if len(indices) > 1:
                sets.append((rows * of_row, indices))
        has = np.zeros((len(sets), len(names)), np.bool_)
        for row, (_, indices) in zip(has, sets, strict=True):
            row[indices] = True
        return np.array([blocks for blocks, _ in sets], np.int64), has

    def _expected(self, generated: Numbers, least: Numbers, most: Numbers) -> Numbers:
        """Tokens of answers that have `generated` by now, `[requests]`.

        One that has outlived the mean is taken to last half as long again: between an answer whose
        length is nearly fixed (it ends now) and one that may end at any token (a mean more).
        """
        expected = np.clip(math.ceil(self.lengths.mean), least, most)
        longer = np.minimum(generated + generated // 2 + 1, most)
        return np.where(generated < expected, expected, longer)
