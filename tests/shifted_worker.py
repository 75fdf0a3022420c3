# SPDX-License-Identifier: Apache-2.0
"""Steps of a worker whose attention reads shifted tables, as on CUDA, without vLLM.

The kernels are the reference; vLLM's attention runs only in tests that compare its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.models.llama import LlamaModel

from tests.kernels import table_twins
from tests.kernels.every_kernel import contracts_of
from tests.methods.views import cos_sin, made_up_centres
from tests.plans import THINS
from tests.plumbing.stand_ins import LateCopies
from tests.pretended_device import data_of
from tests.steps import make_call, make_context
from vllm_pyramid.attention.backend_cuda import PyramidImplMixin
from vllm_pyramid.attention.deferred import DeferredEviction
from vllm_pyramid.attention.layer_context import LayerContext, own_inputs
from vllm_pyramid.attention.per_head.context import HeadContext
from vllm_pyramid.attention.per_head.layout import HeadTableLayout
from vllm_pyramid.attention.shifted_tables import HeldTables, Slots
from vllm_pyramid.attention.step_end import StepEndEviction
from vllm_pyramid.attention.table_layout import TableLayout
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import AttentionBatch, Softmax
from vllm_pyramid.kernels.triton import lanes as triton_lanes
from vllm_pyramid.kernels.triton import tables as triton_tables
from vllm_pyramid.methods.pages.kernels import PageOps
from vllm_pyramid.methods.triattention import TriAttentionScorer
from vllm_pyramid.plan import LateEviction
from vllm_pyramid.policy import Policy, load_policy, policy_names
from vllm_pyramid.policy.capabilities import Feature
from vllm_pyramid.step.attention_inputs import CacheWrite
from vllm_pyramid.step.failures import Failure
from vllm_pyramid.step.hooks import MethodHooks, WorkerContext, WorkerHooks
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.worker.eviction_tracker import EvictionTracker
from vllm_pyramid.worker.late_evictions import LateEvictions
from vllm_pyramid.worker.step_tables import StepTables

LAYERS, KV_HEADS, HEADS, SIZE, BLOCK = 2, 2, 4, 16, 16
STEP_TOKENS = 1 << 12
# Budgets and settings of policies that give each KV head a length: one head of each layer, and of
# all layers one, keeps everything.
MASK = [[0.9, 0.1], [0.2, 0.8]]
SPLITS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "duoattention": (None, {"mask": MASK, "heads.sinks": 8, "heads.recent": 24}),
    "razorattention": (None, {"mask": MASK, "heads.recent": 16, "share": 0.25}),
}


class Host:
    """Stands in for a device: everything is on the host."""

    device = torch.device("cpu")

    def put(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def vllms_attention(*args: Any) -> None:
    """Attend as vLLM's kernel does, which vLLM launches and warms up."""
    reference.paged_attention(*args)


def kernels(device: Any) -> Ops:
    """Return the reference, which requires the arguments that spare CUDA's kernels a read-back."""
    launched = {
        name: device.launch(getattr(module, name))
        for contract, module, name in contracts_of(reference)
        if contract is not PageOps  # of the host alone
    }

    def asks(name: str, known: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert known(*args, **kwargs), f"{name} would read a maximum back"
            return launched[name](*args, **kwargs)

        return call

    def of_mass(pages: Any, batch: Any, *_: Any, **kwargs: Any) -> bool:
        return batch.max_query_len is not None and batch.max_seq_len is not None

    def of_window(batch: Any, *_: Any, **kwargs: Any) -> bool:
        return batch.max_prompt_len is not None

    def of_topn(*_: Any, choosers: Any = None, **kwargs: Any) -> bool:
        return choosers is not None

    def of_recent(batch: Any, *_: Any, **kwargs: Any) -> bool:
        return batch.max_context is not None and batch.max_recent is not None

    def of_attention(out: Any, batch: Any, *_: Any, **kwargs: Any) -> bool:
        return batch.max_query_len is not None and batch.max_seq_len is not None

    def of_select(*_: Any, max_keep: int | None = None, **kwargs: Any) -> bool:
        return max_keep is not None

    def of_summaries(*_: Any, max_pages: int | None = None, **kwargs: Any) -> bool:
        return max_pages is not None

    def of_pages(batch: Any, *_: Any, **kwargs: Any) -> bool:
        return batch.max_pages is not None

    found: Any = SimpleNamespace(**launched)
    found.of_method = lambda package: found  # those of all methods
    for name, known in (
        ("add_key_mass", of_mass),
        ("paged_attention", of_attention),
        ("recent_mass", of_recent),
        ("topn_attention", of_topn),
        ("window_scores", of_window),
        ("observed_expected_scores", of_window),
        ("select", of_select),
        ("summarise_pages", of_summaries),
        ("choose_pages", of_pages),
    ):
        setattr(found, name, asks(name, known))
    return found


class InnerLlama(torch.nn.Module):
    """A model with an inner module whose loop over the layers is known."""

    def __init__(self) -> None:
        super().__init__()
        self.model = object.__new__(LlamaModel)


class StockImpl:
    """Attends as vLLM's implementations do, by a worker's attention."""

    worker: Worker

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any
    ) -> None:
        batch = AttentionBatch(
            *(query, cache[..., :SIZE], cache[..., SIZE:], metadata.block_table),
            *(metadata.query_start_loc, metadata.seq_lens, metadata.kv_no_skips),
        )
        self.worker.attention(output, batch, Softmax(SIZE**-0.5))


class LanesImpl(PyramidImplMixin, StockImpl):
    """Ours over it, for layers whose KV heads have tables of their own."""

    num_heads, num_kv_heads = HEADS, KV_HEADS

    def __init__(self, worker: Worker, context: LayerContext) -> None:
        self.worker, self.context = worker, context


class Worker:
    """The steps of a worker whose attention reads shifted tables.

    Args:
        prompts: their lengths by name. answer: tokens that may follow them.
        copies: whether the device has a memory of its own, and a stream for copies.
        at_step_end: whether all layers are evicted at a step's end, where the policy allows it.
        traces: whether they leave queries for a trace.
        held: whether the tables of all requests stand apart, as under vLLM's second runner.
        spare: blocks that no request has. layers: None: as many as the policy needs.
        more: makes hooks that work in addition to the policy's.

    Attributes:
        outs: the outputs of a method's attention, or of attention to pages of each KV head, of each
            step and layer. calls: their inputs.
        attends_to_lists: what does that in place of the kernels; None: these do.
        survived: the tokens that reach the last layer, of each step whose prompts are thinned.
        reports: the methods' reports of the steps. more: the hooks in addition to the policy's.
        spoiled: the prompt whose keys are NaN, or None. failed: what the steps report of it.
    """

    spoiled: str | None = None

    def __init__(
        self,
        policy: Policy,
        device: Any,
        prompts: Mapping[str, int],
        answer: int = 32,
        *,
        copies: bool = True,
        graphs: bool = False,
        at_step_end: bool = False,
        traces: bool = False,
        held: bool = True,
        spare: int = 0,
        layers: int | None = None,
        more: Sequence[Callable[[WorkerContext], WorkerHooks]] = (),
    ) -> None:
        self.device, self.prompts = device, prompts
        self.ops = kernels(device) if copies else reference
        self.attention = device.launch(vllms_attention) if copies else vllms_attention
        needed = 4 if policy.attends or policy.allocator.thins_prompts else LAYERS
        self.layers = layers or needed
        # KV heads with tables of their own: a block has the tokens of one of them.
        self.lanes = KV_HEADS if policy.heads.splits else 1
        sizes = [
            self.lanes * BLOCK if policy.values.on_device(layer) else 2 * BLOCK
            for layer in range(self.layers)
        ]
        self.longest = -(-(max(prompts.values()) + answer) // BLOCK) * BLOCK
        shapes = [(self.lanes * -(-self.longest // size), size) for size in sizes]
        width = max(width for width, _ in shapes)
        used = self.layers * len(prompts) * width + 1
        blocks = used + spare
        self.spare = list(range(used, blocks))
        self.tracker = EvictionTracker(
            policy, self.layers * self.lanes, max(sizes), len(prompts) + 1
        )
        self.copies = LateCopies() if not policy.copies_blocks and copies else None
        context = make_context(
            self.layers,
            heads=KV_HEADS,
            block_size=max(sizes),
            tracker=self.tracker,
            device=device.device,
            specs=[
                SimpleNamespace(
                    layer_idx=layer,
                    num_kv_heads=KV_HEADS,
                    block_size=size,
                    head_size=SIZE,
                    dtype=torch.float32,
                    page_size_bytes=BLOCK * KV_HEADS * 2 * SIZE * 4,
                )
                for layer, size in enumerate(sizes)
            ],
            config=SimpleNamespace(
                model_config=SimpleNamespace(
                    max_model_len=self.longest,
                    dtype=torch.float32,
                    get_num_attention_heads=lambda parallel: HEADS,
                ),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
                scheduler_config=SimpleNamespace(
                    max_num_batched_tokens=STEP_TOKENS, max_num_seqs=len(prompts)
                ),
            ),
            whole_graphs=lambda: graphs,
            at_step_end=lambda: self.joins,
            host_memory=lambda count: SimpleNamespace(
                bytes=device.put(torch.zeros(count, dtype=torch.uint8)), release=lambda: None
            ),
            copies=self.copies,
            table=lambda layer: self.shifted.tables[layer],
            model=InnerLlama,
        )
        self.more: list[Any] = [make(context) for make in more]
        self.hooks = MethodHooks([*policy.worker_hooks(context), *self.more])
        self.tracker.hooks = self.hooks
        for hooks in self.hooks.cache:
            hooks.allocate(blocks)
        layout = TableLayout()
        if policy.heads.splits:
            layout = HeadTableLayout(self.lanes, max(sizes))
        self.held = [torch.zeros(len(prompts), wide, dtype=torch.int32) for wide, _ in shapes]
        self.shifted: Any = layout.device_tables(
            *(slice(0, self.layers), len(prompts), STEP_TOKENS, shapes, device.device),
            HeldTables([device.put(table) for table in self.held]) if held else None,
        )
        self.random = torch.Generator().manual_seed(1)
        rotary = Rotary(device.put(cos_sin(SIZE, 4096)))
        if policy.scorer.looks_ahead:  # read when layers are bound
            _ = rotary.frequencies
            getattr(device, "waits", []).clear()
        deferred = DeferredEviction.of(policy, self.hooks, self.layers)
        step_end = None
        if at_step_end:
            step_end = StepEndEviction.of(
                *(policy, self.hooks, self.layers * self.lanes),
                tables_per_layer=self.lanes,
                traces=traces,
            )
        make = layout.context_factory()
        shared = rotary, None, self.shifted, deferred, step_end
        self.contexts = [
            make(self.tracker, layer, self.hooks, None, *shared) for layer in range(self.layers)
        ]
        shape = (blocks, KV_HEADS, BLOCK, 2 * SIZE)  # all layers take their blocks from one cache
        self.cache = torch.randn(shape, generator=self.random)
        order = torch.randperm(used - 1, generator=self.random) + 1  # no request uses block 0
        self.tables = order.int().view(self.layers, len(prompts), width)
        for table, layer in zip(self.held, self.tables, strict=True):
            table.copy_(layer[:, : table.shape[1]])
        for layer, context in enumerate(self.contexts):
            if not policy.values.on_device(layer):
                cache = self.kv_cache(layer)
                found = (hooks.value_cache(layer, cache) for hooks in self.hooks.cache)
                context.values = next(found)
        # At the same addresses in every step, as vLLM's.
        self.slots = torch.zeros(self.layers, STEP_TOKENS, dtype=torch.int64)
        self.outs: list[torch.Tensor] = []
        self.survived: list[torch.Tensor] = []
        self.reports: list[dict[str, Any]] = []
        self.failed: dict[str, Failure] = {}
        self.calls: list[Any] = []
        self.computed = dict.fromkeys(prompts, 0)
        self.evictions = 0
        self.evicted: list[Any] = []
        self.last_evictions: StepEvictions | None = None
        self.joins = step_end is not None
        self.attends_to_lists: Any = None

    def kv_cache(self, layer: int) -> torch.Tensor:
        """Return the cache of K and V, `[P, G, N, 2 * D]`, or of K alone, `[P, G, 2 * N, D]`."""
        cache = self.cache
        if not self.tracker.policy.values.on_device(layer):
            cache = cache.view(*cache.shape[:2], 2 * BLOCK, SIZE)
        if self.tracker.policy.heads.splits:
            cache = cache.view(len(cache), 1, KV_HEADS * BLOCK, 2 * SIZE)
        whole: torch.Tensor = self.device.put(cache)
        return whole

    def host_values(self) -> torch.Tensor | None:
        """Return all V on the host."""
        caches = [data_of(c.values) for c in self.contexts if c.values is not None]
        return caches[0] if caches else None

    def _step_in_lanes(
        self,
        context: LayerContext,
        step: Any,
        starts: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
    ) -> None:
        """One layer whose KV heads have tables of their own, by the back end's own code."""
        put, layer = self.device.put, context.layer
        tokens, cache = len(query), self.kv_cache(layer)
        caches = cache[..., :SIZE], cache[..., SIZE:]
        # vLLM's slots are not read.
        keys, values, slots = context.to_write(None, put(key), put(value), put(torch.empty(tokens)))
        self.ops.reshape_and_cache(keys, values, *caches, slots)
        most_queries = int(step.scheduled.max())
        metadata: Any = SimpleNamespace(
            num_reqs=len(starts) - 1,
            num_actual_tokens=tokens,
            query_start_loc=starts,
            slot_mapping=range(tokens),  # vLLM's, which are not read
            max_query_len=most_queries,
        )
        self.shifted.describe(metadata, layer)
        metadata.block_table = metadata.block_table_tensor
        self.shifted.complete(metadata, metadata, layer)
        assert (metadata.kv_order is None) == (most_queries == 1)
        out = torch.full_like(query, torch.nan)
        impl = LanesImpl(self, context)
        attend = context.attention_of(impl)
        attend(None, put(query), None, None, cache, metadata, put(out))
        self.outs.append(out)
        call = make_call(
            metadata.block_table,
            layer=layer,
            ops=self.ops,
            query=put(query),
            caches=caches,
            starts=metadata.query_start_loc,
            lens=metadata.seq_lens,
            skips=metadata.kv_no_skips,
            scale=SIZE**-0.5,
            rotary=context.rotary,
            offsets=metadata.kv_offsets,
        )
        maxima = {"max_query_len": most_queries, "max_seq_len": metadata.max_seq_len}
        context.after_attention(replace(call, batch=replace(call.batch, **maxima)), put(out))

    def step(
        self, scheduled: dict[str, int], *, spans: Mapping[str, Any] = {}, copies: bool = False
    ) -> None:
        """Compute some tokens of each request.

        Args:
            spans: that stay, by request. copies: whether what evictions overwrite is copied.
        """
        put, names = self.device.put, list(scheduled)
        columns = [
            np.array([source[name] for name in names], np.int32)
            for source in (self.prompts, self.computed, scheduled)
        ]
        for name in names:
            if not self.computed[name]:
                more = {"kv_keep": spans[name]} if name in spans else None
                self.tracker.add(name, self.prompts[name], more)
        self.tracker.copies = {}
        if copies:
            for name in names:
                point = self.tracker._requests[name].plan.after(1)
                if self.computed[name] < point.computed <= self.computed[name] + scheduled[name]:
                    count = int(point.blocks_behind.sum())
                    self.tracker.copies[name] = [self.spare.pop() for _ in range(count)]
        step = self.tracker.begin_step(names, *columns)
        _, computed, tokens = columns
        rows = len(names)
        own = self.tables[:, [list(self.prompts).index(name) for name in names]]
        slots = None
        if self.shifted.groups.by_slot:
            places = np.array([list(self.prompts).index(name) for name in names])
            slots = Slots(places, put(torch.from_numpy(places)), put(torch.zeros(1, 1).int()))
        else:
            for table, layer in zip(self.shifted.of_runner, own, strict=True):
                data_of(table)[:rows] = layer[:, : table.shape[1]]  # as vLLM fills them
        lens = torch.from_numpy(computed + tokens)
        tables: Any = SimpleNamespace(shifted=self.shifted)
        layout = step.layout
        entered = put(torch.arange(int(tokens.sum())))
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(tokens).cumsum(0)
        StepTables.shift(tables, put(lens), put(starts), step, computed + tokens, slots)
        assert self.shifted.max_lens is not None
        for layer, context in enumerate(self.contexts):
            cache, elsewhere = self.kv_cache(layer), context.values is not None
            caches = cache[..., :SIZE], cache[..., SIZE:]
            if context.values is not None:
                caches = cache, context.values
            size = caches[0].shape[2]
            slots = torch.cat(
                [
                    own[layer, row][places // size].long() * size + places % size
                    for row in range(rows)
                    for places in [torch.arange(computed[row], computed[row] + tokens[row])]
                ]
            )
            starts_there, most_queries = put(starts), int(tokens.max())
            count = len(entered)
            if layout is not None:
                assert count == layout.query_starts[layer, -1]
                starts_there = layout.starts_on(layer, self.device.device)
                most_queries = int(np.diff(layout.query_starts[layer]).max())
            key, value = torch.randn(2, count, KV_HEADS, SIZE, generator=self.random)
            query = torch.randn(count, HEADS, SIZE, generator=self.random)
            if self.spoiled in names:
                row = names.index(self.spoiled)
                ends = np.cumsum(tokens) if layout is None else layout.query_starts[layer, 1:]
                key[ends[row - 1] if row else 0 : ends[row]] = torch.nan
            if isinstance(context, HeadContext):
                self._step_in_lanes(context, step, put(starts), key, value, query)
                continue
            own_slots = self.slots[layer][: len(slots)].copy_(slots)
            _, _, written = context.to_write(None, key, value, put(own_slots))
            given = value.clone()
            if elsewhere and self.copies is not None:
                self.ops.write_rows(put(key), caches[0], put(own_slots))
            else:
                self.ops.reshape_and_cache(put(key), put(given), *caches, written)
            context.after_write(CacheWrite(self.ops, layer, put(key), put(given), *caches, written))
            given.fill_(torch.nan)  # a graph uses its memory for something else
            call = make_call(
                self.shifted.tables[layer][:rows],
                layer=layer,
                ops=self.ops,
                query=put(query),
                caches=caches,
                starts=starts_there,
                lens=self.shifted.lens[layer, :rows],
                skips=self.shifted.no_skips[:rows],
                scale=SIZE**-0.5,
                rotary=context.rotary,
                offsets=self.shifted.skips[layer, :rows],
            )
            maxima = most_queries, int(self.shifted.max_lens[layer])
            batch = replace(call.batch, max_query_len=maxima[0], max_seq_len=maxima[1])
            call = replace(call, batch=batch)
            if self.attends_to_lists is not None:
                call = self.attends_to_lists.inputs(call)
            attended = context.before_attention(call)
            out = torch.full_like(query, torch.nan)
            if self.hooks.attend and context.attend(attended, put(out)):
                self.calls.append(attended)
                self.outs.append(out)
            else:
                assert not elsewhere
                if attended.block_table.dim() == 3:
                    if self.attends_to_lists is not None:
                        self.attends_to_lists(put(out), attended)
                    else:
                        self.ops.paged_attention(put(out), attended.batch, attended.softmax)
                    self.calls.append(attended)
                    self.outs.append(out)
                elif step.evictions is not None:  # which look at it
                    self.attention(put(out), attended.batch, attended.softmax)
            context.after_attention(own_inputs(call, attended), put(out))
            if layout is not None and layout.survivors is not None:
                entered, layout.survivors = entered.index_select(0, layout.survivors), None
        if layout is not None:
            self.survived.append(data_of(entered))
        self.last_evictions = step.evictions
        evicted, reports = self.tracker.end_step()
        self.evicted.append(evicted)
        self.failed |= self.tracker.failures.take().wait()
        self.evictions += len(evicted)
        self.reports.append(reports)
        for name in names:
            self.computed[name] += scheduled[name]


def marks_of(late: LateEvictions, name: str) -> dict[int, torch.Tensor]:
    """Return how many levels each token of a request survives, by layer: `[G, n]`."""
    return {
        layer: data_of(one.marks)[row, :, : one.lens[row]]
        for one in late._requests[name].marks
        for row, layer in enumerate(one.layers.tolist())
    }


def order(
    worker: Worker, late: LateEvictions, name: str, orders: Sequence[tuple[int, int]]
) -> None:
    """Order an eviction, with the blocks that the scheduler would name."""
    held = late._requests[name].skip
    table, end = worker.tables[:, list(worker.prompts).index(name)], -(-orders[-1][0] // BLOCK)
    blocks = [table[layer, held[layer] // BLOCK : end].tolist() for layer in range(worker.layers)]
    late.carry_out({name: LateEviction(tuple(orders), blocks)}, worker.tracker.order)


def launch_tables(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    of_names = {"gather_tables": triton_tables, "lane_rows": triton_lanes}
    for name, module in (*of_names.items(), ("lane_slots", triton_lanes)):
        in_pytorch = getattr(table_twins, name)
        monkeypatch.setattr(module, name, device.launch(in_pytorch))


def thins_generated() -> Policy:
    """Thins prompts, and what is generated."""
    generated = {"schedule": "thin_generated", "gen_window": 8, "gen_interval": 4}
    shares = {"gen_compress_ratio": 0.4, "gen_decay_ratio": 0.0}
    policy = load_policy("pyramidinfer", None, {**THINS, **generated, **shares})
    return policy.model_copy(update={"name": "pyramidinfer-generated"})


def policies() -> list[Policy]:
    """Return all presets that CUDA serves, and some policies with other parts."""
    found = []
    for name in policy_names():
        policy = load_policy(name)
        if policy.why_not(Feature.CUDA) is not None:
            continue  # refused there
        if policy.heads.splits:
            found.append(load_policy(name, *SPLITS[name]))
            continue
        if getattr(policy.attend, "scorer", None) is not None:
            few = {"budget": 64, "min_tokens": 0, "sinks": 16, "recent": 16, "dense_layers": 1}
            args = {"attend": few}
            if policy.evicts:
                args = {"attend": {**few, "budget": 48, "sinks": 0}, "window": 16}
            found.append(load_policy(name, "48" if policy.evicts else None, args))
            continue
        if policy.allocator.thins_prompts:
            found += [load_policy(name, None, THINS), thins_generated()]
        elif policy.evicts:
            args: dict[str, Any] = {"interval": 4} if policy.schedule.every else {}
            if policy.scorer.history is not None:
                args["scorer.queries"] = 4
            if policy.window:
                args["window"] = 16
            if policy.schedule.keeps_prompts:  # else a prompt's end evicts nothing
                args |= {"schedule.prompt": "evict", "window": 4}
            if isinstance(policy.scorer, TriAttentionScorer):
                args["centres"] = str(made_up_centres(HEADS, SIZE))
            found.append(load_policy(name, "40", args=args))
    inside = {"window": 8, "chunk": {"tokens": 48, "keep": 24, "scorer": "keydiff"}}
    goal = load_policy("xkv", args={"window": 8, "retention": 0.5})
    host = {"kind": "host", "top_n": 6}
    away = [
        load_policy("kcache", args={"values": host}),
        load_policy("kcache", args={"values": {**host, "device_layers": 0, "renormalize": False}}),
        load_policy("pyramidkv", "40", args={"window": 16, "values": {**host, "device_layers": 2}}),
        load_policy("snapkv-expected", "40", args={"window": 16, "values": host}),
    ]
    return [*found, load_policy("pyramidkv", "24", args=inside), goal, *away]
