# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a step choose pages, what the worker's hooks make of it, and Quest's choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.methods.pages import SelectPages, choosing
from vllm_pyramid.methods.pages.kernels import reference as page_reference
from vllm_pyramid.methods.pages.reads import PageReads, StepReads
from vllm_pyramid.methods.pages.worker import PageSelector
from vllm_pyramid.plan import PlanMismatchError
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.page_scorer import PageScorer
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.failures import Failure
from vllm_pyramid.step.step import Step, WorkerRequest
from vllm_pyramid.step.trace import TraceWriter

pytestmark = pytest.mark.cpu

LAYERS, HEADS, KV_HEADS, SIZE, N = 3, 4, 2, 8, 4


def _step(
    requests: list[tuple[int, int, int]],
    skips: list[int] | None = None,
    policy: Any = None,
    layers: int = LAYERS,
) -> Step:
    """A step of requests (prompt, computed, scheduled), of which each layer skips as much."""
    prompts, computed, scheduled = (np.array(x, np.int32) for x in zip(*requests, strict=True))
    step = Step.nothing(layers, len(requests))
    policy = policy or load_policy("select")
    plans = [policy.plan(int(prompt), layers, N) for prompt in prompts]
    step.requests = [WorkerRequest(f"r{i}", policy, plan, plan) for i, plan in enumerate(plans)]
    step.prompt_lens, step.computed, step.scheduled = prompts, computed, scheduled
    if skips is not None:
        step.skips[:] = skips
    return step


# Quest --------------------------------------------------------------------------------------------


class _Context:
    """What `PageSelector` reads of a worker."""

    device = torch.device("cpu")
    block_size = N

    @staticmethod
    def whole_graphs() -> bool:
        return False

    class _Spec:
        num_kv_heads, head_size, dtype = KV_HEADS, SIZE, torch.float32

        def __init__(self, layer_idx: int) -> None:
            self.layer_idx = layer_idx

    specs = tuple(map(_Spec, range(LAYERS)))


_CONTEXT: Any = _Context()


def _selector(part: Any, blocks: int, context: Any = _CONTEXT) -> PageSelector:
    assert isinstance(part, SelectPages)
    selector = PageSelector(load_policy("select"), part, context)
    selector.allocate(blocks)
    return selector


def test_summaries_beyond_what_the_cpu_multiplies_are_refused_at_the_start() -> None:
    """Each step of a request would fail; devices have no such bound."""
    wide = cast("Any", SimpleNamespace(device=torch.device("cpu"), block_size=N))
    wide.specs = [SimpleNamespace(layer_idx=0, num_kv_heads=1, head_size=264, dtype=torch.float32)]
    policy: Any = load_policy("select")
    with pytest.raises(ValueError, match="528 numbers of a page and KV head of 264"):
        PageSelector(policy, policy.attend, wide)
    wide.device = torch.device("cuda")
    PageSelector(policy, policy.attend, wide)


def _inputs(
    keys: torch.Tensor, table: torch.Tensor, step: Step, layer: int, query: torch.Tensor
) -> AttentionInputs:
    ends = torch.from_numpy(step.computed + step.scheduled)
    starts = torch.tensor([0, *np.cumsum(step.scheduled).tolist()], dtype=torch.int32)
    skips = torch.from_numpy(step.skips[layer].copy())
    batch = AttentionBatch(query, keys, keys.clone(), table, starts, ends, skips)
    return AttentionInputs(reference, layer, batch, Softmax(SIZE**-0.5))


def quests_pages(query: torch.Tensor, keys: torch.Tensor, size: int, budget: int) -> list[int]:
    """Quest's choice for one head (arXiv:2406.10774, algorithm 1): the last page, the best others.

    Per channel, the larger of q times the page's minimum and q times its maximum, summed.
    """
    full = (len(keys) - 1) // size
    bounds = []
    for page in range(full):
        channels = keys[page * size : (page + 1) * size]
        low, high = channels.min(dim=0).values, channels.max(dim=0).values
        bounds.append(float(torch.maximum(query * low, query * high).double().sum()))
    order = sorted(range(full), key=lambda page: (-bounds[page], page))
    return sorted([*order[: budget - 1], full])


@pytest.mark.parametrize("seed", range(6))
def test_quest_chooses_its_authors_pages(seed: int) -> None:
    """Index for index, with a KV head for each query head, as in the paper."""
    source = torch.Generator().manual_seed(seed)
    part = load_policy("quest", args={"attend": {"budget": 5 * N, "dense_layers": 0}}).attend
    assert isinstance(part, SelectPages)

    class Alone(_Context):
        class _Spec(_Context._Spec):
            num_kv_heads = HEADS

        specs = (_Spec(0),)

    length = 50 + 7 * seed
    step = _step([(20, length - 1, 1)], layers=1, policy=load_policy("quest", args={
        "attend": {"budget": 5 * N, "dense_layers": 0}}))  # fmt: skip
    selector = _selector(part, 64, Alone())
    table = torch.randperm(60, generator=source)[None, :32].int() + 1
    cache = torch.randn(64, HEADS, N, SIZE, generator=source)
    selector.summaries.rows.fill_(torch.nan)
    pages = table[0, : length // N].long()
    page_reference.summarise_pages(
        selector.summaries.rows, cache, table, *(torch.tensor([x], dtype=torch.int32)
        for x in (0, length // N * N, 0)), kind="box",
    )  # fmt: skip
    query = torch.randn(1, HEADS, SIZE, generator=source)
    selector.begin_step(step)
    chosen = selector.before_attention(_inputs(cache, table, step, 0, query))
    assert pages.numel() and chosen.block_table.shape == (1, HEADS, 5)
    keys = cache[table[0].long()].transpose(0, 1).flatten(1, 2)[:, :length]
    for head in range(HEADS):
        wanted = quests_pages(query[0, head], keys[head], N, 5)
        assert chosen.block_table[0, head].tolist() == table[0, wanted].tolist()
    assert chosen.seq_lens.tolist() == [4 * N + (length - 1) % N + 1]


# A worker's hooks ---------------------------------------------------------------------------------


class OwnMean(PageScorer):
    """The mean of keys, as a user would write it."""

    kind: str = "tests.methods.test_pages:OwnMean"
    limit: float = 1e9

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        if float(keys.abs().max()) > self.limit:
            raise ArithmeticError("too large")
        return keys.mean(dim=2)

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        return query


def _part(scorer: Any, **fields: Any) -> SelectPages:
    args = {"budget": 20, "dense_layers": 1, "sinks": 2, "recent": 4, "min_tokens": 0, **fields}
    part = load_policy("select", args={"attend": args}).attend
    assert isinstance(part, SelectPages)
    return part.model_copy(update={"scorer": scorer})


def _scorer(name: str) -> PageScorer:
    if name == "own":
        return OwnMean()
    part = load_policy("select", args={"attend.scorer": name}).attend
    assert isinstance(part, SelectPages)
    return part.scorer


@pytest.mark.parametrize("name", ["spread", "box", "own"])
@given(data=st.data())
@settings(max_examples=25)
def test_summaries_are_those_of_their_blocks(name: str, data: st.DataObject) -> None:
    """Chunks, rejected drafts, reused blocks, copies and evictions; full pages at every step."""
    scorer = _scorer(name)
    policy = load_policy("select").model_copy(update={"attend": _part(scorer)})
    selector = _selector(policy.attend, 40)
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    cache = torch.full((40, KV_HEADS, N, SIZE), torch.nan)
    selector.summaries.rows.fill_(torch.nan)
    free = list(range(1, 40))
    lives: dict[int, tuple[list[int], int]] = {}

    def check() -> None:
        for blocks, length in lives.values():
            whole = torch.tensor(blocks[: length // N], dtype=torch.long)
            if not len(whole):
                continue
            expected = scorer.summarise(cache[whole])
            found = selector.summaries.rows[whole]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    for _ in range(data.draw(st.integers(3, 12))):
        what = data.draw(st.sampled_from(["new", "step", "step", "reject", "free", "copy"]))
        if what == "new" and len(lives) < 3:
            lives[max(lives, default=0) + 1] = ([], 0)
        elif what == "free" and lives:
            blocks, _ = lives.pop(data.draw(st.sampled_from(sorted(lives))))
            free += blocks
        elif what == "reject" and lives:
            one = data.draw(st.sampled_from(sorted(lives)))
            blocks, length = lives[one]
            lives[one] = blocks, max(length - data.draw(st.integers(1, 3)), 0)
        elif what == "copy" and lives and len(free) > 8:
            blocks, length = lives[data.draw(st.sampled_from(sorted(lives)))]
            targets = [free.pop() for _ in blocks]
            if blocks:
                cache[torch.tensor(targets)] = cache[torch.tensor(blocks)]
                selector.copy_blocks(torch.tensor(blocks), torch.tensor(targets))
            lives[max(lives) + 1] = (targets, length)
        elif what == "step" and lives:
            names = sorted(lives)
            requests, tables = [], torch.zeros(len(names), 12, dtype=torch.int32)
            for row, one in enumerate(names):
                blocks, length = lives[one]
                new = min(data.draw(st.integers(1, 9)), 12 * N - length)
                while length + new > N * len(blocks) and free:
                    blocks.append(free.pop())
                new = min(new, N * len(blocks) - length)
                tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
                requests.append((8, length, new))
                for place in range(length, length + new):
                    cache[blocks[place // N], :, place % N] = torch.randn(
                        KV_HEADS, SIZE, generator=source
                    )
                lives[one] = blocks, length + new
            step = _step(requests, policy=policy)
            query = torch.randn(sum(r[2] for r in requests), HEADS, SIZE, generator=source)
            selector.begin_step(step)
            for layer in range(LAYERS):
                found = selector.before_attention(_inputs(cache, tables, step, layer, query))
                if layer == 0:
                    assert found.block_table is tables, "a dense layer"
            report = selector.end_step(step)
            assert report is None or all(
                read <= seen for read, seen in zip(report.read, report.visible, strict=True)
            )
            check()


def test_mixed_rows_attend_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's chunk, a token with drafts that choose, and a short answer, in one call."""
    policy = load_policy("select").model_copy(update={"attend": _part(_scorer("spread"))})
    selector = _selector(policy.attend, 64)
    source = torch.Generator().manual_seed(1)
    cache = torch.randn(64, KV_HEADS, N, SIZE, generator=source)
    table = torch.randperm(63, generator=source)[:48].view(3, 16).int() + 1
    first = _step([(40, 0, 40), (30, 0, 30), (6, 0, 6)], policy=policy)
    queries = torch.randn(76, HEADS, SIZE, generator=source)
    selector.begin_step(first)
    for layer in range(LAYERS):
        assert selector.before_attention(_inputs(cache, table, first, layer, queries)).batch
    assert selector.end_step(first) is None, "no token behind a prompt"
    step = _step([(60, 40, 20), (30, 36, 3), (6, 6, 1)], policy=policy)
    query = torch.randn(24, HEADS, SIZE, generator=source)
    inputs = _inputs(cache, table, step, 1, query)
    selector.begin_step(step)
    selector.before_attention(_inputs(cache, table, step, 0, query))
    whole = selector.before_attention(inputs).block_table.clone()
    monkeypatch.setattr(choosing, "ROWS_AT_ONCE", 2)
    selector.begin_step(step)
    selector.before_attention(_inputs(cache, table, step, 0, query))
    chosen = selector.before_attention(inputs)
    assert torch.equal(chosen.block_table, whole) and len(whole) == 5
    out, dense = torch.empty_like(query), torch.empty_like(query)
    reference.paged_attention(out, chosen.batch, chosen.softmax)
    selector.before_attention(_inputs(cache, table, step, 2, query))
    reference.paged_attention(dense, inputs.batch, inputs.softmax)
    assert torch.equal(out[:20], dense[:20]) and torch.equal(out[23], dense[23])
    assert not torch.isclose(out[20:23], dense[20:23]).all()
    report = selector.end_step(step)
    assert report is not None
    # Two layers that select read 5 of 10 pages; the lowest reads all.
    assert report.read == [0, 3 * (10 + 5 + 5), 3 * 2]
    assert report.visible == [0, 3 * 30, 3 * 2] and report.tokens == [0, 3, 1]
    reads = PageReads()
    reads.on_step_report(report, {"r1"}.__contains__)
    reads.on_step_report(StepReads(["r1"], [1], [2], [1]), {"r1"}.__contains__)
    assert reads.totals() == {"pages_read": 67, "pages_visible": 98}
    assert reads.on_request_finished("r1") == {
        "pages_read": 61,
        "pages_visible": 92,
        "attended_tokens": 4,
    }
    assert reads.on_request_finished("r2")["pages_read"] == 0


@pytest.mark.parametrize("shifted", [False, True])
def test_what_the_largest_step_allocates_is_reserved(shifted: bool) -> None:
    """A preempted answer, as many of its tokens as a step may have, beside a token and a prompt."""
    again, longest = SelectPages.max_recomputed, 300
    few, wide = (
        load_policy("select").model_copy(update={"attend": _part(_scorer("spread"), **fields)})
        for fields in ({}, {"budget": longest - 2 * N})
    )
    step = _step([(30, 36, 1 + again), (30, longest - 1, 1), (60, 40, 20)], policy=few)
    plan = step.requests[1].plan
    step.requests[1] = WorkerRequest("r1", wide, plan, plan)

    class Large(_Context):
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=longest, get_num_attention_heads=lambda parallel: HEADS
            ),
            parallel_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=8192),
            num_speculative_tokens=0,
        )

    context: Any = Large()
    blocks = 3 * (longest // N)
    selector = _selector(few.attend, blocks + 1, context)
    source = torch.Generator().manual_seed(5)
    cache = torch.randn(blocks + 1, KV_HEADS, N, SIZE, generator=source)
    table = torch.randperm(blocks, generator=source).view(3, -1).int() + 1
    query = torch.randn(int(step.scheduled.sum()), HEADS, SIZE, generator=source)
    selector.begin_step(step)
    for layer in range(LAYERS):
        inputs = _inputs(cache, table, step, layer, query)
        if shifted:
            inputs = replace(inputs, offsets=torch.zeros(3, dtype=torch.int32))
        chosen = selector.before_attention(inputs)
    choosing = selector._choosing
    assert choosing is not None and len(choosing.requests) == 2 + again
    made: Any = choosing.selection
    lists = [chosen.block_table, made.block_table, *([] if shifted else [made.pages])]
    num_bytes = sum(tensor.nbytes for tensor in (choosing.scores, *lists))
    if shifted:
        context.device = SimpleNamespace(type="cuda")
    assert 0.7 * selector.bytes_of_buffers() < num_bytes <= selector.bytes_of_buffers()


def test_a_layer_that_ran_dense_stops_the_engine(tmp_path: Path) -> None:
    """What was read is counted from the tables that attention was given, not from the plan."""
    policy = load_policy("select").model_copy(update={"attend": _part(_scorer("box"))})
    selector = _selector(policy.attend, 64)
    selector.trace = TraceWriter(str(tmp_path), [KV_HEADS] * LAYERS, 0, 1)
    cache = torch.zeros(64, KV_HEADS, N, SIZE)
    table = torch.arange(1, 17, dtype=torch.int32)[None]
    step, query = _step([(30, 36, 1)], policy=policy), torch.ones(1, HEADS, SIZE)
    for layers, message in (
        ((0, 1), r"was to read \[10, 5, 5\] pages .* and read \[10, 5, 0\]"),
        ((), r"and read \[0, 0, 0\]"),
        ((0, 1, 2), None),
    ):
        selector.begin_step(step)
        for layer in layers:
            selector.before_attention(_inputs(cache, table, step, layer, query))
        if message is None:
            assert selector.end_step(step) is not None
            continue
        with pytest.raises(PlanMismatchError, match=message):
            selector.end_step(step)
    step.failures.of["r0"] = Failure("method", "raised")
    selector.begin_step(step)
    assert selector.end_step(step) is not None, "a request that fails anyway"
    selector.trace.forget("r0")
    with np.load(tmp_path / "r0~pages.npz") as file:
        assert file["pages_read"].tolist() == [10, 5, 5] and int(file["tokens"]) == 2
        assert file["pages_visible"].tolist() == [20] * 3 and file["layers"].tolist() == [0, 1, 2]


def test_a_request_without_numbers_fails_alone() -> None:
    policy = load_policy("select").model_copy(update={"attend": _part(_scorer("spread"))})
    selector = _selector(policy.attend, 64)
    cache = torch.randn(64, KV_HEADS, N, SIZE, generator=torch.Generator().manual_seed(2))
    table = torch.arange(1, 33, dtype=torch.int32).view(2, 16)
    cache[3] = torch.nan
    query = torch.ones(76, HEADS, SIZE)
    for requests in ([(38, 0, 38), (38, 0, 38)], [(38, 38, 1), (38, 38, 1)]):
        step = _step(requests, policy=policy)
        selector.begin_step(step)
        for layer in range(LAYERS):
            part = query[: sum(request[2] for request in requests)]
            chosen = selector.before_attention(_inputs(cache, table, step, layer, part))
        assert list(step.failures.of) == (["r0"] if requests[0][1] else [])
        assert selector.end_step(step) is None or chosen.block_table.shape == (2, KV_HEADS, 5)
    assert step.failures.of["r0"].kind == "scores" and "NaN" in step.failures.of["r0"].reason


def test_a_stage_answers_for_its_layers_and_passes_nan_on(tmp_path: Path) -> None:
    """Layers 1 and 2 of 3 are the last stage's; the scheduler does not hear of NaN in layer 1."""
    policy = load_policy("select").model_copy(update={"attend": _part(_scorer("spread"))})
    cache = torch.randn(64, KV_HEADS, N, SIZE, generator=torch.Generator().manual_seed(4))
    table = torch.arange(1, 33, dtype=torch.int32).view(2, 16)
    cache[3] = torch.nan  # of the first request, and not among the pages that it reads
    found = {}
    for layers in ((0, 1), (2,)):

        class Stage(_Context):
            specs = tuple(map(_Context._Spec, layers))

        selector = found[layers] = _selector(policy.attend, 64, Stage())
        selector.trace = TraceWriter(str(tmp_path), [KV_HEADS] * LAYERS, 0, 1, stage=len(found))
    for requests in ([(38, 0, 38), (38, 0, 38)], [(38, 38, 1), (38, 38, 1)]):
        query = torch.ones(sum(request[2] for request in requests), HEADS, SIZE)
        for layers, selector in found.items():
            step = _step(requests, policy=policy)
            step.failures.reports_evictions = layers != (2,)
            selector.begin_step(step)
            for layer in layers:
                # The tensor of queries stands for what a model hands from layer to layer.
                keys = cache if layer < 2 else cache.nan_to_num(0.5)
                selector.before_attention(_inputs(keys, table, step, layer, query))
            report = selector.end_step(step)
            selector.trace.forget("r1")
    assert report is not None and report.read == [10 + 5 + 5] * 2 and report.visible == [30] * 2
    assert list(step.failures.of) == ["r0"] and query[0].isnan().all() and query[1].isfinite().all()
    pages = [np.load(tmp_path / f"r1~pages-stage{stage}.npz")["pages_read"] for stage in (1, 2)]
    assert [one.tolist() for one in pages] == [[10, 5, 0], [0, 0, 5]]


def test_steps_without_requests_do_nothing() -> None:
    selector = _selector(_part(_scorer("spread")), 8)
    step = Step.nothing(LAYERS, 2)
    selector.end_step(step)
    cache, table = torch.full((8, KV_HEADS, N, SIZE), torch.nan), torch.zeros(1, 4).int()
    inputs = _inputs(cache, table, _step([(4, 0, 4)]), 2, torch.ones(4, HEADS, SIZE))
    assert selector.before_attention(inputs) is inputs and not selector.summaries.rows.any()


def test_layers_of_different_shapes_are_refused() -> None:
    class Mixed(_Context):
        class _Wide(_Context._Spec):
            num_kv_heads = 4

        specs = (_Context._Spec(0), _Wide(1), _Context._Spec(2))

    with pytest.raises(ValueError, match="different KV heads"):
        _selector(_part(_scorer("spread")), 8, Mixed())
    assert _selector(_part(_scorer("spread")), 8).bytes_per_block() == 2 * KV_HEADS * SIZE * 4
