# SPDX-License-Identifier: Apache-2.0
"""What evictions and the choice of pages launch on a device, in a model of 32 layers: counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from tests.pretended_device import DeviceTensor, PretendedDevice, data_of
from tests.shifted_worker import (
    BLOCK,
    HEADS,
    KV_HEADS,
    SIZE,
    SPLITS,
    Host,
    Worker,
    launch_tables,
    order,
)
from vllm_pyramid.attention.backend_flash import PyramidFlashImpl
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.methods.pages.worker import PageSelector
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.worker.answer_levels import AnswerLevels
from vllm_pyramid.worker.late_evictions import LateEvictions

LAYERS = 32
# Of each function of the Triton back end (tests/kernels/triton_matrix/check_launch.py,
# tests/methods/test_observed_expected.py).
LAUNCHES = {"future_queries": 1, "observed_expected_scores": 7}
LAUNCHES |= {"window_scores": 4, "select": 1, "compact": 1, "copy_blocks": 1, "unrankable": 2}
LAUNCHES |= {"summarise_pages": 1, "choose_pages": 2}
# FlashAttention 3 prepares its schedule, attends, and joins the parts of rows that it has split.
LAUNCHES |= {"flash_attention": 3, "paged_attention": 2}
# What is launched in every step, with evictions or without.
OF_STEPS = {"reshape_and_cache", "vllms_attention", "gather_tables", "lane_rows", "lane_slots"}
# Operations of tensors that launch nothing: views, and memory.
VIEWS = {"_reshape_alias", "alias", "as_strided", "detach", "expand", "permute", "select", "slice"}
VIEWS |= {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
VIEWS |= {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "unfold"}


class CountingDevice(PretendedDevice):
    """Counts what is launched while `counts` is not None."""

    counts: Counter[str] | None = None
    largest = 0  # numbers that a tensor operation has written

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        launched, name = super().launch(function), function.__name__.replace("_reference", "")

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.counts is not None and name.rstrip("_") not in OF_STEPS:
                self.counts[name] += LAUNCHES[name]
            return launched(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if self.counts is not None and isinstance(result, DeviceTensor) and name not in VIEWS:
            self.counts[name] += 1
            self.largest = max(self.largest, result.numel())
        return result


def _launches(
    policy: Policy, prompts: int, monkeypatch: pytest.MonkeyPatch, *, at_step_end: bool = True
) -> Counter[str]:
    """Return what a step with the ends of prompts launches more than one without."""
    lens = {f"p{i}": 90 + 3 * i for i in range(prompts)}
    counts = []
    for served in (load_policy("full"), policy):
        with CountingDevice() as device:
            launch_tables(monkeypatch, device)
            more: dict[str, Any] = {"layers": LAYERS, "spare": LAYERS * 64}
            worker = Worker(served, device, lens, at_step_end=at_step_end, **more)
            device.counts = Counter()
            worker.step(lens, copies=served.evicts)
            counts.append(device.counts)
        monkeypatch.undo()
        assert device.waits == [] and worker.failed == {}
        assert worker.evictions == (prompts if served.evicts else 0)
    return counts[1] - counts[0]


POLICIES = {
    "auto": load_policy("snapkv-expected", "40", args={"window": 16}),
    "snapkv": load_policy("snapkv", "40", args={"window": 16}),
    "pyramidkv": load_policy("pyramidkv", "40", args={"window": 8}),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("prompts", "most"), [(1, 60), (8, 80)])
def test_launches_of_prompts_that_end(name, prompts, most, monkeypatch) -> None:
    """At most 60 for one prompt, of which 32 copy queries; at most 80 for eight."""
    counts = _launches(POLICIES[name], prompts, monkeypatch)
    print(dict(counts))
    assert counts["index_select"] >= LAYERS and counts["compact"] >= 1
    assert counts["copy_blocks"] == 1
    assert LAYERS < counts.total() <= most


def test_layer_by_layer_launches_many_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _launches(POLICIES["snapkv"], 1, monkeypatch, at_step_end=False)
    assert counts["compact"] == LAYERS and counts.total() > 400


@pytest.mark.parametrize("name", POLICIES)
def test_launches_of_levels_and_orders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of a prompt, in 32 layers: at most 110, of which 32 copy queries; an order: 20."""
    args = {"schedule": "pressure", "min_tokens": 0, "window": POLICIES[name].window}
    policy = load_policy(POLICIES[name].name, "20%", args=args)
    counts, more = [], {"layers": LAYERS, "spare": LAYERS * 64, "at_step_end": True}
    for served, hooks in ((load_policy("full"), []), (policy, [partial(LateEvictions, policy)])):
        with CountingDevice() as device:
            launch_tables(monkeypatch, device)
            worker = Worker(served, device, {"a": 190}, more=hooks, **more)
            device.counts = Counter()
            worker.step({"a": 190})
            counts.append(device.counts)
            if hooks:
                device.counts = Counter()
                order(worker, worker.more[0], "a", [(190, 0)])
                of_order = device.counts
        monkeypatch.undo()
        assert device.waits == [] and worker.failed == {}
    of_levels = counts[1] - counts[0]
    print(dict(of_levels), dict(of_order))
    assert of_levels["select"] == 3 and LAYERS < of_levels.total() <= 110
    assert of_order["compact"] == 1 and of_order.total() <= 20


@pytest.mark.parametrize("name", POLICIES)
def test_launches_of_levels_of_an_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 75, and 32 that copy queries, more than a step that keeps a query: 64 of these."""
    args = {"schedule": "pressure", "schedule.answers": 64, "min_tokens": 0}
    args |= {"window": POLICIES[name].window}
    policy = load_policy(POLICIES[name].name, "20%", args=args)
    counts, more = [], {"layers": LAYERS, "spare": LAYERS * 64, "at_step_end": True}
    with CountingDevice() as device:
        launch_tables(monkeypatch, device)
        worker = Worker(
            policy, device, {"a": 190}, 64, more=[partial(AnswerLevels, policy)], **more
        )
        worker.step({"a": 190})
        for _ in range(64):
            device.counts = Counter()
            worker.step({"a": 1})
            counts.append(device.counts)
    assert device.waits == [] and worker.failed == {} and worker.more[0]._requests["a"].point == 254
    print(dict(counts[-2]), dict(counts[-1]))
    assert counts[0].total() == 0 and counts[-2].total() <= 2 * LAYERS + 1
    of_levels = counts[-1] - counts[-2]
    assert of_levels["index_select"] >= LAYERS and of_levels["select"] == 3
    assert LAYERS < of_levels.total() <= LAYERS + 75


# The choice of pages ------------------------------------------------------------------------------

LONGEST = 4096  # tokens of a sequence that the model takes
PAGES = LONGEST // BLOCK
SELECT = {"attend": {"budget": 64, "min_tokens": 0, "sinks": 16, "recent": 16, "dense_layers": 2}}


class FlashLists:
    """Attends to lists of pages by the code of the FlashAttention back end.

    Args:
        apart: whether a row's query lies next to its keys and values, as a model without rotary
            kernels of its own leaves it.
    """

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch, *, apart: bool) -> None:
        self.worker, self.apart = worker, apart
        self.impl: Any = object.__new__(PyramidFlashImpl)
        self.impl._takes_quantised = False
        self.impl.num_heads, self.impl.num_kv_heads, self.impl.head_size = HEADS, KV_HEADS, SIZE
        self.impl.sinks, self.rows = None, 0
        monkeypatch.setattr(FlashAttentionImpl, "forward", self._forward)
        self._attend = worker.device.launch(flash_attention)

    def inputs(self, call: AttentionInputs) -> AttentionInputs:
        """Return what the back end would pass to the method."""
        cache = self.worker.kv_cache(call.layer)
        call = replace(call, head_names=self.impl.names_of_heads(cache))
        if not self.apart:
            return call
        rows = data_of(call.query)
        wide = torch.zeros(len(rows), HEADS + 2 * KV_HEADS, SIZE)
        wide[:, :HEADS] = rows
        query = self.worker.device.put(wide)[:, :HEADS]
        return replace(call, batch=replace(call.batch, query=query))

    def __call__(self, out: Any, attended: AttentionInputs) -> None:
        cache, metadata = self.worker.kv_cache(attended.layer), SimpleNamespace()
        assert attended.head_requests is not None
        self.impl.attend_to_lists(None, attended, cache, metadata, out)

    def _forward(self, impl: Any, layer: Any, query: Any, key: Any, value: Any, *more: Any) -> None:
        """In place of vLLM's, whose kernels are launched without an operation beside them."""
        cache, metadata, out = more
        assert (impl.num_heads, impl.num_kv_heads) == (HEADS // KV_HEADS, 1)
        assert metadata.num_actual_tokens == len(query) == len(metadata.seq_lens)
        self._attend(
            *(out, query, cache, metadata.block_table, metadata.query_start_loc), metadata.seq_lens
        )


def flash_attention(out: Any, query: Any, cache: Any, table: Any, starts: Any, lens: Any) -> None:
    keys, values = cache[..., :SIZE], cache[..., SIZE:]
    batch = AttentionBatch(query, keys, values, table, starts, lens, torch.zeros_like(lens))
    reference.paged_attention(out, batch, Softmax(SIZE**-0.5))


def _decode(
    layers: int, graphs: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter[str], CountingDevice, Worker]:
    """Return what a step launches in which all rows choose, and one of them fills a page."""
    prompts = {"a": 150, "b": 240, "c": 174}
    with CountingDevice() as device:
        launch_tables(monkeypatch, device)
        more: dict[str, Any] = {"layers": layers, "graphs": graphs, "answer": LONGEST - 240}
        worker = Worker(load_policy("select", args=SELECT), device, prompts, **more)
        worker.step(prompts)
        worker.attends_to_lists = FlashLists(worker, monkeypatch, apart=apart)
        worker.step(dict.fromkeys(prompts, 1))
        (selector,) = worker.hooks.cache
        assert isinstance(selector, PageSelector)
        if (rows := selector._decode_rows) is not None:
            assert rows.pages == PAGES and rows.scores.shape[2] == PAGES
            data_of(rows.scores).fill_(777.0)
            data_of(rows.lists.block_table).fill_(-5)
        device.counts, filled = Counter(), data_of(selector.summaries.rows).clone()
        worker.step(dict.fromkeys(prompts, 1))
        counts, device.counts = device.counts, None
    monkeypatch.undo()
    assert device.waits == [] and worker.failed == {}
    # 151, 241 and 175 tokens and one more: the last fills a page.
    changed = (data_of(selector.summaries.rows) != filled).flatten(1).any(dim=1)
    assert changed.sum() == layers - 2
    if rows is not None:
        _check_writes(worker, rows)
    return counts, device, worker


def _check_writes(worker: Worker, rows: Any) -> None:
    """Of tensors as wide as the longest sequence: what the rows' own pages need, and no more."""
    scores, lists = data_of(rows.scores), data_of(rows.lists.block_table)
    for s, computed in enumerate(worker.computed.values()):
        candidates = (computed - 1) // BLOCK
        assert (scores[s, :, candidates:] == 777).all()
        assert (scores[s, ::2, :candidates] != 777).all()
        assert (lists[s, :, 4:] == -5).all() and (lists[s, :, :4] >= 0).all()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("graphs", [True, False])
def test_launches_of_a_layer_that_chooses(graphs, apart, monkeypatch) -> None:
    """At most six, and no tensor operation writes as much as a list of the longest sequence."""
    few, _, _ = _decode(4, graphs, apart, monkeypatch)
    many, device, worker = _decode(9, graphs, apart, monkeypatch)
    of_layer = {name: (many[name] - few[name]) / 5 for name in many if many[name] != few[name]}
    assert of_layer == {"choose_pages": 2, "flash_attention": 3} | ({"clone": 1} if apart else {})
    assert sum(of_layer.values()) <= 6
    assert few.total() - 2 * sum(of_layer.values()) <= (9 if graphs else 20)  # of the step
    assert 0 < device.largest < PAGES
    right = Worker(
        *(load_policy("select", args=SELECT), Host(), worker.prompts, LONGEST - 240), layers=9
    )
    launch_tables(monkeypatch, right.device)
    for scheduled in (worker.prompts, *[dict.fromkeys(worker.prompts, 1)] * 2):
        right.step(scheduled)
    assert len(worker.outs) == len(right.outs) == 2 * 7
    for out, wanted in zip(worker.outs, right.outs, strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)


# Tables of a step ---------------------------------------------------------------------------------

PROMPTS = {f"p{i}": 90 + 3 * i for i in range(4)}
OF_TABLES = {"gather_tables", "lane_rows", "lane_slots"}


class CountingTables(PretendedDevice):
    """Counts what a step launches before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.inside = False

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        launched, name = super().launch(function), function.__name__.removesuffix("_reference")

        def counted(*args: Any, **kwargs: Any) -> Any:
            if name in OF_TABLES:
                self.counts[name] += 1
            return launched(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if self.inside and isinstance(result, DeviceTensor) and name not in VIEWS:
            self.counts[name] += 1
        return result


def _of_step(worker: Worker, device: CountingTables, scheduled: dict[str, int]) -> Counter[str]:
    """Return what the tables of a step launch."""
    follow = worker.shifted.follow

    def counted(*args: Any) -> None:
        device.inside = True
        follow(*args)
        device.inside = False

    worker.shifted.follow = counted
    device.counts.clear()
    worker.step(scheduled)
    worker.shifted.follow = follow
    return Counter(device.counts)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", ["pyramidkv", "heads"])
def test_tables_of_a_step_are_one_launch(name, held, monkeypatch) -> None:
    """With the lengths of 32 layers; two in the step behind an eviction, which sends skips."""
    policy = POLICIES.get(name)
    if policy is None:
        policy = load_policy("duoattention", *SPLITS["duoattention"])
    slots = {"lane_rows": 1, "lane_slots": 1} if name == "heads" else {}
    with CountingTables() as device:
        launch_tables(monkeypatch, device)
        layers = 2 if name == "heads" else LAYERS
        worker = Worker(policy, device, PROMPTS, layers=layers, held=held)
        decode = dict.fromkeys(PROMPTS, 1)
        assert _of_step(worker, device, PROMPTS) == Counter({"gather_tables": 1, **slots})
        behind = _of_step(worker, device, decode)
        assert behind == Counter({"gather_tables": 1, "_to_copy": 1, "index_copy_": 1, **slots})
        for _ in range(2):
            assert _of_step(worker, device, decode) == Counter({"gather_tables": 1, **slots})
    assert worker.evictions == len(PROMPTS) and device.waits == []
