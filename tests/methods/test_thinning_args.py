# SPDX-License-Identifier: Apache-2.0
"""Room in a step for a piece of a prompt beside requests that decode."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_pyramid.demo import model_path
from vllm_pyramid.policy import load_policy

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("piece_tokens", "given", "tokens"),
    [
        (2048, {}, 4096),
        (8192, {}, 8192 + 256),
        (8192, {"max_num_seqs": 32}, 8192 + 32),
        (2048, {"max_num_batched_tokens": 2048}, 2048),
        (2048, {"enable_chunked_prefill": False}, None),  # vLLM takes the longest prompt
    ],
    ids=str,
)
def test_a_piece_finds_room(piece_tokens: int, given: dict[str, Any], tokens: int | None) -> None:
    args = EngineArgs(model=str(model_path()), **given)
    policy = load_policy("pyramidinfer", None, {"piece_tokens": piece_tokens})
    policy.allocator.prepare_args(policy, args)
    assert args.max_num_batched_tokens == tokens
