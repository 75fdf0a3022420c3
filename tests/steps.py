# SPDX-License-Identifier: Apache-2.0
"""What methods know of a worker, and its layers' attention calls, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.plans import plans_of
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.plan import DeferredPlan, EvictionPoint
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.kept_spans import Spans
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.hooks import MethodHooks, WorkerContext, WorkerHooks
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.worker.eviction_tracker import EvictionTracker


class OneRank:
    """A worker without tensor parallelism."""

    rank = 0
    size = 1

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def any(self, is_true: bool) -> bool:
        return is_true


def make_context(
    num_layers: int,
    *,
    heads: int = 2,
    block_size: int = 16,
    tracker: EvictionTracker | None = None,
    ranks: Ranks | None = None,
    **fields: Any,
) -> WorkerContext:
    """The context of a worker on the CPU, whose layers have caches alike.

    Args:
        tracker: whose step is the current one. fields: of `WorkerContext`.
    """
    spec = SimpleNamespace(num_kv_heads=heads, block_size=block_size)
    given: dict[str, Any] = {
        "config": None,
        "device": torch.device("cpu"),
        "specs": [spec] * num_layers,
        "block_size": block_size,
        "ranks": ranks or OneRank(),
        "model": torch.nn.Module,
        "step": lambda: tracker.step if tracker else Step.nothing(num_layers, 0),
    }
    return WorkerContext(**{**given, **fields})


def make_tracker(
    policy: Policy, num_layers: int, block_size: int, max_num_reqs: int, *, heads: int = 2
) -> EvictionTracker:
    """A worker's requests, with the hooks of the policy's methods, as the runner makes them."""
    tracker = EvictionTracker(policy, num_layers, block_size, max_num_reqs)
    context = make_context(num_layers, heads=heads, block_size=block_size, tracker=tracker)
    tracker.hooks = MethodHooks(policy.worker_hooks(context))
    return tracker


def the_hooks(tracker: EvictionTracker, kind: type[WorkerHooks]) -> Any:
    """Return the one of the tracker's hooks that is of this class."""
    (found,) = [hooks for hooks in tracker.hooks if isinstance(hooks, kind)]
    return found


def make_call(
    tables: torch.Tensor,
    *,
    layer: int = 0,
    ops: Ops = reference,
    query: torch.Tensor | None = None,
    caches: tuple[torch.Tensor, torch.Tensor] | None = None,
    starts: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
    skips: torch.Tensor | None = None,
    scale: float = 1.0,
    **fields: Any,
) -> AttentionInputs:
    """An attention call of one layer; what is not given is not looked at by the test.

    Args:
        tables: `[R, M]` int32. starts, lens, skips: as in `AttentionBatch`.
    """
    nothing = torch.zeros(0, dtype=torch.int32)
    if caches is None:
        caches = torch.zeros(0), torch.zeros(0)
    batch = AttentionBatch(
        torch.zeros(0, 1, 8) if query is None else query,
        *caches,
        tables,
        nothing if starts is None else starts,
        nothing if lens is None else lens,
        nothing if skips is None else skips,
    )
    return AttentionInputs(ops, layer, batch, Softmax(scale), **fields)


def make_evictions(
    lens: Sequence[int],
    kept_lens: Sequence[Sequence[int]] | None = None,
    *,
    plans: list[EvictionPoint | DeferredPlan] | None = None,
    budget: int = 64,
    block_size: int = 16,
    request_ids: list[str] | None = None,
    rows: Sequence[int] | None = None,
    spans: Sequence[Spans] | None = None,
    skips: Sequence[Sequence[int]] | None = None,
) -> StepEvictions:
    """Return the evictions of whole prompts that end in one step, one behind the other.

    Args:
        lens: tokens of each. kept_lens: for each layer what it keeps of each; by default one layer
            keeps everything. plans: instead of `kept_lens`.
        rows: rows of the batch, by default the first ones.
        spans: that stay of each.
        skips: for each layer how many tokens of each request were evicted before; by default none.
    """
    prompt_lens = np.array(lens, np.int32)
    if plans is None:
        plans = plans_of(prompt_lens, np.array(kept_lens or [lens], np.int32), budget=budget)
    shape = (plans[0].num_layers, len(lens))
    previous_skips = np.zeros(shape, np.int32) if skips is None else np.array(skips, np.int32)
    numbers = 1 + previous_skips.any(axis=0).astype(np.int64)
    return StepEvictions(
        request_ids=request_ids or [f"r{index}" for index in range(len(lens))],
        rows=np.arange(len(lens)) if rows is None else np.array(rows),
        query_ends=np.cumsum(prompt_lens, dtype=np.int32),
        query_lens=prompt_lens,
        prompt_lens=prompt_lens,
        points=prompt_lens,
        plans=plans,
        eviction_numbers=numbers,
        end_numbers=numbers,
        intervals=np.zeros(len(lens), np.int64),
        previous_skips=previous_skips,
        block_size=block_size,
        copies=[None] * len(lens),
        keep=spans or [()] * len(lens),
    )
