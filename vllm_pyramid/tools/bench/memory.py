# SPDX-License-Identifier: Apache-2.0
"""What a policy makes of a request's memory and work. The one file of the bench that knows policies
from the inside.

Everything follows from lengths, by the policy's own plan. With V in host memory only K of a token
has a slot in the GPU blocks. With eviction during generation the number of held tokens goes up and
down. With pieces, deeper layers compute fewer tokens. With gathered attention, keys are read again.

Shapes in this file: L layers, J decode steps of a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import Eviction, RetentionPlan
from vllm_pyramid.policy import Policy
from vllm_pyramid.tools.bench.cost import RequestNeeds, prefill_ops
from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE, Shape

Integers = npt.NDArray[np.int64]
_MASS_BYTES = 8  # a float32 beside each key and KV head, read and written


def tokens_until_eviction(scheduler: Any, request: Any) -> int | None:
    """At most so many further tokens until a running request evicts; None if it does not."""
    coordinator = getattr(scheduler, "coordinator", None)
    plan = coordinator and coordinator.plans.confirmed(request.request_id)
    return plan.every if plan is not None and plan.every else None


def evictions_counted(scheduler: Any) -> int:
    """Evictions since the start of a scheduler; 0 without a policy."""
    coordinator = getattr(scheduler, "coordinator", None)
    return 0 if coordinator is None else int(coordinator.counters.num_evictions)


def evictions_to_report(scheduler: Any, names: Iterable[str]) -> dict[str, Eviction]:
    """What a worker reports to our scheduler: the evictions that requests come to in this step."""
    coordinator, found = scheduler.coordinator, {}
    for name in names:
        plan, before = coordinator.plans.of(name), coordinator.plans.confirmed_number(name)
        number = plan.evictions_by(scheduler.requests[name].num_computed_tokens)
        if plan.evicts and number > before:
            tokens = int((plan.skip_after(number) - plan.skip_after(before)).sum())
            found[name] = Eviction(tokens, number=number)
    return found


class PolicyMemory:
    """A policy with its budget, for models of one shape."""

    def __init__(self, shape: Shape, policy: Policy) -> None:
        self.shape = shape
        self.policy = policy

    @property
    def evicts(self) -> bool:
        """Whether it ever evicts, so that a budget means something."""
        return self.policy.evicts

    @property
    def definition(self) -> str:
        """All of the policy's settings."""
        return self.policy.model_dump_json()

    @property
    def v_on_host(self) -> bool:
        """Whether V of some layers lies in host memory."""
        return self.policy.values.uses_swap_space

    @property
    def bytes_beside_block(self) -> int:
        """Bytes beside each block of a layer, for numbers that the policy gathers of its tokens."""
        return 4 * BLOCK_SIZE * self.shape.kv_heads if self._gathering else 0

    @cached_property
    def _gathering(self) -> bool:
        """Whether what queries give keys is gathered beside the cache."""
        inside = self.policy.inside
        return self.policy.scorer.gathers(self.policy) or (
            inside is not None and inside.scorer.gathers(inside)
        )

    @cached_property
    def _block_sizes(self) -> npt.NDArray[np.int32]:
        """`[L]` tokens of a block."""
        return self.policy.block_sizes(self.shape.layers, BLOCK_SIZE)

    def whole_request_blocks(self, tokens: int) -> int:
        """Blocks of a request of so many tokens, all layers together, before any eviction."""
        return int((-(-tokens // self._block_sizes)).sum())

    def most_blocks(self, prompt_len: int, output_len: int) -> int:
        """Blocks that the pool must have for such a request.

        Without evictions inside the prompt vLLM checks that all of its tokens fit.
        """
        if self.policy.inside is None:
            return self.whole_request_blocks(prompt_len + output_len)
        return max(
            int(self.policy.most_blocks(prompt_len, self.shape.layers, BLOCK_SIZE).sum()),
            self._most_blocks(self._plan(prompt_len), output_len),
        )

    def check_budget(self, label: str, prompt_len: int) -> None:
        """Check that the policy evicts from such a prompt, and can keep to its budget.

        Raises:
            ValueError: it does not, or cannot.
        """
        policy, layers = self.policy, self.shape.layers
        if not policy.allocator.thins_prompts:
            check_budget_evicts(policy.budget.tokens_for(prompt_len, 1), label, prompt_len)
            return
        # Lengths follow from the policy's own shares. The budget is an upper limit, also 100%.
        plan = self._plan(prompt_len)
        kept = int(plan.keep.sum()) / (prompt_len * layers)
        if not plan.evicts:
            raise ValueError(
                f"{label} keeps all of a prompt of {prompt_len} tokens: give a longer --prompt-len"
            )
        assert policy.budget.percent is not None  # such policies take no number of tokens
        if 100 * kept > policy.budget.percent:
            raise ValueError(
                f"{label} is out of reach: the policy keeps at least {kept:.1%} of a prompt of "
                f"{prompt_len} tokens in {layers} layers; give more, or 100% for its own lengths"
            )

    def _plan(self, prompt_len: int) -> RetentionPlan:
        """What is kept of a prompt. Where only its scores say, the budget in every layer."""
        largest = int(self._block_sizes.max())
        return self.policy.plan(prompt_len, self.shape.layers, largest).estimate()

    def needs(self, prompt_len: int, output_len: int) -> RequestNeeds:
        """What a request needs. `output_len` is at least 2: prefill gives the first token."""
        assert output_len >= 2, output_len
        plan = self._plan(prompt_len)
        step_bytes, step_ops = self._attention(plan, output_len)
        block_bytes = self.shape.block_bytes
        return RequestNeeds(
            prompt_len,
            output_len,
            self._prefill(plan),
            step_bytes,
            step_ops,
            prompt_cache=self._peak(plan) * block_bytes,
            decode_cache=self._most_blocks(plan, output_len) * block_bytes,
        )

    def _peak(self, plan: RetentionPlan) -> int:
        """Blocks that are held at most while the prompt is processed, all layers together."""
        return int(plan.most_blocks(plan.prompt_len, self._block_sizes).sum())

    def _attention(self, plan: RetentionPlan, output_len: int) -> tuple[float, float]:
        """Bytes and operations of attention in a decode step: sums over L, means over J."""
        shape, policy = self.shape, self.policy
        # The token that goes in has a slot after those computed before it.
        computed = plan.prompt_len + np.arange(output_len - 1)
        numbers = np.array([plan.evictions_by(tokens) for tokens in computed.tolist()])
        skips = np.stack([plan.skip_after(number) for number in numbers.tolist()]).astype(np.int64)
        visible = computed[:, None] + 1 - skips  # [J, L]
        row = shape.cache_row_bytes
        keys = visible * (shape.kv_heads * row)
        rows, weighed = visible * shape.kv_heads, visible  # of V
        limits = [policy.values.most_rows(layer) for layer in range(shape.layers)]
        if any(limit is not None for limit in limits):
            most = np.array([np.iinfo(np.int32).max if n is None else n for n in limits], np.int64)
            chooses = visible > most
            # Query heads of one KV head choose for themselves; never more rows than there are.
            rows = np.where(chooses, np.minimum(most * shape.heads, rows), rows)
            weighed = np.where(chooses, most, visible)
        gathers = self._gathers(plan, computed, numbers)[:, None]
        # Gathering takes one pass more over K. (The model leaves out CUDA's second one.)
        mass = keys + visible * (shape.kv_heads * _MASS_BYTES)
        num_bytes = keys + rows * row + gathers * mass
        products = visible + weighed + gathers * visible
        width = 2 * shape.heads * shape.head_size
        return float(num_bytes.sum(axis=1).mean()), width * float(products.sum(axis=1).mean())

    def _gathers(
        self, plan: RetentionPlan, computed: Integers, numbers: Integers
    ) -> npt.NDArray[np.bool_]:
        """`[J]`: the decode steps in which the attention of their query is gathered."""
        scorer = self.policy.scorer
        if not self._gathering or not plan.every:
            return np.zeros(len(computed), np.bool_)
        if scorer.history is None:
            return np.ones(len(computed), np.bool_)
        later = numbers - plan.end_number + 1
        first = plan.prompt_len + later * plan.every - scorer.history
        return np.asarray(computed >= first)

    def _prefill(self, plan: RetentionPlan) -> float:
        """Operations, without those of observation windows and of moving what is kept."""
        shape, scorer = self.shape, self.policy.scorer
        width, tokens = 2 * shape.heads * shape.head_size, plan.prompt_len
        if plan.inner:
            start, kept_lens, total = 0, np.zeros(shape.layers), 0.0
            for stretch in (*plan.inner, plan):
                new = stretch.prompt_len - start
                total += 2 * shape.layer_parameters * shape.layers * new
                total += 2 * width * float((kept_lens * new + new**2 / 2).sum())
                start, kept_lens = stretch.prompt_len, stretch.held.astype(np.float64)
            return total
        if not plan.pieces:
            ops = prefill_ops(shape, tokens)
            thins = self.policy.allocator.thins_prompts
            if self._gathering and not thins and plan.evicts:
                queries = tokens if scorer.history is None else min(scorer.history, tokens)
                ops += width * shape.layers * (queries * tokens - queries**2 / 2)
            return ops
        total = 0.0
        for piece in plan.pieces:
            enters = piece.enters.astype(np.float64)
            seen = piece.before * enters + enters**2 / 2  # (query, key) pairs
            # In layers that thin, the recent tokens' queries are multiplied with the context again.
            again = (piece.held < piece.enters) * piece.recent * (enters - piece.recent)
            total += 2 * shape.layer_parameters * float(enters.sum())
            total += width * float((2 * seen + again).sum())
        return total

    def _most_blocks(self, plan: RetentionPlan, output_len: int) -> int:
        """The most blocks after the prompt, all layers together.

        They are held before one of the later evictions, or at the end. The last token gets no slot.
        """
        end, sizes = plan.prompt_len + output_len - 1, self._block_sizes
        most = 0
        for number in range(plan.end_number, plan.evictions_by(end) + 1):
            following = plan.computed_at(number + 1) if plan.every else end
            held = -(-min(following, end) // sizes) - plan.skip_after(number) // sizes
            most = max(most, int(held.sum()))
        return most


def check_budget_evicts(budget_tokens: int, label: str, prompt_len: int) -> None:
    """Check that a budget is smaller than the prompt.

    Raises:
        ValueError: it is not.
    """
    if budget_tokens >= prompt_len:
        raise ValueError(
            f"--budget: {label} keeps all of a prompt of {prompt_len} tokens: give a smaller one, "
            "or the policy 'full'"
        )
