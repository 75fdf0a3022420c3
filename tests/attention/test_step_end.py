# SPDX-License-Identifier: Apache-2.0
"""Evictions of all layers at a step's end keep, copy and trace what those of each layer do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretended_device import DeviceTensor, PretendedDevice
from tests.shifted_worker import KV_HEADS, Host, Worker, launch_tables, policies
from tests.steps import make_call
from vllm_pyramid.attention import step_end
from vllm_pyramid.methods.keydiff import KeyDiffScorer
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.eviction_rows import JoinedTables
from vllm_pyramid.step.trace import TraceWriter

PROMPTS = {"a": 70, "b": 45, "c": 106, "d": 58}
STEPS = [{"a": 30, "b": 45, "d": 20}, {"a": 40, "c": 60, "d": 38}, {"a": 1, "b": 1, "c": 46}]
# The same for evictions inside prompts, after each 48 tokens.
PIECES = [
    {"a": 48, "b": 45},
    {"a": 22, "c": 48, "d": 48},
    {"a": 1, "c": 48, "d": 10},
    {"b": 1, "c": 10},
]
SPANS = {"a": [[3, 7], [20, 22]], "d": [[0, 4]]}


def _joined() -> list[Policy]:
    """The policies whose layers are evicted together."""
    with PretendedDevice() as device:
        return [
            policy
            for policy in policies()
            if policy.evicts and Worker(policy, device, PROMPTS, at_step_end=True).joins
        ]


JOINED = _joined()


def _run(
    policy: Policy,
    device: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    at_step_end: bool,
    trace: TraceWriter | None = None,
    copies: bool = False,
    spans: bool = False,
) -> Worker:
    launch_tables(monkeypatch, device)
    more = {"at_step_end": at_step_end, "traces": trace is not None, "spare": 96}
    worker = Worker(policy, device, PROMPTS, answer=8, **more)
    for context in worker.contexts:
        context.trace = trace
    for step in PIECES if policy.chunk.tokens == 48 else STEPS:
        worker.step(step, spans=SPANS if spans else {}, copies=copies)
        if trace is not None and worker.last_evictions is not None:
            assert trace.finish_step(worker.last_evictions) == 0
    monkeypatch.undo()
    return worker


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        pytest.param(policy, what, id=f"{policy.name}-{what}")
        for policy in JOINED
        for what in ("plain", "copies", "spans")
        if what == "plain" or not (policy.heads.splits or policy.chunk.tokens)
    ],
)
def test_the_cache_is_that_of_layers_one_by_one(policy, what, monkeypatch) -> None:
    asked = {what: True} if what != "plain" else {}
    alone = _run(policy, Host(), monkeypatch, at_step_end=False, **asked)
    together = _run(policy, Host(), monkeypatch, at_step_end=True, **asked)
    assert together.joins and not alone.joins
    assert alone.evictions == together.evictions > 1
    assert alone.evicted == together.evicted
    assert torch.equal(alone.cache, together.cache)
    with PretendedDevice() as device:
        on_device = _run(policy, device, monkeypatch, at_step_end=True, **asked)
    assert device.waits == []
    assert torch.equal(alone.cache, on_device.cache)


def test_more_queries_than_may_wait_are_evicted_layer_by_layer(monkeypatch) -> None:
    policy = load_policy("snapkv", "40", args={"window": 16})
    alone = _run(policy, Host(), monkeypatch, at_step_end=False)
    monkeypatch.setattr(step_end, "QUERIES_BYTES", 1)  # one request's wait
    layers: list[int] = []
    evict = step_end.evict_layer
    monkeypatch.setattr(
        step_end,
        "evict_layer",
        lambda p, call, *rest: (layers.append(call.layer), evict(p, call, *rest)),
    )
    worker = Worker(policy, Host(), PROMPTS, answer=8, at_step_end=True, spare=96)
    launch_tables(monkeypatch, Host())
    for step in STEPS:
        worker.step(step)
    assert layers == [0, 1]  # two requests end in the second step
    assert torch.equal(alone.cache, worker.cache)


@pytest.mark.parametrize("name", ["snapkv", "duoattention"])
def test_traces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (policy,) = [one for one in JOINED if one.name == name]
    folders = []
    for at_step_end in (False, True):
        folders.append(tmp_path / str(at_step_end))
        tables = KV_HEADS if policy.heads.splits else 1
        heads = [KV_HEADS // tables] * (2 * tables)
        trace = TraceWriter(
            folders[-1],
            heads,
            0,
            1,
            [i // tables for i in range(2 * tables)],
            tables_per_layer=tables,
        )
        _run(policy, Host(), monkeypatch, at_step_end=at_step_end, trace=trace)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    assert len([name for name in names if name.endswith(".npz")]) == 4
    for file in names:
        if file.endswith(".npz"):
            alone, together = (np.load(folder / file) for folder in folders)
            for key in alone.files:
                np.testing.assert_array_equal(alone[key], together[key], err_msg=f"{file} {key}")


def test_a_scorer_that_raises_ends_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy("keydiff", "40")
    launch_tables(monkeypatch, Host())
    worker = Worker(policy, Host(), PROMPTS, answer=8, at_step_end=True, spare=96)
    score = type(policy.scorer).score

    def of_layer_1(self: Any, inputs: Any) -> torch.Tensor:
        if inputs.layer == 1 and inputs.num_tokens == PROMPTS["a"]:
            raise ArithmeticError("no scores here")
        return score(self, inputs)

    monkeypatch.setattr(type(policy.scorer), "score", of_layer_1)
    for step in STEPS:
        worker.step(step)
    assert set(worker.failed) == {"a"}
    assert "no scores here" in worker.failed["a"].reason


def test_a_scorer_may_look_at_the_last_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without declaring it, also beside a policy for evictions inside prompts that needs more."""

    def of_last(self: Any, inputs: Any) -> torch.Tensor:
        found: torch.Tensor = inputs.reduce_groups(inputs.attention(1)[:, 0])
        return found + inputs.queries[-1].abs().mean()

    chunk = {"tokens": 48, "keep": 24, "scorer": "keydiff"}
    for policy in (
        load_policy("keydiff", "40"),
        load_policy("pyramidkv", "24", args={"window": 8, "chunk": chunk}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(KeyDiffScorer, "score", of_last)
            alone = _run(policy, Host(), pytest.MonkeyPatch(), at_step_end=False)
            together = _run(policy, Host(), pytest.MonkeyPatch(), at_step_end=True)
        assert together.joins and together.failed == {} and together.evictions > 1
        assert torch.equal(alone.cache, together.cache)


def test_joined_tables() -> None:
    memory = torch.arange(4 * 6 * 5, dtype=torch.int32)
    layers = memory.view(4, 6, 5)
    for tables in (
        [layers[0][:3], layers[1][:3], layers[3][:3]],
        [layers[2][:3], layers[0][:3]],
        [layers[1][0::2], layers[1][1::2], layers[3][0::2]],  # rows of two heads in turn
        [layers[0][:, :3], layers[1][:, :3]],
    ):
        joined = _of_tables(tables)
        assert joined.table.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        _check_rows(joined, tables)
    for tables in (
        [layers[0][:3], layers[1][:3].clone()],
        [layers[0], layers[1][:, :5].contiguous()],
    ):
        _check_rows(_of_tables(tables), tables)
    with PretendedDevice() as device:
        put = [device.put(table.clone()) for table in layers]
        joined = _of_tables(put)
        assert isinstance(joined.table, DeviceTensor)


def _of_tables(tables: list[torch.Tensor]) -> JoinedTables:
    return JoinedTables([make_call(table) for table in tables])


def _check_rows(joined: JoinedTables, tables: list[torch.Tensor]) -> None:
    places = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = np.concatenate([np.arange(len(table)) for table in tables])
    found = joined.table[torch.from_numpy(joined.rows(places, rows))]
    assert torch.equal(found, torch.cat(tables))
