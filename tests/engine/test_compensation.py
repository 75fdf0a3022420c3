# SPDX-License-Identifier: Apache-2.0
"""RazorAttention's compensation tokens in an engine, by a model that computes them itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.paper import HuggingFaceModel
from tests.engine.support import (
    Engine,
    EnginePool,
    Job,
    Outcome,
    count_preemptions,
    greedy,
    kept_at_evictions,
    random_prompts,
)
from tests.engine.test_streaming_heads import (
    ARGS,
    HEADS,
    LANE_BLOCK,
    LAYERS,
    MASK,
    RECENT,
    SETTINGS,
    SINKS,
    ChunkedHeads,
    jobs,
    kept_positions,
)
from vllm_pyramid.methods.streaming_heads.compensation import Compensation
from vllm_pyramid.policy.policy import TRACE_WINDOW
from vllm_pyramid.step.trace_files import read_request

pytestmark = pytest.mark.engine

RAZOR = {**ARGS, "heads.recent_share": 0.0}
WHOLE = np.zeros(LAYERS * HEADS, bool)
WHOLE[np.argsort(-np.array(MASK).ravel())[: LAYERS * HEADS // 2]] = True
WHOLE = WHOLE.reshape(LAYERS, HEADS)


class Compensated(HuggingFaceModel):
    """A model whose queries attend to the mean of the keys that are hidden from them, too."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        kv_heads, total = key.shape[1], query.shape[2]
        visible = self.visible(layer, kv_heads, total)
        dropped = (torch.ones(total, total, dtype=torch.bool).tril() & ~visible).double()
        counts = dropped.sum(dim=-1, keepdim=True)  # [G, T, 1]
        q = query[0].double().unflatten(0, (kv_heads, -1))
        keys, values = key[0].double(), value[0].double()
        mean_key, mean_value = (dropped @ rows / counts.clamp(min=1) for rows in (keys, values))
        logits = torch.einsum("gqtd,gsd->gqts", q, keys) * scale
        logits = logits.masked_fill(~visible[:, None], -math.inf)
        further = torch.einsum("gqtd,gtd->gqt", q, mean_key) * scale + counts.log().mT
        weights = torch.cat([logits, further[..., None]], dim=-1).softmax(dim=-1)
        found = torch.einsum("gqts,gsd->gqtd", weights[..., :-1], values)
        found += weights[..., -1:] * mean_value[:, None]
        return found.flatten(0, 1).float().transpose(0, 1)[None]


class CompensatedChunks(Compensated, ChunkedHeads):
    """The same where heads evict inside the prompt."""


def check(outcome: Outcome, expected: torch.Tensor) -> None:
    """Compare an answer with log probabilities `[tokens, vocabulary]`, up to near ties."""
    for row, (token, ours) in enumerate(zip(outcome.token_ids, outcome.logprobs, strict=True)):
        assert ours[token] == pytest.approx(float(expected[row, token]), abs=2e-4)
        assert float(expected[row].max() - expected[row, token]) < 4e-4


def compensation_of(engine: Engine) -> Compensation:
    hooks = engine.core.model_executor.driver_worker.worker.model_runner.pyramid.tracker.hooks
    (found,) = (one for one in hooks if isinstance(one, Compensation))
    return found


def check_nothing_is_left(engine: Engine) -> None:
    """What has ended is forgotten: a worker hears of it with the next step."""
    engine.run([Job([9], greedy(1))])
    assert len(compensation_of(engine).dropped) == 0
    engine.check_whole()


def test_streaming_heads_attend_to_the_mean_of_what_they_have_dropped(
    engines: EnginePool, random_model: Path, tmp_path: Path
) -> None:
    """With preempted, aborted and whole requests beside, blocks of others, found prefixes."""
    engine = engines.get(
        random_model,
        kv_policy="razorattention",
        kv_policy_args=RAZOR,
        kv_min_tokens=None,
        kv_admission="prompt",
        kv_trace=str(tmp_path),
        num_gpu_blocks_override=1 + LAYERS * HEADS * 12 + 16,
        **{**SETTINGS, "max_model_len": 760, "enable_prefix_caching": True},
    )
    engine.shuffle_blocks(4)
    whole, *long = random_prompts([300, 400, 390, 380], seed=17, vocab_size=2048)
    first = [*jobs(), Job(whole, greedy(12, logprobs=3, kv_policy="full"))]
    first.append(Job(long[0], greedy(200), abort_after=30))
    second = [Job(prompt, greedy(150, logprobs=3)) for prompt in long]
    again = [Job(long[0], greedy(12, logprobs=3), arrival=at) for at in (0, 4)]
    outcomes = engine.run(first)
    with count_preemptions(engine) as preempted:
        outcomes += engine.run(second)
    assert preempted["evicted"] > 0, preempted
    found = engine.run(again)
    # The prefix that the other has left ends where survivors begin.
    assert found[1].cached == (400 - SINKS - RECENT) // LANE_BLOCK * LANE_BLOCK
    outcomes += found
    model, plain = Compensated(str(random_model)), HuggingFaceModel(str(random_model))
    differs = 0
    for outcome in outcomes:
        if outcome.output is None:
            continue
        prompt = outcome.job.prompt
        n, tokens = len(prompt), [*prompt, *outcome.token_ids][:-1]
        evicts = prompt is not whole
        kept = kept_positions(n, WHOLE if evicts else np.ones_like(WHOLE))
        check(outcome, model.forward(tokens, n, kept)[n - 1 :])
        if outcome.report["evicted_tokens"]:  # the token counts: without it other numbers
            without = plain.forward(tokens, n, kept)[n - 1 :]
            given = [
                ours[token] for token, ours in zip(outcome.token_ids, outcome.logprobs, strict=True)
            ]
            missed = without.gather(1, torch.tensor(outcome.token_ids)[:, None])[:, 0]
            differs += float((torch.tensor(given) - missed).abs().max()) > 1e-2
            check_recall(tmp_path, outcome, plain)
        check_trace(tmp_path, outcome, kept)
    assert differs >= 6
    check_nothing_is_left(engine)


def check_trace(folder: Path, outcome: Outcome, kept: list[torch.Tensor]) -> None:
    """A file has the positions of each head, and its reader those of the layers."""
    n = len(outcome.job.prompt)
    ((point, found),) = kept_at_evictions(folder, outcome).items()
    assert point == n and len(found) == LAYERS * HEADS
    for lane, positions in enumerate(found):
        wanted = kept[lane // HEADS][lane % HEADS].unique()
        assert positions.tolist() == [wanted.tolist()]
    read = read_request(folder, outcome.request_id)
    assert read is not None
    assert (read.layers, read.heads) == (list(range(LAYERS)), [HEADS] * LAYERS)
    for layer, heads in enumerate(kept):
        counts = torch.stack([torch.bincount(head.unique(), minlength=n) for head in heads])
        assert read.counts[layer].tolist() == counts.sum(dim=0).tolist()


def check_recall(folder: Path, outcome: Outcome, model: HuggingFaceModel) -> None:
    """Each head has the share of the attention of the prompt's last queries to what it keeps.

    Args:
        model: that has computed the prompt.
    """
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
            assert share == pytest.approx(1) if WHOLE[layer, head] else share < 0.999


def test_sums_grow_with_evictions_inside_the_prompt(
    engines: EnginePool, random_model: Path
) -> None:
    """By a model in whose prefill, too, a chunk sees the mean of what was dropped before it."""
    args: dict[str, Any] = {**RAZOR, "chunk.tokens": 200}
    settings = {"kv_policy": "razorattention", "kv_policy_args": args, "kv_min_tokens": None}
    engine = engines.get(random_model, **settings, **SETTINGS)
    differs = 0
    for outcome in engine.run(jobs()):
        prompt = outcome.job.prompt
        tokens = [*prompt, *outcome.token_ids][:-1]
        model = CompensatedChunks(str(random_model), WHOLE, len(prompt))
        check(outcome, model.forward(tokens)[len(prompt) - 1 :])
        if outcome.report["inner_evictions"]:  # the first token is that of such a prefill
            without = ChunkedHeads(str(random_model), WHOLE, len(prompt)).forward(prompt)[-1]
            token = outcome.token_ids[0]
            differs += abs(float(without[token]) - outcome.logprobs[0][token]) > 1e-3
    assert differs >= 2
    check_nothing_is_left(engine)
