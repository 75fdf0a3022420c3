# SPDX-License-Identifier: Apache-2.0
"""What a policy makes of the KV cache's memory: the blocks that a request holds by its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy import Policy
from vllm_pyramid.policy.planning import peak_blocks_up_to
from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE, Shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Layer:
    """A layer of a shape as a part of a policy sees it (`LayerSpec`)."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    page_size_bytes: int
    block_size: int = BLOCK_SIZE
    layer_idx: int = 0

    @classmethod
    def of(cls, shape: Shape) -> Self:
        import torch  # the command does without it

        of_bytes = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
        dtype = of_bytes[shape.token_bytes // (2 * shape.kv_heads * shape.head_size)]
        return cls(shape.kv_heads, shape.head_size, dtype, shape.block_bytes)


class PolicyMemory:
    """A policy with its budget, for models of one shape."""

    def __init__(self, shape: Shape, policy: Policy) -> None:
        self.shape = shape
        self.policy = policy

    @property
    def v_on_host(self) -> bool:
        """Whether V of some layers lies in host memory."""
        return self.policy.values.uses_swap_space

    @property
    def bytes_beside_block(self) -> int:
        """Bytes beside each block of a layer: accumulated numbers, or what a part keeps."""
        inside = self.policy.inner_policy
        gathers = self.policy.scorer.gathers(self.policy) or (
            inside is not None and inside.scorer.gathers(inside)
        )
        of_methods = self.policy.extra_bytes(_Layer.of(self.shape))
        return of_methods + (4 * BLOCK_SIZE * self.shape.kv_heads if gathers else 0)

    @cached_property
    def _block_sizes(self) -> npt.NDArray[np.int32]:
        """`[layers]` tokens of a block; of all KV heads, where these have tables of their own."""
        return self.policy.block_sizes(self.shape.layers * self._lanes, BLOCK_SIZE * self._lanes)

    @property
    def _lanes(self) -> int:
        return self.policy.heads.lanes(self.shape.kv_heads)

    def most_blocks(self, prompt_len: int, output_len: int) -> int:
        """Return the blocks that the pool must have for such a request, summed over the layers.

        Without evictions inside the prompt vLLM checks that all of its tokens fit.
        """
        if self.policy.inner_policy is None:
            return int((-(-(prompt_len + output_len) // self._block_sizes)).sum())
        lanes, block_size = self.shape.layers * self._lanes, BLOCK_SIZE * self._lanes
        inside = peak_blocks_up_to(self.policy, prompt_len, lanes, block_size)
        return max(int(inside.sum()), self._most_after(self._plan(prompt_len), output_len))

    def _most_after(self, plan: RetentionPlan, output_len: int) -> int:
        """Return the most blocks of all layers before a later eviction, or at the end."""
        end, sizes = plan.prompt_len + output_len - 1, self._block_sizes
        most = 0
        for number in range(plan.end_number, plan.evictions_by(end) + 1):
            following = plan.computed_at(number + 1) if plan.every else end
            held = -(-min(following, end) // sizes) - plan.skip_after(number) // sizes
            most = max(most, int(held.sum()))
        return most

    def check_budget(self, label: str, prompt_len: int) -> None:
        """Raise ValueError unless the policy evicts from such a prompt and keeps to its budget."""
        policy, layers = self.policy, len(self._block_sizes)
        if policy.heads.has_budget and not policy.allocator.thins_prompts:
            if policy.budget.tokens_for(prompt_len, 1) >= prompt_len:
                raise ValueError(
                    f"--budget: {label} keeps all of a prompt of {prompt_len} tokens: give a "
                    "smaller one, or the policy 'full'"
                )
            return
        # Lengths follow from the policy's own shares. The budget is an upper limit, also 100%.
        plan = self._plan(prompt_len)
        kept = int(plan.end.keep.sum()) / (prompt_len * layers)
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
        """Return what is kept of a prompt; lengths that only scores decide are the budget's."""
        largest = int(self._block_sizes.max())
        return self.policy.plan(prompt_len, len(self._block_sizes), largest).estimate()
