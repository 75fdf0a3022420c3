# SPDX-License-Identifier: Apache-2.0
"""KV heads with lengths of their own: the bits of `full` where all keep everything, and masks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.heads.__main__ import main
from lab.heads.scores import HeadScores
from tests.engine.conversations import Rows
from tests.engine.paper import HuggingFaceModel
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Outcome,
    Start,
    assert_same_tokens,
    greedy,
    kept_at_evictions,
    random_prompts,
)
from vllm_pyramid.policy.policy import TRACE_WINDOW
from vllm_pyramid.step.trace_files import read_kept

LAYERS, HEADS, LANE_BLOCK = 8, 4, 64  # of `random_model`, with blocks of 16 tokens
SINKS, RECENT = 16, 40
MAX_TOKENS = 12
# Prompts come in chunks, mixed with decode steps of others.
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "dtype": "float32",
    "block_size": 16,
}
# From one token over edges of blocks and chunks to several chunks.
LENGTHS = [1, 56, 57, 64, 65, 257, 512, 700]
MASK = np.random.default_rng(5).random((LAYERS, HEADS)).tolist()
ARGS = {"mask": MASK, "heads.sinks": SINKS, "heads.recent": RECENT, "share": 0.5}


def jobs(**extra_args: Any) -> list[Job]:
    prompts = random_prompts(LENGTHS, seed=7, vocab_size=2048)
    params = greedy(MAX_TOKENS, logprobs=3, **extra_args)
    return [Job(prompt, params, arrival=index) for index, prompt in enumerate(prompts)]


def kept_positions(prompt_len: int, whole: np.ndarray) -> list[torch.Tensor]:
    """What each head keeps of a prompt, `[layers]` `[G, prompt_len]`, some positions repeated."""
    freed = max(prompt_len - SINKS - RECENT, 0) // LANE_BLOCK * LANE_BLOCK
    everything = torch.arange(prompt_len)
    recent = everything[everything >= SINKS + freed]  # more of them fill the block
    streaming = torch.cat([everything[:SINKS], recent])
    streaming = torch.cat([streaming, streaming[-1:].expand(prompt_len - len(streaming))])
    return [
        torch.stack([everything if keeps else streaming for keeps in of_layer])
        for of_layer in whole.tolist()
    ]


def check_trace(folder: Path, outcome: Outcome, kept: list[torch.Tensor]) -> None:
    """A file has the positions of each head, and its reader those of the layers."""
    n = len(outcome.job.prompt)
    ((point, found),) = kept_at_evictions(folder, outcome).items()
    assert point == n and len(found) == LAYERS * HEADS
    for lane, positions in enumerate(found):
        wanted = kept[lane // HEADS][lane % HEADS].unique()
        assert positions.tolist() == [wanted.tolist()]
    (read,) = (one for one in read_kept(folder) if one.request_id == outcome.request_id)
    assert (read.layers, read.heads) == (list(range(LAYERS)), [HEADS] * LAYERS)
    for layer, heads in enumerate(kept):
        counts = torch.stack([torch.bincount(head.unique(), minlength=n) for head in heads])
        assert read.counts[layer].tolist() == counts.sum(dim=0).tolist()


def check_recall(
    folder: Path, outcome: Outcome, model: HuggingFaceModel, whole: np.ndarray
) -> None:
    """Each head has the share of the attention of the prompt's last queries to what it keeps."""
    n = len(outcome.job.prompt)
    with np.load(folder / f"{outcome.request_id}.npz") as trace:
        for layer, head in np.ndindex(LAYERS, HEADS):
            lane = layer * HEADS + head
            key = model.keys[layer][head, :n]
            query = model.queries[layer].unflatten(0, (HEADS, -1))[head, :, n - TRACE_WINDOW : n]
            logits = query @ key.T * key.shape[1] ** -0.5
            future = torch.ones(TRACE_WINDOW, n, dtype=torch.bool).triu(n - TRACE_WINDOW + 1)
            weights = logits.masked_fill(future, -math.inf).softmax(dim=-1)
            mass = weights.sum(dim=(0, 1))[: n - TRACE_WINDOW]
            kept = torch.from_numpy(trace[f"kept_{lane}"][0]).long()
            share = float(mass[kept[kept < len(mass)]].sum() / mass.sum())
            assert float(trace[f"recall_{lane}"][0]) == pytest.approx(share, abs=1e-4)
            assert share == pytest.approx(1) if whole[layer, head] else share < 0.999


def test_each_head_keeps_what_the_mask_says(demo, random_model, tmp_path) -> None:
    """By its report, and by a trace, which also says what part of the attention is kept."""
    engine = demo(
        kv_policy="duoattention",
        kv_policy_args=ARGS,
        kv_min_tokens=None,
        kv_trace=str(tmp_path),
        **SETTINGS,
    )
    model = HuggingFaceModel(str(random_model))
    scores = np.array(MASK).ravel()
    whole = np.zeros(LAYERS * HEADS, bool)
    whole[np.argsort(-scores)[: LAYERS * HEADS // 2]] = True
    engine.shuffle_blocks(1)
    outcomes = engine.run(jobs())
    for outcome in outcomes:
        prompt, report = outcome.job.prompt, outcome.report
        n = len(prompt)
        freed = max(n - SINKS - RECENT, 0) // LANE_BLOCK
        held = np.where(whole, n, n - freed * LANE_BLOCK)
        assert report["kept_tokens"] == held.tolist() and report["kv_heads"] == HEADS
        of_all = LAYERS * HEADS * -(-n // LANE_BLOCK)
        assert report["blocks_before"] == of_all
        assert report["blocks_after"] == of_all - LAYERS * HEADS // 2 * freed
        kept = kept_positions(n, whole.reshape(LAYERS, HEADS))
        check_trace(tmp_path, outcome, kept)
        if freed:
            model.forward(prompt)
            check_recall(tmp_path, outcome, model, whole.reshape(LAYERS, HEADS))
    engine.check_whole()


def test_what_the_probe_writes_is_served(demo: Start, random_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    argv = ["--model", str(random_model), "-o", str(folder)]
    assert main([*argv, "--sinks", str(SINKS), "--recent", str(RECENT)]) == 0
    engine = demo(
        kv_policy="duoattention",
        kv_policy_args={"mask": str(folder), "share": 0.25},
        kv_min_tokens=None,
        **SETTINGS,
    )
    whole = HeadScores.read(folder).mask(0.25).flatten().numpy()
    prompt = random_prompts([700], seed=3, vocab_size=2048)[0]
    (outcome,) = engine.run([Job(prompt, greedy(2))])
    freed = (700 - SINKS - RECENT) // LANE_BLOCK * LANE_BLOCK
    assert outcome.report["kept_tokens"] == np.where(whole, 700, 700 - freed).tolist()
    assert whole.sum() == LAYERS * HEADS // 4
    engine.check_whole()


# Prefixes -----------------------------------------------------------------------------------------


def caching_engine(engines: EnginePool, model: Path, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        **SETTINGS,
        "kv_policy": "duoattention",
        "kv_policy_args": ARGS,
        "kv_min_tokens": None,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 200,
    }
    return engines.get(model, **{**settings, **changes})


def untouched(prompt_len: int) -> int:
    """The tokens of which no eviction overwrites a block, in any head."""
    return max(prompt_len - SINKS - RECENT, 0) // LANE_BLOCK * LANE_BLOCK


def test_where_no_head_keeps_everything_what_is_overwritten_is_copied(
    engines: EnginePool, random_model: Path
) -> None:
    """Out of a prompt's blocks, and into those of the next request."""
    args = {"share": 0.0, "heads.sinks": SINKS, "heads.recent": RECENT}
    engine = caching_engine(engines, random_model, kv_policy_args=args)
    engine.shuffle_blocks(5)
    prompt, other = random_prompts([650, 200], seed=13, vocab_size=2048)
    look = Rows(engine)

    def run(tokens: list[int]) -> Outcome:
        return engine.run([Job(tokens, greedy(MAX_TOKENS, logprobs=3))], look)[0]

    cold, warm = run(prompt), run(prompt)
    assert cold.cached == 0 and warm.cached == 640 > untouched(650)
    assert_same_tokens([warm], [cold])
    assert warm.report == cold.report
    longer = run([*prompt[:645], *other])
    assert longer.cached == 640
    engine.llm.reset_prefix_cache()
    again = run([*prompt[:645], *other])
    assert again.cached == 0
    assert_same_tokens([longer], [again])
    assert longer.report == again.report
    engine.check_whole()


def test_heads_that_keep_everything_share_behind_the_eviction(engines, random_model) -> None:
    """Two requests with one prompt hold the shared blocks of these heads once, others' never."""
    engine = caching_engine(engines, random_model)
    engine.llm.reset_prefix_cache()
    (prompt,) = random_prompts([600], seed=12, vocab_size=2048)
    shared = untouched(600) // LANE_BLOCK
    held: list[tuple[int, int]] = []

    def count(engine: Engine) -> None:
        coordinator = engine.coordinator
        names = [request.request_id for request in engine.scheduler.running]
        if len(names) == 2 and all(map(coordinator.plans.has_evicted, names)):
            of_both = sum(sum(coordinator.blocks_held(name)) for name in names)
            held.append((of_both, int(coordinator.counters.held_blocks.sum())))

    jobs = [Job(prompt, greedy(8)), Job(prompt, greedy(8), arrival=4)]
    outcomes = engine.run(jobs, count)
    assert outcomes[0].token_ids == outcomes[1].token_ids
    assert [one.cached for one in outcomes] == [0, shared * LANE_BLOCK]
    of_lanes = LAYERS * HEADS // 2
    blocks = -(-600 // LANE_BLOCK)
    assert held[0] == (
        2 * of_lanes * (2 * blocks - shared),
        of_lanes * (2 * (2 * blocks - shared) - shared),
    )
    engine.check_whole()
