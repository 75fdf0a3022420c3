# SPDX-License-Identifier: Apache-2.0
"""Check that a request fits into the pool by itself, if prompts may be longer than the pool.

A request that opts out of evictions inside the prompt, has a larger budget or generates without end
may need more than all blocks, and would wait for ever: the front end refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vllm_pyramid.plan import peak_blocks
from vllm_pyramid.policy.request import ServedRequest


class Pool(NamedTuple):
    """The pool of blocks that all requests share.

    Attributes:
        num_layers: layers that evict. blocks: without the null block; each pipeline stage has as
            many.
        other_blocks: blocks that a request holds at most in layers that do not evict.
        stages: layers of each pipeline stage; empty if there is one.
    """

    num_layers: int
    block_size: int
    blocks: int
    max_model_len: int
    other_blocks: int = 0
    stages: tuple[int, ...] = ()


def check_fit(
    served: ServedRequest, prompt_len: int, params: Any, pool: Pool, *, strict: bool = True
) -> None:
    """Raise ValueError for a request that does not fit; lower the greatest `max_tokens` to what
    fits.

    `strict`: also refuse a request of which only a part of its `max_tokens` fits.
    """
    longest = pool.max_model_len - prompt_len
    wanted = min(params.max_tokens, longest)
    fits = tokens_that_fit(served, prompt_len, pool, wanted)
    if fits >= wanted:
        return
    held = _counter(served, prompt_len, pool)(prompt_len)
    protected = served.protected_tokens(prompt_len)
    beside = f", and {protected} tokens that stay beside it (kv_keep)" if protected else ""
    numbers = (
        f"a prompt of {prompt_len} tokens with policy {served.policy.name!r} and budget "
        f"{served.budget or served.policy.budget}{beside} holds up to {held} blocks, and the pool "
        f"has {pool.blocks}"
    )
    if fits < 1:
        less = " or shorter spans" if protected else ""
        raise ValueError(
            f"{numbers}: send a shorter one, ask for a smaller kv_budget{less}, or start the "
            "server with more memory for the KV cache"
        )
    if (strict and params.max_tokens < longest) or fits < params.min_tokens:
        raise ValueError(f"{numbers}, which leaves room for {fits} tokens: lower max_tokens")
    params.max_tokens = fits


def tokens_that_fit(served: ServedRequest, prompt_len: int, pool: Pool, limit: int) -> int:
    """Return how many tokens the request can generate, alone in the pool: `limit` at most."""

    blocks = _counter(served, prompt_len, pool)

    def fits(tokens: int) -> bool:
        # The last token gets no slot.
        return blocks(prompt_len + max(tokens - 1, 0)) <= pool.blocks

    if fits(limit):
        return limit
    if not fits(1):
        return 0
    low, high = 0, limit  # fits(low), if the prompt fits at all, and not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _counter(served: ServedRequest, prompt_len: int, pool: Pool) -> Callable[[int], int]:
    """Return what says how many blocks the request holds at most until a number of tokens."""
    sizes = served.policy.block_sizes(pool.num_layers, pool.block_size)
    plan = served.plan(prompt_len, pool.num_layers, int(sizes.max()))
    stages = pool.stages or (pool.num_layers,)
    starts = np.cumsum((0, *stages[:-1]))

    def count(computed: int) -> int:
        blocks = peak_blocks(plan, computed, sizes, stages=stages)
        return int(np.add.reduceat(blocks, starts).max()) + pool.other_blocks

    return count
