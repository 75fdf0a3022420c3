# SPDX-License-Identifier: Apache-2.0
"""A worker's changes of kept values, in PyTorch.

    before the move   O, from all keys and values that the layer holds
    behind it         P from the kept keys; V + dV to the kept tokens' places

V is written behind the move alone: before it, kept tokens may lie in blocks that other requests
share, or will find, and these must go on holding the full cache's values.

Shape legend: G KV heads, H query heads, W queries of the window, L kept tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.eviction_memory import COPIES_BYTES, parts_of_heads
from vllm_pyramid.step.failures import METHOD, Failure
from vllm_pyramid.step.hooks import CacheHooks, EvictionHooks, WorkerContext
from vllm_pyramid.step.scorer_inputs import ScorerInputs


class RidgeHooks(CacheHooks, EvictionHooks):
    """Changes V of what survives an eviction by r, `ridge`; one object a worker."""

    name = "ridge"

    def __init__(self, policy: Policy, ridge: float, context: WorkerContext) -> None:
        self.window, self.ridge, self.context = policy.window, ridge, context
        # Between the two calls of a batch: `[H, W, D]` outputs by row, none of rows that failed.
        self._outputs: dict[int, torch.Tensor] = {}

    def bytes_of_buffers(self) -> int:
        """Return the bytes of a step's outputs, and of the copies of a part of one request."""
        config, window = self.context.config, self.window
        num_heads = config.model_config.get_num_attention_heads(config.parallel_config)
        scheduler, longest = config.scheduler_config, config.model_config.max_model_len
        ending = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // window)
        found = 0
        for spec in self.context.specs:
            heads, size = spec.num_kv_heads, spec.head_size
            of_head = 4 * longest * _floats_per_key(size, num_heads // heads, window)
            (*_, last) = parts_of_heads(heads, max(1, COPIES_BYTES // of_head))
            copies = min(heads * of_head, max((last.stop - last.start) * of_head, COPIES_BYTES))
            found = max(found, copies + 4 * ending * num_heads * window * size)
        return found

    def before_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        self._outputs = {}
        for row in range(len(batch.shortened)):
            try:
                parts = _in_parts(batch.scorer_inputs(row))
                self._outputs[row] = torch.cat([window_outputs(part) for part in parts])
            except Exception as error:
                _add_error(batch, row, error)

    def after_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        outputs, self._outputs = self._outputs, {}
        for row, of_row in outputs.items():
            try:
                self._write(batch, row, of_row)
            except Exception as error:
                _add_error(batch, row, error)

    def _write(self, batch: EvictionBatch, row: int, outputs: torch.Tensor) -> None:
        end, keep = int(batch.host_lens[row]), int(batch.host_keeps[row])
        inputs = replace(batch.scorer_inputs(row), start=end - keep, num_tokens=keep)
        cache = batch.call.value_cache
        places = torch.arange(end - keep, end, device=cache.device)
        blocks = batch.tables[row][places // cache.shape[2]].long()
        first = 0
        for part in _in_parts(inputs):
            heads = slice(first, first + part.num_kv_heads)
            of_part = outputs[first * part.group : heads.stop * part.group]
            changed = changed_values(part, of_part, self.ridge).to(cache.dtype)
            cache[:, heads][blocks, :, places % cache.shape[2]] = changed.transpose(0, 1)
            reason = f"layer {inputs.layer}: its changed values (values: ridge) are not finite"
            batch.evictions.failures.flag(
                Failure(METHOD, reason),
                batch.request_ids[row : row + 1],
                ~changed.isfinite().all()[None],
            )
            first = heads.stop


def _add_error(batch: EvictionBatch, row: int, error: Exception) -> None:
    names = batch.request_ids[row : row + 1]
    batch.evictions.failures.add_error(names, "values: ridge", error)


def _floats_per_key(head_size: int, group: int, window: int) -> int:
    """Return the float32 numbers for a key of a KV head: copies of K and V, and the logits."""
    return 3 * head_size + 3 * group * window


def _in_parts(inputs: ScorerInputs) -> Iterator[ScorerInputs]:
    """Split a request by its KV heads, so that its copies fit into what is reserved for them."""
    floats = _floats_per_key(inputs.head_size, inputs.group, inputs.window)
    at_once = max(1, COPIES_BYTES // (4 * inputs.num_tokens * floats))
    return replace(inputs, heads_at_once=at_once).parts()


def window_outputs(inputs: ScorerInputs) -> torch.Tensor:
    """Return the attention outputs of the window's queries, `[H, W, D]` float32."""
    return (
        (_by_kv_head(inputs, inputs.attention()) @ inputs.values)
        .flatten(0, 1)
        .unflatten(0, (inputs.num_query_heads, -1))
    )


def changed_values(kept: ScorerInputs, outputs: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return V + dV of the kept tokens, `[G, L, D]` float32; `outputs` are over all tokens.

    Where a layer keeps fewer tokens than the window has, its last L queries count.
    """
    count = min(kept.window, kept.num_tokens)
    attention = _by_kv_head(kept, kept.attention(count))
    missing = _by_kv_head(kept, outputs[:, -count:]) - attention @ kept.values
    return kept.values + ridge_change(attention, missing, ridge)


def _by_kv_head(inputs: ScorerInputs, rows: torch.Tensor) -> torch.Tensor:
    """Return `[H, n, ...]` as `[G, H / G * n, ...]`: the rows of a KV head's queries together."""
    return rows.unflatten(0, (inputs.num_kv_heads, inputs.group)).flatten(1, 2)


def ridge_change(attention: torch.Tensor, missing: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return the change of the kept values, `[..., L, D]`; NaN where it cannot be solved.

    `attention` is P, `[..., R, L]` of R queries, and `missing` O - P V, `[..., R, D]`. `ridge` is
    r, of the mean of the diagonal of P P^T.
    """
    gram = attention @ attention.transpose(-1, -2)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    # Learned sinks may take all of the attention; nothing is divided by zero then.
    diagonal += ridge * diagonal.mean(dim=-1, keepdim=True).clamp(min=1e-20)
    factor, info = torch.linalg.cholesky_ex(gram)
    change = attention.transpose(-1, -2) @ torch.cholesky_solve(missing, factor)
    return change.masked_fill((info != 0)[..., None, None], torch.nan)
