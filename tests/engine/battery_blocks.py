# SPDX-License-Identifier: Apache-2.0
"""What holds for every policy, on one engine that is running: failures, and blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.bench import Bench, fresh, small_pool, step_tokens, stock_blocks
from tests.engine.matrix import BLOCK
from tests.engine.support import Engine
from tests.scheduler.checks import check_pool
from vllm_pyramid.policy.planning import peak_blocks_up_to

# Failures --------------------------------------------------------------------------------------


def nan_ends_one_request(bench: Bench) -> None:
    """NaN in the keys of one request: it ends with an error, and no other hears of it."""
    engine = bench.engine
    jobs = bench.jobs((150, 233, 97))
    alone = [engine.run([job])[0] for job in jobs]
    poisoned: list[str] = []

    def poison(engine: Engine) -> None:
        for request in engine.scheduler.running:
            if poisoned or request.num_prompt_tokens != 400 or not request.num_computed_tokens:
                continue
            poisoned.append(request.request_id)
            for layer in engine.attention_layers(evicting=True):
                manager = manager_of(engine, layer)
                at = (request.num_computed_tokens - 1) // manager.block_size
                at *= engine.tables_per_layer
                block = manager.req_to_blocks[request.request_id][at]
                layer.impl._split(layer.kv_cache)[0][block.block_id] = torch.nan

    with step_tokens(engine, 256):
        cursed = bench.jobs((400,))[0]
        outcomes = engine.run([cursed, *fresh(jobs)], poison)
    assert poisoned
    (ended,) = outcomes[0].output.outputs
    assert ended.finish_reason == "error" and bool(ended.token_ids) == bench.keeps_prompts
    bench.check_same(outcomes[1:], alone)
    engine.shuffle_blocks()
    bench.check_same(engine.run(fresh(jobs)), alone)  # in blocks that hold NaN


def manager_of(engine: Engine, layer: Any) -> Any:
    """The manager of a layer's tables: of one, or of each of its KV heads in turn."""
    return engine.coordinator.layer_managers[layer.impl.context.layer]


def a_raising_scorer_ends_one_request(bench: Bench) -> None:
    """Those that decode in the same step, and those behind it, get the tokens they get alone."""
    engine, scorer = bench.engine, bench.policy.scorer
    jobs = bench.jobs((150, 233, 97, 61), 24)
    alone = [engine.run([job])[0] for job in jobs]
    inner = bench.policy.inner_policy
    names = {type(scorer): "scores"} | ({type(inner.scorer): "scores"} if inner else {})
    hooks = engine.attention_layers(evicting=True)[0].impl.context.hooks
    for own in (hooks.scorer, hooks.scorer_inside):
        if own is not None:
            names[type(own)] = "score"
    raised = []

    def raising(score: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if 403 in batch.evictions.prompt_lens[batch.shortened]:
                raised.append(len(batch.shortened))
                raise KeyError("a scorer of the user's own")
            return score(self, batch, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in names.items():
            patch.setattr(kind, name, raising(getattr(kind, name)))
        cursed = replace(bench.jobs((403,))[0], arrival=8)
        late = replace(fresh(jobs)[3], arrival=18)
        outcomes = engine.run([*fresh(jobs)[:3], cursed, late])
    assert raised and set(raised) == {1}, "it came to its eviction alone"
    (ended,) = outcomes[3].output.outputs
    assert ended.finish_reason == "error" and bool(ended.token_ids) == bench.keeps_prompts
    bench.check_same([*outcomes[:3], outcomes[4]], alone)


# Blocks ----------------------------------------------------------------------------------------


def the_report_counts_blocks(bench: Bench) -> None:
    """Step by step the whole prompt until it has been processed, then what the report says."""
    engine, coordinator = bench.engine, bench.engine.coordinator
    sizes = coordinator.layer_blocks.block_sizes
    counters, seen = coordinator.counters, {}
    before = counters.tokens_evicted.copy(), counters.blocks_freed.copy()

    def record(engine: Engine) -> None:
        check_pool(engine.coordinator)
        for request in engine.scheduler.running:
            held = np.array(coordinator.blocks_held(request.request_id))
            seen.setdefault(request.request_id, []).append((request.num_computed_tokens, held))

    given = np.zeros_like(sizes, dtype=np.int64)
    freed = np.zeros_like(given)
    with step_tokens(engine, max(200, bench.case.least_step)):
        outcomes = engine.run(bench.jobs(), record)
    for outcome in outcomes:
        n, report = len(outcome.job.prompt), outcome.report
        last = report.get("computed_tokens", n)
        kept = np.array(report["kept_tokens"])
        skips = last - kept
        given += skips
        freed += skips // sizes
        assert report["evicted_tokens"] == skips.sum()
        assert report["blocks_after"] == (-(-last // sizes) - skips // sizes).sum()
        if bench.policy.fill_blocks and bench.case.evicts:
            assert not (skips % BLOCK).any()
        for computed, held in seen[outcome.request_id]:
            whole = -(-computed // sizes)
            if computed <= n and not report.get("inner_evictions"):
                assert (held == whole).all()
            elif computed > last:
                assert (held == whole - skips // sizes).all()
            assert (held <= whole).all()
    assert (counters.tokens_evicted - before[0] == given).all()
    assert (counters.blocks_freed - before[1] == freed).all()
    assert bool(given.any()) == bench.case.evicts


def a_pool_of_one_prompts_peak_is_enough(bench: Bench) -> None:
    """The plan's bound on the blocks of a prompt and its answer is what they take at most."""
    engine, layer_blocks = bench.engine, bench.engine.coordinator.layer_blocks
    size, num_layers = layer_blocks.full_block_size, layer_blocks.num_tables
    peak = int(peak_blocks_up_to(bench.policy, 520 + 30, num_layers, size).sum())
    peak += stock_blocks(bench, 520 + 30)
    expected = engine.run(bench.jobs((520, 57), 30))
    with small_pool(engine, peak):
        found = engine.run(bench.jobs((520, 57), 30), bench.look, max_steps=500)
    bench.check_same(found, expected)
