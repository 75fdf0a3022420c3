# SPDX-License-Identifier: Apache-2.0
"""What a policy makes of the KV cache's memory, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_pyramid.policy import load_policy, policy_names
from vllm_pyramid.tools.bench.memory import PolicyMemory
from vllm_pyramid.tools.bench.shapes import Shape

TINY = Shape(layers=2, hidden=8, mlp=16, heads=4, kv_heads=2, head_size=2, vocabulary=100)


def memory(name: str, budget: int | str | None = None, **args: Any) -> PolicyMemory:
    return PolicyMemory(TINY, load_policy(name, budget, args))


def test_a_whole_request_has_to_fit() -> None:
    """Blocks of 16 tokens, and of 32 where V lies in host memory."""
    assert memory("full").most_blocks(160, 9) == 2 * 11
    assert memory("snapkv", 64).most_blocks(160, 9) == 2 * 11
    assert memory("kcache", top_n=8).most_blocks(160, 9) == 11 + 6


def test_evictions_inside_the_prompt_bound_what_is_held() -> None:
    """Points every 16 tokens keep 16: the length of the prompt does not count."""
    args = {"chunk.tokens": 16, "chunk.keep": 16, "window": 4}
    chunked = memory("snapkv", 16, **args)
    assert 2 * 2 <= chunked.most_blocks(10**5, 9) <= 2 * 4


def test_heads_with_lengths_of_their_own_have_a_budget_or_a_mask() -> None:
    """Blocks of 32 tokens of one head, four lanes of them."""
    adaptive = memory("adakv", 128)
    assert adaptive.most_blocks(160, 9) == 4 * 6
    adaptive.check_budget("adakv", 129)
    with pytest.raises(ValueError, match="adakv keeps all of a prompt of 128 tokens"):
        adaptive.check_budget("adakv", 128)
    memory("duoattention").check_budget("duoattention", 384 + 32)
    with pytest.raises(ValueError, match="duoattention keeps all of a prompt of 415 tokens"):
        memory("duoattention").check_budget("duoattention", 415)
    # At 3,200 tokens two lanes hold all, and two what they held at 2,880, with 320 more tokens;
    # a block more where those of another prompt begin elsewhere.
    chunked = memory("duoattention", **{"chunk.tokens": 320})
    assert chunked.most_blocks(3200, 9) == 2 * 100 + 2 * (100 - (2880 - 384) // 32 + 1)


def test_what_is_accumulated_is_of_each_token_and_head() -> None:
    assert memory("h2o", 32).bytes_beside_block == 4 * 16 * 2
    assert memory("snapkv", 32).bytes_beside_block == 0
    # A summary is as large as two keys.
    assert PolicyMemory(TINY, load_policy("select")).bytes_beside_block == 16


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_says_what_it_needs(name: str) -> None:
    policy = load_policy(name)
    made = PolicyMemory(TINY, policy)
    assert 0 < made.most_blocks(2048, 64) <= 2 * (2048 + 64) // 16
    assert made.v_on_host == policy.values.uses_swap_space
