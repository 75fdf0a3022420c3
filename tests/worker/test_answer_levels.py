# SPDX-License-Identifier: Apache-2.0
"""Levels of answers in a worker: from queries kept over steps, behind orders and restarts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretended_device import PretendedDevice, data_of
from tests.shifted_worker import BLOCK, LAYERS, SIZE, Host, Worker, launch_tables, marks_of, order
from vllm_pyramid.attention import step_end
from vllm_pyramid.plan import LevelPlan, PlanMismatchError
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step import eviction_memory
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.hooks import LayerHooks, WorkerContext
from vllm_pyramid.step.scorer_inputs import ScorerInputs
from vllm_pyramid.worker import answer_levels
from vllm_pyramid.worker.answer_levels import AnswerLevels

EVERY, WINDOW = 20, 8
PROMPTS = {"a": 70, "b": 45, "c": 101}
START = [{"a": 70, "b": 20}, {"a": 1, "b": 25, "c": 101}]


def _policy(name: str = "snapkv") -> Policy:
    args: dict[str, Any] = {"window": WINDOW, "schedule": "pressure", "schedule.answers": EVERY}
    if name == "auto":
        args["scorer.queries"] = WINDOW
    return load_policy(name, "25%", {**args, "schedule.levels": ["60%"], "min_tokens": 0})


class Queries(LayerHooks):
    """Remembers the query of each position, by layer and request."""

    def __init__(self, context: WorkerContext) -> None:
        self.context, self.of = context, dict[tuple[int, str], dict[int, torch.Tensor]]()

    def after_attention(self, inputs: AttentionInputs) -> None:
        step, query = self.context.step(), data_of(inputs.query)
        rows = iter(query)
        for request, computed, count in zip(
            step.requests, step.computed.tolist(), step.scheduled.tolist(), strict=True
        ):
            known = self.of.setdefault((inputs.layer, request.request_id), {})
            known.update((computed + index, next(rows).clone()) for index in range(count))


def _worker(policy: Policy, device: Any, **more: Any) -> tuple[Worker, AnswerLevels, Queries]:
    worker = Worker(
        policy, device, PROMPTS, answer=96, more=[partial(AnswerLevels, policy), Queries], **more
    )
    return worker, *worker.more


def _rows(worker: Worker, name: str, layer: int, positions: torch.Tensor) -> torch.Tensor:
    """K of positions of a request, `[G, n, D]`."""
    table = worker.tables[layer, list(PROMPTS).index(name)].long()
    rows = data_of(worker.cache)[table[positions // BLOCK], :, positions % BLOCK]
    return rows.transpose(0, 1)[..., :SIZE]


def _expected(
    worker: Worker, queries: Queries, name: str, layer: int, point: int, skip: list[int]
) -> list[list[list[int]]]:
    """What each level keeps by the scorer's definition: places behind `skip`, by level and head."""
    policy, plan = worker.tracker.policy, worker.tracker._requests[name].initial
    assert isinstance(plan, LevelPlan)
    own = skip[layer]
    keys = _rows(worker, name, layer, torch.arange(own, point))
    of_layer = queries.of[layer, name]
    last = torch.stack([of_layer[position] for position in range(point - WINDOW, point)])
    inputs = ScorerInputs.of_tensors(last, keys, keys, window=WINDOW, sinks=policy.sinks)
    scores = policy.scorer.score(inputs)
    scores[:, point - own - WINDOW :] = torch.inf
    found = []
    for level in plan.levels_at(point, torch.tensor(skip, dtype=torch.int32).numpy()):
        order = scores.sort(dim=1, descending=True, stable=True).indices
        found.append(order[:, : int(level.held[layer])].sort().values.tolist())
    return found


def _check(worker: Worker, late: AnswerLevels, queries: Queries, name: str, point: int) -> None:
    levels, of_layers = late._requests[name], marks_of(late, name)
    assert levels.point == point and sorted(of_layers) == list(range(LAYERS))
    skip = levels.skip.tolist()
    for layer, marks in of_layers.items():
        expected = _expected(worker, queries, name, layer, point, skip)
        assert levels.count == len(expected) >= 2
        for level, kept in enumerate(expected):
            rows = marks > level
            assert [row.nonzero().flatten().tolist() for row in rows] == kept, (layer, level)


def test_levels_behind_steps_chunks_orders_and_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point's levels are what the scorer says of the last queries and of what is held."""
    host = Host()
    launch_tables(monkeypatch, host)
    worker, late, queries = _worker(_policy(), host, copies=False)
    for scheduled in START:
        worker.step(scheduled)
    found = late.take_losses()
    assert {name: point for name, (point, _) in found.items()} == PROMPTS
    for count in range(2, EVERY):  # of a; b and c are one step behind
        worker.step({"a": 1, "b": 1, "c": 1} if count % 2 else {"b": 1, "c": 1, "a": 1})
        assert not late.take_losses() and late._requests["a"].point == 70
    worker.step({"a": 1, "b": 1, "c": 1})
    ((name, (point, losses)),) = late.take_losses().items()
    assert (name, point) == ("a", 90) and 0 < losses[0] < losses[1] < 1
    _check(worker, late, queries, "a", 90)
    with pytest.raises(PlanMismatchError, match="up to token 70 and has levels up to token 90"):
        order(worker, late, "a", [(70, 0)])
    worker.tracker._ordered.clear()
    before = _rows(worker, "a", 0, torch.arange(90)).clone()
    kept = _expected(worker, queries, "a", 0, 90, [0, 0])[0]
    order(worker, late, "a", [(90, 0)])
    skip = late._requests["a"].skip.tolist()
    assert skip[0] > 0
    moved = _rows(worker, "a", 0, torch.arange(skip[0], 90))
    assert all(torch.equal(moved[head], before[head, kept[head]]) for head in range(len(kept)))
    # b and c come to their points; c starts again in the middle of its next window.
    worker.step({"c": 1, "b": 1, "a": 1})
    assert {name: point for name, (point, _) in late.take_losses().items()} == {"b": 65, "c": 121}
    _check(worker, late, queries, "b", 65)
    _check(worker, late, queries, "c", 121)
    for _ in range(EVERY - 3):
        worker.step({"a": 1, "b": 1, "c": 1})
    worker.computed["c"] = 0
    worker.step({"a": 1, "b": 1, "c": 101})
    worker.step({"a": 1, "c": 1})  # not b, which has two tokens left to its point
    found = late.take_losses()
    assert {name: point for name, (point, _) in found.items()} == {"a": 110, "c": 101}
    _check(worker, late, queries, "a", 110)  # of what the order left
    assert late._requests["a"].skip.tolist() == skip
    order(worker, late, "a", [(90, 0), (110, 1)])
    assert late._requests["a"].skip[0] > skip[0]
    worker.step({"b": 2, "c": 55})  # a chunk across two points: the last one counts
    found = late.take_losses()
    assert {name: point for name, (point, _) in found.items()} == {"b": 85, "c": 141}
    _check(worker, late, queries, "b", 85)
    _check(worker, late, queries, "c", 141)
    worker.step({"a": 1, "c": 4})
    assert {name: point for name, (point, _) in late.take_losses().items()} == {"c": 161}
    _check(worker, late, queries, "c", 161)
    slots = late._queries
    assert not worker.failed and slots.num_slots == len(slots._free) + len(slots._slots)
    for name in PROMPTS:
        worker.tracker.remove(name)
    assert len(slots._free) == slots.num_slots and not (slots._slots or late._ends)


def test_a_request_without_a_place_keeps_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests come to a point at once, and there are places for the queries of two."""
    of_each = LAYERS * WINDOW * 4 * SIZE * 4
    monkeypatch.setattr(answer_levels, "QUERIES_BYTES", 3 * of_each - 1)
    host = Host()
    launch_tables(monkeypatch, host)
    worker, late, queries = _worker(_policy(), host, copies=False)
    assert late.bytes_of_buffers() == 2 * of_each
    worker.step(PROMPTS)
    late.take_losses()
    late.without = ["a"]  # at its next point
    for count in range(EVERY):
        assert late.take_losses() == {}
        worker.step(dict.fromkeys(PROMPTS, 1))
        # Ranks tell one another of failures at points alone.
        assert late.may_fail(worker.tracker.step) == (count == EVERY - 1)
    found = late.take_losses()
    assert {name: point for name, (point, _) in found.items()} == {"b": 65}
    assert late._requests["c"].point == 101, "the levels of its prompt"
    assert late._requests["a"].point == 70, "no memory for others"
    for _ in range(EVERY):
        worker.step({"c": 1})
    assert list(late.take_losses()) == ["c"]
    _check(worker, late, queries, "c", 141)


def _to_second_point(worker: Worker, late: AnswerLevels) -> list[bool]:
    """Order one request behind the first point; return which steps up to there kept queries."""
    worker.step(PROMPTS)
    eager = []
    for count in range(2 * EVERY):
        requests = [worker.tracker._requests[name] for name in PROMPTS]
        eager.append(late.without_graphs(requests, np.zeros(len(requests), np.int64)))
        worker.step(dict.fromkeys(PROMPTS, 1))
        if count == EVERY:
            order(worker, late, "c", [(PROMPTS["c"] + EVERY, 0)])
    return eager[: EVERY + 2]


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("policy", ["snapkv", "auto", "streaming-llm", "keydiff"])
def test_layers_are_scored_together_on_a_device(monkeypatch, policy, in_pieces) -> None:
    """Their levels are those of layers one by one; no step waits; which keep queries, is told."""
    host = Host()
    launch_tables(monkeypatch, host)
    same, on_host, _ = _worker(_policy(policy), host, copies=False)
    _to_second_point(same, on_host)
    assert {len(one.layers) for one in on_host._requests["a"].marks} == {1}
    if in_pieces:  # of a few rows, and requests whose queries do not wait
        monkeypatch.setattr(eviction_memory, "SCORES_BYTES", 4 * 2 * 300)
        monkeypatch.setattr(step_end, "QUERIES_BYTES", 1)
    with PretendedDevice() as device:
        launch_tables(monkeypatch, device)
        worker, late, _ = _worker(_policy(policy), device, at_step_end=True)
        eager, waits = _to_second_point(worker, late), list(device.waits)
        losses = late.take_losses()  # read back
    assert worker.joins and waits == []
    groups = [len(one.layers) for one in late._requests["a"].marks]
    assert sum(groups) == LAYERS and (in_pieces or groups == [LAYERS])
    kept = late._queries.count
    assert eager == [False] * (EVERY - kept) + [True] * kept + [False] * 2
    assert torch.equal(same.cache, worker.cache)
    same_losses = on_host.take_losses()
    assert set(losses) == set(same_losses) == set(PROMPTS)
    for name, (point, shares) in losses.items():
        assert point == PROMPTS[name] + 2 * EVERY
        assert (point, pytest.approx(shares, abs=1e-6)) == same_losses[name]
        same_marks = marks_of(late, name)
        for layer, marks in marks_of(on_host, name).items():
            assert torch.equal(marks, same_marks[layer])


def test_one_that_fails_at_a_point_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the scheduler ends it, it may order by the levels that it knows, those of before."""
    host = Host()
    launch_tables(monkeypatch, host)
    worker, late, queries = _worker(_policy(), host, copies=False)
    worker.step(PROMPTS)
    late.take_losses()
    for count in range(EVERY):
        worker.spoiled = "b" if count == 5 else None
        worker.step(dict.fromkeys(PROMPTS, 1))
    assert {name: point for name, (point, _) in late.take_losses().items()} == {"a": 90, "c": 121}
    assert list(worker.failed) == ["b"] and worker.failed["b"].kind == "scores"
    cache = worker.cache.clone()
    order(worker, late, "b", [(45, 0)])
    assert torch.equal(cache.nan_to_num(), worker.cache.nan_to_num()), "nothing moves"
    for name in "ac":
        _check(worker, late, queries, name, PROMPTS[name] + EVERY)
