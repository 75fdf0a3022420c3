# SPDX-License-Identifier: Apache-2.0
"""What a request asks of a machine under a policy, from the policy's own plan: for `cost.py`.

Where V lies in host memory, only K of a token has a place in the pool. Where a policy evicts
during generation, what is held goes up and down. Where tokens leave the forward pass, deeper layers
compute fewer. Where attention is gathered, keys are read again. All of it follows from lengths.

Shape legend: L layers, J decode steps of a request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_pyramid.bench.cost import Demand, prefill_ops
from vllm_pyramid.bench.shapes import Shape
from vllm_pyramid.policy.base import Policy
from vllm_pyramid.policy.plans import OpenPlan, RetentionPlan

__all__ = ["policy_demand", "retention_of"]

Integers = npt.NDArray[np.int64]
_MASS_BYTES = 8  # a number in float32 beside each key and KV head, read and written


def retention_of(policy: Policy, prompt_len: int, layers: int, block_size: int) -> RetentionPlan:
    """What is kept of a prompt; where only its scores say, the budget in every layer.

    Args:
        block_size: tokens of a block that holds K and V.
    """
    largest = int(policy.block_sizes(layers, block_size).max())
    plan = policy.plan(prompt_len, layers, largest)
    return plan.even() if isinstance(plan, OpenPlan) else plan


def policy_demand(
    shape: Shape, policy: Policy, prompt_len: int, output_len: int, block_size: int
) -> Demand:
    """A request with so many tokens under a policy with its own budget.

    Args:
        output_len: at least 2, since the first token is the prefill's. block_size: tokens of a
            block that holds K and V.
    """
    assert output_len >= 2, output_len
    plan = retention_of(policy, prompt_len, shape.layers, block_size)
    sizes = policy.block_sizes(shape.layers, block_size)
    block_bytes = block_size * shape.token_bytes
    step_bytes, step_ops = _attention(shape, policy, plan, output_len)
    return Demand(
        prompt_len,
        output_len,
        _prefill(shape, policy, plan),
        step_bytes,
        step_ops,
        prompt_cache=int((-(-prompt_len // sizes)).sum()) * block_bytes,
        decode_cache=_most_blocks(plan, sizes, output_len) * block_bytes,
    )


def _attention(
    shape: Shape, policy: Policy, plan: RetentionPlan, output_len: int
) -> tuple[float, float]:
    """Bytes and operations of attention in a decode step: sums over L, means over J."""
    # The token that goes in has a place behind those computed before it.
    computed = plan.prompt_len + np.arange(output_len - 1)
    numbers = np.array([plan.evictions_by(tokens) for tokens in computed.tolist()])
    skips = np.stack([plan.skip_after(number) for number in numbers.tolist()]).astype(np.int64)
    visible = computed[:, None] + 1 - skips  # [J, L]
    row = shape.head_size * shape.element_bytes
    keys = visible * (shape.kv_heads * row)
    rows, weighed = visible * shape.kv_heads, visible  # of V
    if policy.swap_v:
        chooses = (np.arange(shape.layers) >= policy.device_layers) & (visible > policy.top_n)
        # Heads that share a KV head choose for themselves; never more than there are.
        chosen = np.minimum(policy.top_n * shape.heads, rows)
        rows, weighed = np.where(chooses, chosen, rows), np.where(chooses, policy.top_n, visible)
    num_bytes, products = keys + rows * row, visible + weighed
    gathers = _gathers(policy, plan, computed, numbers)[:, None]
    # One pass over K; a second one, where attention leaves no log-sum-exp, is not counted.
    num_bytes = num_bytes + gathers * (keys + visible * (shape.kv_heads * _MASS_BYTES))
    products = products + gathers * visible
    width = 2 * shape.heads * shape.head_size
    return float(num_bytes.sum(axis=1).mean()), width * float(products.sum(axis=1).mean())


def _gathers(
    policy: Policy, plan: RetentionPlan, computed: Integers, numbers: Integers
) -> npt.NDArray[np.bool_]:
    """In which decode steps what their query gives the keys is gathered: `[J]`."""
    scorer = policy.gatherer
    if scorer is None or not plan.every:
        return np.zeros(len(computed), np.bool_)
    if scorer.history is None:
        return np.ones(len(computed), np.bool_)
    looks: npt.NDArray[np.bool_] = (
        computed >= plan.prompt_len + numbers * plan.every - scorer.history
    )
    return looks


def _prefill(shape: Shape, policy: Policy, plan: RetentionPlan) -> float:
    """Operations; those of observation windows and of moving survivors are left out."""
    width, tokens = 2 * shape.heads * shape.head_size, plan.prompt_len
    if not plan.pieces:
        ops = prefill_ops(shape, tokens)
        scorer = policy.gatherer
        if scorer is not None and policy.thinner is None and plan.evicts:
            queries = tokens if scorer.history is None else min(scorer.history, tokens)
            pairs = queries * tokens - queries**2 / 2
            ops += width * shape.layers * pairs
        return ops
    total = 0.0
    for piece in plan.pieces:
        enters = piece.enters.astype(np.float64)
        seen = piece.before * enters + enters**2 / 2  # (query, key) pairs
        # Layers that thin look again from the recent tokens, at the context.
        thins = piece.held < piece.enters
        looks = piece.recent * (enters - piece.recent)
        total += 2 * shape.layer_parameters * float(enters.sum())
        total += width * float((2 * seen + thins * looks).sum())
    return total


def _most_blocks(plan: RetentionPlan, sizes: npt.NDArray[np.int32], output_len: int) -> int:
    """The most blocks, of all layers together, that a request holds behind its prompt's end.

    That is before one of its evictions, or at its end: the last token gets no place any more.
    """
    end = plan.prompt_len + output_len - 1
    most = 0
    for number in range(1, plan.evictions_by(end) + 1):
        following = plan.computed_at(number + 1) if plan.every else end
        held = -(-min(following, end) // sizes) - plan.skip_after(number) // sizes
        most = max(most, int(held.sum()))
    return most
