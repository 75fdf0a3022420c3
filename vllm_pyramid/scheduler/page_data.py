# SPDX-License-Identifier: Apache-2.0
"""What the live page shows of a scheduler: the pool, and every running request layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator

# Of running requests; a page with more cannot be read, and the answer would grow.
MOST_REQUESTS = 256


def page_data(
    coordinator: LockstepCoordinator,
    running: Sequence[Request],
    waiting: int,
    stats: dict[str, Any],
) -> dict[str, Any]:
    """Return JSON values; lists of numbers are by evicting layer.

    Returns:
        pool: its blocks, and how many requests hold, other layers hold, and the caches of prefixes
            and sessions keep (which count as free).
        requests: of each running request, in vLLM's order, what `_request` says.
        running, waiting: how many there are.
        layers: the model's own numbers of the layers. stats: the counters of `policy_stats`.
    """
    held = int(sum(stats["blocks_held"]))
    return {
        "pool": {
            "blocks": stats["pool_blocks"],
            "held": held,
            "other": stats.get("other_blocks_held", 0),
            "cached": coordinator.block_pool.idle_blocks,
        },
        "policy": stats["policy"],
        "layers": coordinator.layers,
        "running": len(running),
        "waiting": waiting,
        "requests": [_request(coordinator, request) for request in running[:MOST_REQUESTS]],
        "stats": stats,
    }


def _request(coordinator: LockstepCoordinator, request: Request) -> dict[str, Any]:
    """Return what a request holds.

    Returns:
        computed: tokens computed. prompt: tokens of the prompt. generated: of the answer.
        freed: tokens at the front of each layer that evictions have given back; the mean of its
            KV heads, where these have lengths of their own.
        blocks: blocks of the pool in each layer's table, shared ones included.
        shared: leading tokens in blocks that other requests may hold, too.
        host: first and last token, exclusive, that came from the host cache.
        read: tokens of each layer that a generated token reads at most, in whole pages; None where
            it reads all.
    """
    record = coordinator.plans.records.get(request.request_id)
    num_layers = coordinator.layer_blocks.num_tables
    freed = np.zeros(num_layers, np.int64)
    blocks, shared, policy, budget = np.zeros(num_layers, np.int64), 0, "", None
    host, read = (0, 0), None
    if record is not None:
        plan = record.resolved
        if record.released and plan is not None:
            freed = plan.skip_after(record.released).astype(np.int64)
        blocks = coordinator.layer_blocks.of_units(record.num_blocks)
        blocks = np.maximum(blocks - freed // coordinator.layer_blocks.block_sizes, 0)
        prefixes = coordinator.prefixes
        shared = prefixes.num_bundles(request.request_id) * prefixes.cache.tokens
        served = record.terms.served
        policy = "" if served is None else served.policy.name
        budget = None if record.plan is None else record.plan.budget_tokens
        host = prefixes.of(request.request_id).from_below
        if served is not None and served.policy.attend.selects:
            block_size = coordinator.layer_blocks.largest
            pages = served.policy.attend.pages(request.num_prompt_tokens, num_layers, block_size)
            held = request.num_computed_tokens - freed
            read = np.minimum(pages.astype(np.int64) * block_size, held).tolist()
    return {
        "id": request.request_id,
        "policy": policy,
        "budget": budget,
        "prompt": request.num_prompt_tokens,
        "computed": request.num_computed_tokens,
        "generated": request.num_output_tokens,
        "freed": coordinator.layout.means(freed),
        "blocks": coordinator.layout.sums(blocks),
        "shared": shared,
        "host": list(host),
        "read": read,
    }
