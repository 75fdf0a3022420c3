# SPDX-License-Identifier: Apache-2.0
"""Room in a step for a piece of a prompt beside requests that decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_pyramid.methods.thinning import engine
from vllm_pyramid.policy import load_policy
from vllm_pyramid.tools.demo import model_path


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


@pytest.mark.parametrize(
    ("piece_tokens", "tokens"), [(2048, 8192), (8000, 8000 + 1024), (16, 8192), (15, None)]
)
def test_a_gpu_has_larger_steps_and_prompts_to_warm_up(monkeypatch, piece_tokens, tokens) -> None:
    monkeypatch.setattr(engine, "current_platform", SimpleNamespace(device_type="cuda"))
    args = EngineArgs(model=str(model_path()))
    policy = load_policy("pyramidinfer", None, {"piece_tokens": piece_tokens})
    if tokens is None:
        with pytest.raises(ValueError, match=r"piece_tokens 15, and .* prompts of 16 tokens"):
            policy.allocator.prepare_args(policy, args)
    else:
        policy.allocator.prepare_args(policy, args)
        assert args.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("batched", "places", "fits"), [(128, 0, True), (128, 1, False), (129, 1, True)]
)
def test_places_for_drafts_count_against_a_piece(batched: int, places: int, fits: bool) -> None:
    """vLLM takes them out of each step, so a piece as large as the step would wait for ever."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            architecture="LlamaForCausalLM", max_model_len=2048, get_num_layers=lambda parallel: 4
        ),
        parallel_config=None,
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=batched,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
            max_num_seqs=1,
        ),
        speculative_config=SimpleNamespace(max_num_new_slots_for_drafting=places),
    )
    policy = load_policy("pyramidinfer", "100%", {"piece_tokens": 128})
    if fits:
        policy.allocator.check_config(policy, config)
    else:
        with pytest.raises(ValueError, match=r"batched-tokens 128 is too small .* room for 127 of"):
            policy.allocator.check_config(policy, config)
