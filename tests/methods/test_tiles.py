# SPDX-License-Identifier: Apache-2.0
"""The worker's hooks of a sparse prefill: who attends to what in a mixed step, and the counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.conftest import build_batch
from tests.steps import make_context
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.methods.tiles import AntidiagonalTiles
from vllm_pyramid.methods.tiles.attention import attend_tiles, choose_tiles
from vllm_pyramid.methods.tiles.reads import TileReads
from vllm_pyramid.methods.tiles.worker import TileAttention
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.step import Step, WorkerRequest

pytestmark = pytest.mark.cpu

N, KV_HEADS = 16, 2
TILES = AntidiagonalTiles(top_p=0.4)


def _step(requests: list[tuple[int, int, int]], full: tuple[int, ...] = ()) -> Step:
    """A step of requests (prompt, computed, scheduled); those of `full` ask for everything."""
    prompts, computed, scheduled = (np.array(x, np.int32) for x in zip(*requests, strict=True))
    step = Step.nothing(4, len(requests))
    sparse = load_policy("sparse-prefill", args={"prefill": TILES.model_dump()})
    for index, prompt in enumerate(prompts.tolist()):
        policy = load_policy("full") if index in full else sparse
        plan = policy.plan(prompt, 4, N)
        step.requests.append(WorkerRequest(f"r{index}", policy, plan, plan))
    step.prompt_lens, step.computed, step.scheduled = prompts, computed, scheduled
    return step


def _hooks() -> TileAttention:
    return TileAttention(TILES, make_context(4, block_size=N))


def test_a_mixed_step_attends_as_each_request_would_alone() -> None:
    # Decodes; begins, with a dense rest; full; in the middle; another that decodes; short.
    requests = [(300, 320, 1), (700, 512, 188), (600, 256, 344), (900, 384, 256), (5, 7, 1),
                (60, 0, 60), (330, 0, 330)]  # fmt: skip
    step = _step(requests, full=(2,))
    lens = [computed + scheduled for _, computed, scheduled in requests]
    made = build_batch(lens, [scheduled for *_, scheduled in requests], kv_heads=KV_HEADS)
    batch, softmax = made.attention(), Softmax(0.3)
    lse = torch.full(batch.query.shape[:2], float("nan"))
    hooks = _hooks()
    hooks.begin_step(step)
    dense = torch.empty(batch.query.shape)
    dense_lse = torch.empty_like(lse)
    cpu.paged_attention(dense, batch, softmax, log_sum_exp=dense_lse)
    for layer in range(4):
        out = torch.full(batch.query.shape, float("nan"))
        inputs = AttentionInputs(cpu, layer, batch, softmax, log_sum_exp=lse)
        assert hooks.attend(inputs, out) == (layer >= TILES.dense_layers)
    starts = batch.query_start_loc.tolist()
    right, sparse, read = dense.clone(), torch.zeros(len(dense), dtype=torch.bool), {}
    # Of the 700 tokens 512 are sparse, which are computed; of the 900, 768; of the 330, 256.
    for row, first, last in ((3, 3, 5), (6, 0, 2)):
        rows = slice(starts[row], starts[row] + (last - first) * 128)
        blocks = batch.block_table[row, : last * 8]
        taken = choose_tiles(batch.query[rows], batch.key_cache, blocks, 0.3, 0.4)
        own = replace(batch, query=batch.query[rows])
        attend_tiles(reference, right[rows], own, softmax, blocks, taken)
        sparse[rows], read[f"r{row}"] = True, int(taken.sum())
    torch.testing.assert_close(out, right, atol=2e-5, rtol=1e-4)
    assert torch.equal(out[~sparse], dense[~sparse])
    assert float((out - dense)[sparse].abs().max()) > 0.01
    assert torch.equal(lse[~sparse], dense_lse[~sparse]), "scorers read that of the last tokens"
    report = hooks.end_step(step)
    visible = {"r3": KV_HEADS * (4 + 5), "r6": KV_HEADS * (1 + 2)}
    assert report.request_ids == ["r3", "r6"]
    assert report.visible == [4 * visible[name] for name in report.request_ids]
    assert report.read == [2 * visible[name] + 2 * read[name] for name in report.request_ids]
    assert report.read[0] < report.visible[0]
    assert hooks.end_step(step) is None and not hooks.attend(inputs, out)


@pytest.mark.parametrize("chunk", [(0, 200), (64, 64), (128, 100)])
def test_a_tile_that_is_cut_stops_the_engine(chunk: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match="is not one of whole tiles; report this"):
        _hooks().begin_step(_step([(900, *chunk)]))


def test_reads_are_added_up() -> None:
    reads = TileReads()
    reads.on_step_report((["a", "b"], [3, 4], [5, 6]), {"a"}.__contains__)
    reads.on_step_report((["a"], [1], [2]), {"a"}.__contains__)
    assert reads.totals() == {"prefill_tiles_read": 8, "prefill_tiles_visible": 13}
    of_a = {"prefill_tiles_read": 4, "prefill_tiles_visible": 7}
    assert reads.on_request_finished("a") == of_a
    none = {"prefill_tiles_read": 0, "prefill_tiles_visible": 0}
    assert reads.on_request_finished("a") == reads.on_request_finished("b") == none
