# SPDX-License-Identifier: Apache-2.0
"""Streaming heads: masks, what each head keeps, how many requests fit, and what is refused."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.kv_cache.head_layout import HeadKVCacheSpec
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec
from vllm_pyramid.methods.kvpress_presses import _import
from vllm_pyramid.methods.streaming_heads import StreamingHeads
from vllm_pyramid.methods.streaming_heads.score_files import CONFIG, SCORES
from vllm_pyramid.plan import RetentionPlan, peak_blocks
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.planning import peak_blocks_up_to
from vllm_pyramid.policy.request import check_request

LAYERS, HEADS, BLOCK = 32, 8, 16  # Llama-3.1-8B's, and vLLM's block
MASK = [[0.9, 0.1], [0.4, 0.8], [0.2, 0.3]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.savetxt(tmp_path / SCORES, np.array(MASK), delimiter="\t")
    (tmp_path / CONFIG).write_text(json.dumps({"sink_size": 4, "recent_size": 12}))
    return tmp_path


def streaming(**args: Any) -> Policy:
    return load_policy("duoattention", None, {f"heads.{key}": value for key, value in args.items()})


def kept_tokens(policy: Policy) -> tuple[int, int]:
    assert isinstance(policy.heads, StreamingHeads)
    return policy.heads.kept_tokens


def plan_of(policy: Policy, prompt_len: int, lanes: int, block_size: int) -> RetentionPlan:
    plan = policy.plan(prompt_len, lanes, block_size)
    assert isinstance(plan, RetentionPlan)
    return plan


# Masks --------------------------------------------------------------------------------------------


def test_a_folder_is_read_once_and_travels_as_numbers(folder: Path) -> None:
    policy = load_policy("duoattention", None, {"mask": str(folder)})
    heads = policy.heads
    assert isinstance(heads, StreamingHeads)
    assert heads.mask == tuple(map(tuple, MASK)) and heads.kept_tokens == (4, 12)
    for path in folder.iterdir():
        path.unlink()
    assert Policy.model_validate(json.loads(json.dumps(policy.as_data()))) == policy
    assert kept_tokens(streaming(mask=MASK)) == (128, 256)


def test_a_mask_of_query_heads_counts_the_best_of_a_kv_head(tmp_path: Path) -> None:
    """HeadKV's file, of a model with 3 layers of 4 query heads and 2 KV heads."""
    numbers = np.repeat(MASK, 2, axis=1)
    numbers[:, ::2] -= 0.35  # the second of each pair is the best
    names = {f"{x}-{y}": [z - 1, z + 1] for (x, y), z in np.ndenumerate(numbers)}
    (tmp_path / "heads.json").write_text(json.dumps(names))
    policy = load_policy("duoattention", None, {"mask": str(tmp_path / "heads.json")})
    heads, same = policy.heads, streaming(mask=MASK).heads
    assert isinstance(heads, StreamingHeads) and isinstance(same, StreamingHeads)
    assert heads.keeps_everything(6).tolist() == same.keeps_everything(6).tolist()
    assert heads.kept_tokens == (128, 256)
    assert Policy.model_validate(json.loads(json.dumps(policy.as_data()))) == policy
    heads.check_shape(3, 2, 4)
    heads.check_shape(3, 2)
    for shape in ((3, 2, 8), (2, 2, 4), (3, 3, None)):
        with pytest.raises(ValueError, match="is for 3 layers of 4 heads, and this model"):
            heads.check_shape(*shape)


# Plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill_blocks", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 40, 47, 48, 1003])
def test_what_each_head_keeps(prompt_len: int, fill_blocks: bool) -> None:
    args = {"heads.mask": MASK, "heads.sinks": 4, "heads.recent": 12, "fill_blocks": fill_blocks}
    end = plan_of(load_policy("duoattention", None, args), prompt_len, 6, 32).end
    short = min(prompt_len, 16)
    assert end.keep.tolist() == [prompt_len, short, prompt_len, prompt_len, short, short]
    freed = prompt_len - short
    assert end.skip.max() == (freed // 32 * 32 if fill_blocks else freed)
    assert (end.skip[[0, 2, 3]] == 0).all()
    assert (end.front == 4).all() and (end.recent == 12).all()
    assert end.budget_tokens == -(-int(end.keep.sum()) // 6)


@pytest.mark.parametrize("prompt_len", [4004, 4005, 20_000, 20_004, 20_010, 60_000])
def test_razor_attention_keeps_a_fifth_of_long_prompts(prompt_len: int) -> None:
    """Section 4.1: S0 sinks, and the larger of 4,000 tokens and a fifth of the prompt."""
    policy = load_policy("razorattention", None, {"heads.mask": MASK, "fill_blocks": False})
    end = plan_of(policy, prompt_len, 6, 32).end
    short = min(prompt_len, 4 + max(4000, prompt_len // 5))
    # 15 % of 6 heads are 1, the one with the highest score.
    assert end.keep.tolist() == [prompt_len] + [short] * 5
    assert (end.front == 4).all() and (end.recent == max(4000, prompt_len // 5)).all()
    longer = load_policy("razorattention", None, {"heads.mask": MASK, "recent_share": 0.5})
    kept = plan_of(longer, 40_000, 6, 1).end.keep
    assert kept.tolist() == [40_000] + [20_004] * 5


@settings(max_examples=300)
@given(
    prompt_len=st.integers(1, 600),
    longest=st.integers(0, 200),
    tokens=st.integers(2, 90),
    fill_blocks=st.booleans(),
)
def test_what_each_head_keeps_inside_the_prompt(prompt_len, longest, tokens, fill_blocks) -> None:
    args = {"heads.mask": MASK, "heads.sinks": 4, "heads.recent": 12, "fill_blocks": fill_blocks}
    policy = load_policy("duoattention", None, {**args, "chunk.tokens": tokens})
    plan, dense = plan_of(policy, prompt_len, 6, 8), load_policy("duoattention", None, args)
    end = plan_of(dense, prompt_len, 6, 8).end
    assert (plan.end.skip == end.skip).all() and (plan.end.keep == end.keep).all()
    points = [p for p in range(tokens, prompt_len - 1, tokens) if p - 16 >= 8]
    assert [point.computed for point in plan.inner] == (points if plan.evicts else [])
    for point in plan.inner:
        assert (point.skip[[0, 2, 3]] == 0).all(), "heads that keep everything"
        assert (point.skip[[1, 4, 5]] == (point.computed - 16) // 8 * 8).all()
        assert (point.front == 4).all() and (point.recent == 12).all()
    if plan.inner:
        assert plan.untouched == plan.inner[0].skip[1]
    sizes = np.full(6, 8)
    most = peak_blocks_up_to(policy, prompt_len + longest, 6, 8)
    assert peak_blocks(plan, prompt_len, sizes).sum() <= most.sum()
    assert (most <= -(-(prompt_len + longest) // 8)).all()


def test_a_block_of_a_head_has_the_bytes_of_one_of_all_heads() -> None:
    layer = LayerKVCacheSpec(
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_size=128,
        dtype=torch.bfloat16,
        layer_idx=0,
        num_layers=1,
        model_layer=0,
    )
    spec = HeadKVCacheSpec.of(layer)
    assert spec.page_size_bytes == layer.page_size_bytes
    assert (spec.block_size, spec.num_kv_heads, spec.tables_per_layer) == (128, 1, 8)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        additional_config={},
    )
    assert spec.max_num_blocks_per_req(config, 1000) == 8 * 8
    assert spec.max_memory_usage_bytes(config) == 8 * 8 * spec.page_size_bytes


# Ranks --------------------------------------------------------------------------------------------


# Of 3 layers with 4 KV heads; of two ranks lane 0 has heads 0 and 2.
WIDE = [[0.9, 0.1, 0.8, 0.2], [0.7, 0.0, 0.3, 0.1], [0.2, 0.6, 0.5, 0.1]]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, [1, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0]), (2, [1, 0, 1, 0, 1, 1]), (4, [1, 1, 1])],
)
def test_a_lane_keeps_everything_if_a_head_of_some_rank_does(ranks, expected, caplog) -> None:
    policy = streaming(mask=WIDE, share=5 / 12)
    if ranks == 4:
        with pytest.raises(ValueError, match=r"lets 58% .* with 4 tensor-parallel ranks none"):
            policy.heads.on_ranks(policy, ranks, 4)
        return
    with caplog.at_level("INFO", "vllm.vllm_pyramid"):
        heads = policy.heads.on_ranks(policy, ranks, 4)
    served = policy.model_copy(update={"heads": heads.model_dump()})
    served = Policy.model_validate(json.loads(json.dumps(served.as_data())))
    assert served.heads.keeps_everything(12 // ranks).tolist() == [bool(one) for one in expected]
    plan = plan_of(served, 1000, 12 // ranks, 64)
    assert ((plan.end.keep == 1000) == np.array(expected, bool)).all()
    logged = "33 % of the KV heads stream instead of the mask's 58 %" in caplog.text
    assert logged == (ranks == 2)
    query_heads = streaming(mask=np.repeat(WIDE, 2, axis=1).tolist(), share=5 / 12)
    same = query_heads.heads.on_ranks(query_heads, ranks, 4)
    assert same.keeps_everything(12 // ranks).tolist() == [bool(one) for one in expected]


def test_ranks_are_the_engines() -> None:
    policy = streaming(mask=WIDE, ranks=2)
    with pytest.raises(ValueError, match="leave it out, the engine sets it"):
        policy.heads.on_ranks(policy, 1, 4)
    everything = streaming(mask=WIDE, share=1.0)
    everything.heads.on_ranks(everything, 4, 4)  # nothing was to stream


# kvpress ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [200, 384, 385, 1000])
def test_the_same_tokens_as_duo_attention_press(prompt_len: int) -> None:
    try:
        importlib.metadata.distribution("kvpress")
        press = _import("duo_attention_press").DuoAttentionPress(head_compression_ratio=0.5)
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        pytest.skip(f"`make smollm2` installs kvpress: {error}")
    policy = load_policy("duoattention", None, {"heads.mask": MASK, "fill_blocks": False})
    end = plan_of(policy, prompt_len, 6, 32).end
    press.sink_size, press.recent_size = kept_tokens(policy)
    order = np.argsort(np.array(MASK), axis=None)[:3]  # as `post_init_from_model` does
    press.streaming_mask = torch.zeros(3, 2, dtype=torch.bool)
    press.streaming_mask.view(-1)[torch.from_numpy(order)] = True
    config = SimpleNamespace(_attn_implementation="sdpa")
    for layer in range(3):
        module = SimpleNamespace(config=config, layer_idx=layer)
        keys = torch.zeros(1, 2, prompt_len, 4)
        press.compress(module, None, keys, keys, None, {})
        masked = torch.zeros(2, prompt_len, dtype=torch.bool)
        masked[module.masked_key_indices[1:]] = True
        for head in range(2):
            keep = int(end.keep[2 * layer + head])
            kept = torch.ones(prompt_len, dtype=torch.bool)
            if keep < prompt_len:
                kept[128 : prompt_len - 256] = False
            assert int(kept.sum()) == keep
            assert torch.equal(kept, ~masked[head])


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"scorer": "keydiff"}, "go with scorer 'recency' alone"),
        ({"chunk.tokens": 64, "chunk.keep": 80}, "of chunk, set tokens alone"),
        ({"window": 8}, "leave sinks and window out"),
        ({"heads.mask": [[1.0], [0.5, 0.5]]}, "equally many numbers for each layer"),
        ({"heads.mask": "/nowhere"}, "cannot read the scores of heads in /nowhere"),
    ],
)
def test_policies_that_cannot_have_streaming_heads(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy("duoattention", None, args)


def test_no_budget_and_no_floor() -> None:
    with pytest.raises(ValueError, match="so a budget of 25% has no effect"):
        load_policy("duoattention", "25%")
    with pytest.raises(ValueError, match=r"kv_min_tokens .* gives each KV head a length"):
        KVSettings("duoattention", kv_min_tokens=100)
    policy = KVSettings("duoattention").policy()
    assert policy is not None and policy.min_tokens is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_budget": 100}, "a budget of 100 has no effect"),
        ({"kv_min_tokens": 100}, "kv_min_tokens has no effect"),
    ],
)
def test_requests_that_want_what_heads_cannot_give(extra: dict[str, Any], message: str) -> None:
    policy = streaming(mask=MASK)
    with pytest.raises(ValueError, match=message):
        check_request(policy, SamplingParams(extra_args=extra))
    full = check_request(policy, SamplingParams(extra_args={"kv_policy": "full"}))
    assert not full.policy.evicts


def test_a_server_needs_a_mask_of_its_model() -> None:
    unknown, args = streaming(), cast(EngineArgs, SimpleNamespace())
    with pytest.raises(ValueError, match="does not know which heads stream"):
        unknown.heads.prepare_args(unknown, args)
    for policy in (streaming(mask=MASK), streaming(share=1.0), streaming(share=0.0)):
        policy.heads.prepare_args(policy, args)
    with pytest.raises(ValueError, match="3 layers of 2 heads, and this model has 2 of 3 KV"):
        streaming(mask=MASK).heads.check_shape(2, 3)
    with pytest.raises(ValueError, match="there are 8 KV heads"):
        streaming(mask=MASK).plan(100, 8, 16)
