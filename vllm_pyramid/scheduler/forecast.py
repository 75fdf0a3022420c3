# SPDX-License-Identifier: Apache-2.0
"""How many blocks a pool will lack if the requests in it grow as expected: a pure function.

    blocks of one request
      |        __ whole prompt
      |       |  |           ____/ its end
      |       |  |      ____/
      |    ___|  |_____/
      +------------------------------> steps
         start   evicted

The function adds up what all requests will hold at each moment that matters, right before one of
them gives blocks back, and compares the greatest sum with the pool.

It looks as many steps ahead as the candidate has tokens to process. A preempted request loses what
was processed for it, its prompt and its answer so far, and keeps the answer's tokens. So an answer
that is no longer than its prompt reaches its end, and a longer one has got a token for each
processed token if older requests ever need its place. Looking to the end of long answers would
waste the pool: requests that start together also end together, and until then half of the pool
would lie idle.

Blocks that several requests have in their tables are counted once where that decides. Requests have
them until their first eviction, or to their ends.

Comparing future moments instead of the sum of all ends, and estimating answers from those that have
ended, is the idea of the Past-Future scheduler (Gong et al., ASPLOS 2025, arXiv:2507.10150), which
samples each length from their distribution. Here the mean is enough, and plans say what evictions
give back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# The most moments that are looked at. More are merged; a merged moment counts as one in which
# nothing has been given back since the moment before.
MOST_EVENTS = 32


class RequestArrays(NamedTuple):
    """Requests in one pipeline stage, `[requests]` int64 each; the candidate is last.

    Attributes:
        prompt: tokens of the prompt.
        least, most: the fewest and the most tokens of the answer.
        target: tokens to process before the request generates: prompt, and earlier answer tokens.
        chunk: the most tokens in a step.
        given_back: blocks that its evictions give back by the prompt's end.
        bound: the most blocks that it holds behind its prompt.
        peak: the most blocks that it holds inside its prompt.
        peak_after: the most blocks that it holds inside its prompt after its first eviction.
        computed: tokens that are computed.
        in_flight: tokens that are scheduled and whose steps have not ended.
    """

    prompt: Numbers
    least: Numbers
    most: Numbers
    target: Numbers
    chunk: Numbers
    given_back: Numbers
    bound: Numbers
    peak: Numbers
    peak_after: Numbers
    computed: Numbers
    in_flight: Numbers


class SharedBlocks(NamedTuple):
    """Blocks that several requests have, the candidate with its hit.

    Attributes:
        blocks: `[sets]` blocks that the same requests have.
        has: `[sets, requests]` which requests have them.
        to_end: `[sets, requests]` which have them to their ends, behind their evictions too.
    """

    blocks: Numbers
    has: Flags
    to_end: Flags


class StagePoolView(NamedTuple):
    """What the forecast asks about the pool of one pipeline stage.

    Attributes:
        usable: blocks that are free or a request's.
        whole_blocks: blocks for a number of tokens of which none is evicted.
        stock_blocks: blocks that layers without eviction hold, by tokens and tokens in flight; None
            without such layers.
        shared: the blocks that requests share, looked up only where they decide.
    """

    usable: int
    whole_blocks: Callable[[Numbers], Numbers]
    stock_blocks: Callable[[Numbers, Numbers | int], Numbers] | None
    shared: Callable[[], SharedBlocks]


class StepRules(NamedTuple):
    """How the requests advance.

    Attributes:
        step_tokens: the most tokens of a step.
        lag: steps that are under way when the next is scheduled; blocks come back that much later.
        ahead: places for drafts behind a request's last token.
        pace: tokens that a request gets in a step, on average.
        mean_answer: tokens of an answer, on average.
    """

    step_tokens: int
    lag: int
    ahead: int
    pace: float
    mean_answer: float


def expected_answers(mean: float, generated: Numbers, least: Numbers, most: Numbers) -> Numbers:
    """Return the expected tokens of answers that have `generated` tokens by now, `[requests]`.

    An answer that has outlived the mean is expected to last half as long again. That is between an
    answer of nearly fixed length, which ends now, and one that may end at any token, which lasts a
    mean longer.
    """
    expected = np.clip(math.ceil(mean), least, most)
    longer = np.minimum(generated + generated // 2 + 1, most)
    return np.where(generated < expected, expected, longer)


def missing_blocks(requests: RequestArrays, pool: StagePoolView, rules: StepRules) -> int:
    """Return the blocks that a stage's pool will lack for the requests, or 0.

    Step 0 is the step that is being scheduled. `held` is `[moments, requests]`, all else
    `[requests]`. What is not known is taken at its worst: a prompt that takes several steps is held
    whole until the latest step in which it may be done, and grows from the first.
    """
    prompt, least, most, target, chunk, given_back, bound, peak, peak_after, *_ = requests
    computed, in_flight = requests.computed, requests.in_flight
    usable, blocks_of = pool.usable, pool.whole_blocks
    lag, ahead, pace = rules.lag, rules.ahead, rules.pace
    in_prompt = computed < target
    done = np.where(in_prompt, target, computed + 1)  # tokens with a place after step 0
    generated = np.maximum(done - prompt, 0)
    end = prompt + expected_answers(rules.mean_answer, generated, least, most) - 1
    end = np.maximum(end, done)

    is_whole = in_prompt | (computed - in_flight < prompt)
    late = math.ceil((1 + lag) * pace)
    whole = np.minimum(blocks_of(np.minimum(target + late, end) + ahead), peak)
    at_end = np.minimum(blocks_of(end + ahead) - given_back, bound)
    stock: Numbers | int = 0  # what layers that do not evict hold, after the prompt
    if pool.stock_blocks is not None:
        stock = pool.stock_blocks(end + ahead, late)
        at_end = at_end + stock
        in_chunks = np.minimum(chunk, rules.step_tokens) * (1 + lag)
        in_prompts = pool.stock_blocks(np.minimum(target + late, end) + ahead, in_chunks)
        whole, peak_after = whole + in_prompts, peak_after + in_prompts
    if np.where(is_whole, np.maximum(at_end, whole), at_end).sum() <= usable:
        return 0  # whatever comes when

    left = np.where(in_prompt, target - computed, 0)
    step_tokens = max(rules.step_tokens - int((~in_prompt).sum()), 1)
    # One more: a chunk may be cut so that the last one carries the observation window.
    steps = np.maximum(-(-left.cumsum() // step_tokens), -(-left // chunk)) + 1
    steps = np.where(in_prompt, steps, 0)
    last = np.ceil((end - done) / pace).astype(np.int64) + steps + lag
    prompts = np.flatnonzero(is_whole)
    whole, whole_until = whole[prompts], steps[prompts] + lag

    horizon = steps[-1] + target[-1] + lag
    moments = np.unique(np.minimum(np.concatenate([last, whole_until]), horizon))
    moments = moments[:: len(moments) // -MOST_EVENTS][::-1]  # the last one among them
    before = np.concatenate([[-1], moments[:-1]])[:, None]
    grown = np.ceil(moments * pace).astype(np.int64)[:, None]
    held = blocks_of(np.minimum(done + grown, end) + ahead) - given_back
    held = np.minimum(held, bound) + stock
    part = held[:, prompts]
    held[:, prompts] = np.where(whole_until > before, np.maximum(part, whole), part)
    total = held.sum(axis=1, where=last > before)
    if total.max() <= usable:
        return 0
    shared = pool.shared()
    if not len(shared.blocks):
        return int(total.max() - usable)
    # Now count each shared block once, as long as a request is counted without its share of it. A
    # request that gives nothing back has its shared blocks to its end, others until they evict.
    # Afterwards these share what lasts, and may hold as much again of the rest if they evict inside
    # the prompt.
    share = shared.blocks @ shared.has
    to_end = (given_back == 0) | shared.to_end
    until = np.full_like(last, -1)
    until[prompts] = whole_until
    until = np.where(to_end, last, until)
    held[:, prompts] = part
    held -= shared.blocks @ (shared.has & to_end)
    part = held[:, prompts]
    rest = np.maximum(whole - share[prompts], peak_after[prompts])
    held[:, prompts] = np.where(whole_until > before, np.maximum(part, rest), part)
    once = held.sum(axis=1, where=last > before)
    once += (np.where(shared.has, until, -1).max(axis=1) > before) @ shared.blocks
    return max(int(np.minimum(total, once).max() - usable), 0)
