# SPDX-License-Identifier: Apache-2.0
"""The layers of a step together: lengths, kept tokens and caches, without vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.steps import make_call, make_context
from vllm_pyramid.attention.deferred import DeferredEviction
from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.records import Reduction, Softmax, WindowBatch
from vllm_pyramid.methods.solved.worker import LayerSolver, best_lengths, least_lengths
from vllm_pyramid.plan import DeferredPlan, EvictionPoint
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.request import ALLOCATOR_KEY
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.hooks import MethodHooks
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

LAYERS, KV_HEADS, HEADS, HEAD_SIZE, BLOCK = 3, 2, 4, 16, 8
SCALE = HEAD_SIZE**-0.5


def make_solver(policy: Policy, ranks: Ranks | None = None) -> DeferredEviction:
    """As a worker makes it from the policy."""
    hooks = MethodHooks(policy.worker_hooks(make_context(LAYERS, block_size=BLOCK, ranks=ranks)))
    deferred = DeferredEviction.of(policy, hooks, LAYERS)
    assert deferred is not None and isinstance(deferred.method, LayerSolver)
    assert deferred.method.solver is policy.allocator
    return deferred


class Step:
    """Prompts that end in one step, with caches of their own content in every layer."""

    def __init__(self, policy: Policy, prompt_lens: list[int], *, overrides: Any = None) -> None:
        self.policy, self.prompt_lens = policy, prompt_lens
        names = [f"r{index}" for index in range(len(prompt_lens))]
        self.retention = EvictionTracker(policy, LAYERS, BLOCK, len(names))
        for name, n in zip(names, prompt_lens, strict=True):
            self.retention.add(name, n, (overrides or {}).get(name))
        lens = np.array(prompt_lens, np.int32)
        step = self.retention.begin_step(names, lens, np.zeros_like(lens), lens)
        assert step.evictions is not None
        self.evictions: StepEvictions = step.evictions
        self.width = -(-max(prompt_lens) // BLOCK)
        self.tables = torch.arange(len(names) * self.width, dtype=torch.int32)
        self.tables = self.tables[torch.randperm(len(self.tables), generator=self.random(99))]
        self.tables = self.tables.view(len(names), self.width)
        self.layers = [self.layer(index) for index in range(LAYERS)]
        self.before = [(k.clone(), v.clone()) for _, k, v in self.layers]

    def random(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(number)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and caches; a prompt's are the same in whatever batch it comes."""
        shape = (self.tables.numel(), KV_HEADS, BLOCK, HEAD_SIZE)
        key, value = torch.zeros(shape), torch.zeros(shape)
        queries = []
        for row, n in enumerate(self.prompt_lens):
            source = self.random(1000 * n + index)
            sharpness = 0.3 + 2.0 * index  # layers differ, so that lengths do
            queries.append(sharpness * torch.randn(n, HEADS, HEAD_SIZE, generator=source))
            positions = torch.arange(n)
            at = self.tables[row][positions // BLOCK].long(), positions % BLOCK
            for cache in (key, value):
                tokens = torch.randn(n, KV_HEADS, HEAD_SIZE, generator=source)
                cache[at[0], :, at[1]] = tokens
        return torch.cat(queries), key, value

    def call(self, layer: int, ops: Ops = reference) -> AttentionInputs:
        query, key, value = self.layers[layer]
        return make_call(
            self.tables, layer=layer, ops=ops, query=query, caches=(key, value), scale=SCALE
        )

    def run(
        self,
        ops: Ops,
        layers: Iterable[int] = range(LAYERS),
        solver: DeferredEviction | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        solver = solver or make_solver(self.policy)
        for layer in layers:
            call = replace(self.call(layer, ops), ranks=ranks)
            solver.add_layer(call, self.evictions, None)

    def keep(self, row: int) -> list[int]:
        plan = self.evictions.plans[row]
        assert isinstance(plan, EvictionPoint)
        return plan.keep.tolist()

    def scores(self, row: int, layer: int) -> torch.Tensor:
        """`[G, n - window]` of one prompt alone."""
        scorer: Any = self.policy.scorer
        query, (key, _) = self.layers[layer][0], self.before[layer]
        n = self.prompt_lens[row]
        end = sum(self.prompt_lens[: row + 1])
        prompt = WindowBatch(
            query,
            key,
            self.tables[row : row + 1],
            torch.tensor([end]),
            torch.tensor([n]),
            self.policy.window,
        )
        reduction = Reduction(scorer.gqa_reduce, scorer.pooling, scorer.kernel_size)
        return reference.window_scores(prompt, Softmax(SCALE), reduction)[0]


def expected_keep(step: Step, row: int, plan: DeferredPlan) -> list[int]:
    """The method's formula, from the scores of one prompt alone."""
    policy, sinks = step.policy, step.policy.sinks
    tables = [step.scores(row, layer) for layer in range(LAYERS)]
    total = plan.mean * LAYERS
    mean = torch.stack([scores.double().mean(dim=0) for scores in tables]).float()
    goal = policy.allocator.retention  # type: ignore[attr-defined]
    if goal is None:
        lengths = best_lengths(mean, total, sinks=sinks)
    else:
        lengths = least_lengths(mean, goal, limit=total, sinks=sinks)
    return [plan.floor + k for k in lengths.tolist()]


POLICIES = {
    "xkv": load_policy("xkv", 24),
    "xkv-sinks": load_policy("xkv", "30%", {"sinks": 3, "fill_blocks": False}),
    "xkv-retention": load_policy("xkv", None, {"retention": 0.6}),
}
BACK_ENDS = [pytest.param(reference, id="reference")]
if not cpu.load_error():
    BACK_ENDS.append(pytest.param(cpu, id="cpu"))


@pytest.mark.parametrize("ops", BACK_ENDS)
@pytest.mark.parametrize("name", POLICIES)
def test_lengths_and_caches(name: str, ops: Ops) -> None:
    """Against the formulas, and every survivor's row at its place."""
    step = Step(POLICIES[name], [90, 41, 63])
    opened = [plan for plan in step.evictions.plans if isinstance(plan, DeferredPlan)]
    assert len(opened) == 3
    step.run(ops)
    assert len({tuple(step.keep(row)) for row in range(3)}) > 1
    for row, plan in enumerate(opened):
        assert step.keep(row) == expected_keep(step, row, plan), (row, plan)
        given = 0
        for layer in range(LAYERS):
            held = int(step.evictions.kept_lens[layer, row])
            given += plan.prompt_len - held
            kept = reference.select(
                step.scores(row, layer)[None],
                torch.tensor([plan.prompt_len]),
                torch.tensor([held]),
                window=step.policy.window,
                sinks=step.policy.sinks,
            )[0].long()
            for now, before in zip(step.layers[layer][1:], step.before[layer], strict=True):
                whole = reference.gather_tokens(before, step.tables[row], 0, plan.prompt_len)
                tail = reference.gather_tokens(
                    now, step.tables[row], plan.prompt_len - held, plan.prompt_len
                )
                for head in range(KV_HEADS):
                    assert torch.equal(tail[:, head], whole[kept[head], head])
        assert step.evictions.tokens_done[row] == given
    report, _ = step.retention.end_step()
    assert {done.keep for done in report.values()} == {tuple(step.keep(row)) for row in range(3)}


@pytest.mark.parametrize("name", POLICIES)
def test_lengths_do_not_depend_on_the_batch(name: str) -> None:
    together = Step(POLICIES[name], [90, 41, 63])
    together.run(reference)
    for row, n in enumerate(together.prompt_lens):
        alone = Step(POLICIES[name], [n])
        alone.run(reference)
        assert alone.keep(0) == together.keep(row)


def test_solved_and_averaged_prompts_in_one_step() -> None:
    """Each layer shortens the averaged ones at once; the solved ones wait for the last layer."""
    shares = {ALLOCATOR_KEY: {"kind": "shares", "shares": [1.0, 0.0, 3.0]}}
    step = Step(POLICIES["xkv"], [90, 63, 41], overrides={"r0": shares, "r2": shares})
    assert step.evictions.deferred.tolist() == [1]
    solver = make_solver(step.policy)
    for layer in range(LAYERS):
        context = LayerContext(step.retention, layer, deferred=solver)
        context.evict(step.call(layer), step.evictions)
        averaged = step.evictions.plans[0]
        assert isinstance(averaged, EvictionPoint)
        assert step.evictions.tokens_done[0] == averaged.skip[: layer + 1].sum()
        assert bool(step.evictions.tokens_done[1]) == (layer == LAYERS - 1)
    alone = Step(POLICIES["xkv"], [63])
    alone.run(reference)
    assert step.keep(1) == alone.keep(0)
    assert step.keep(0) == [20, 8, 44]
    assert step.keep(2) == [23, 8, 41], "the prompt has no more"
    for row, n in enumerate(step.prompt_lens):
        for layer in range(LAYERS):
            held = int(step.evictions.kept_lens[layer, row])
            kept = reference.select(
                step.scores(row, layer)[None], torch.tensor([n]), torch.tensor([held]), window=8
            )[0].long()
            whole = reference.gather_tokens(step.before[layer][0], step.tables[row], 0, n)
            tail = reference.gather_tokens(step.layers[layer][1], step.tables[row], n - held, n)
            for head in range(KV_HEADS):
                assert torch.equal(tail[:, head], whole[kept[head], head])


def test_no_layer_is_touched_before_the_last_one() -> None:
    step = Step(POLICIES["xkv"], [90, 41])
    solver = make_solver(step.policy)
    step.run(reference, range(LAYERS - 1), solver)
    for (_, key, value), before in zip(step.layers, step.before, strict=True):
        assert torch.equal(key, before[0]) and torch.equal(value, before[1])
    assert all(isinstance(plan, DeferredPlan) for plan in step.evictions.plans)
    step.run(reference, [LAYERS - 1], solver)
    assert not any(isinstance(plan, DeferredPlan) for plan in step.evictions.plans)
    assert not solver._layers, "the scores are kept no longer than needed"


def test_a_step_that_broke_off_leaves_nothing_to_the_next() -> None:
    solver = make_solver(POLICIES["xkv"])
    Step(POLICIES["xkv"], [90]).run(reference, range(2), solver=solver)
    step = Step(POLICIES["xkv"], [41])
    step.run(reference, solver=solver)
    alone = Step(POLICIES["xkv"], [41])
    alone.run(reference)
    assert step.keep(0) == alone.keep(0)


def test_a_layer_left_out_is_a_bug() -> None:
    step = Step(POLICIES["xkv"], [90])
    with pytest.raises(RuntimeError, match="layer 2 came after 1 others"):
        step.run(reference, [0, 2])


@pytest.mark.parametrize("failing", ["measures", "allocate"])
def test_a_request_that_cannot_be_solved_fails_alone(failing, monkeypatch) -> None:
    """Solve prompts of similar length together: one of them fails, the other keeps its lengths."""
    alone = Step(POLICIES["xkv"], [90])
    alone.run(reference)
    step = Step(POLICIES["xkv"], [90, 89])
    allocator = type(step.policy.allocator)
    right = getattr(allocator, failing)
    plan = step.evictions.open_plan(1)
    assert plan.capacity != step.evictions.open_plan(0).capacity

    def fail(self: Any, numbers: Any, mean: int, capacity: int, *args: Any) -> Any:
        if capacity == plan.capacity:
            raise LookupError(failing)
        return right(self, numbers, mean, capacity, *args)

    monkeypatch.setattr(allocator, failing, fail)
    step.run(reference)
    assert set(step.evictions.failures.of) == {"r1"}
    assert f"LookupError: {failing}" in step.evictions.failures.of["r1"].reason
    assert step.keep(0) == alone.keep(0)
    assert len(set(step.keep(1))) == 1


def test_all_ranks_solve_or_none() -> None:
    """Another rank could not score: this one does not wait for it."""
    ranks = TwoRanks()
    step = Step(POLICIES["xkv"], [90])
    ranks.fails_elsewhere = True
    step.run(reference, solver=make_solver(step.policy, ranks), ranks=ranks)
    assert ranks.sent == [] and len(set(step.keep(0))) == 1
    assert step.evictions.failures.of == {}  # the other rank says which


class TwoRanks:
    """Ranks with one KV head each, played one after the other."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        self.lengths: torch.Tensor | None = None
        self.fails_elsewhere = False

    def any(self, is_true: bool) -> bool:
        return is_true or self.fails_elsewhere

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.sent.append(values.clone())
        return values if not self.others else self.others.pop(0) + values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.lengths is None else self.lengths


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_solve_from_all_heads(name: str) -> None:
    """Each rank has half of the heads; together they find the lengths of one rank with all."""
    whole = Step(POLICIES[name], [90, 41])
    whole.run(reference)

    def rank(head: int) -> Step:
        step = Step(POLICIES[name], [90, 41])
        group = HEADS // KV_HEADS
        step.layers = [
            (q[:, head * group : (head + 1) * group], k[:, head : head + 1], v[:, head : head + 1])
            for q, k, v in step.layers
        ]
        return step

    probe = TwoRanks()
    rank(0).run(reference, solver=make_solver(POLICIES[name], probe))
    ranks = TwoRanks()
    ranks.others = list(probe.sent)
    second = rank(1)
    second.run(reference, solver=make_solver(POLICIES[name], ranks))
    for row in range(2):
        assert second.keep(row) == whole.keep(row)


def test_the_first_ranks_lengths_are_everybodys() -> None:
    ranks = TwoRanks()
    ranks.lengths = torch.tensor([[30.0, 10.0, 8.0]], dtype=torch.float64)
    step = Step(POLICIES["xkv"], [90])
    step.run(reference, solver=make_solver(step.policy, ranks))
    assert step.keep(0) == [38, 18, 16]
