# SPDX-License-Identifier: Apache-2.0
"""The real schedulers on a small configuration, and a worker that moves numbers instead of keys.

`PlainWorker` learns about blocks from `SchedulerOutput` alone, as a real worker does, and decides
what a request has given up with the real `EvictionTracker`. Its cache is an array of tags: every
cell says which request, layer and token it belongs to. A block that the scheduler gives away too
early is overwritten by its new owner, and the next read of the old owner finds the wrong tag. Where
a request begins with blocks of others, these must hold what it would have written itself: the same
tokens before them, computed from the whole cache.

Shape legend: L layers, P physical blocks, N tokens of a block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy as copy_of
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.scheduler.beside import FIRST_LAYER, Beside, compute, seen
from vllm_pyramid.compat.side_channel import (
    LEVELS,
    PREFIXES,
    SESSIONS,
    TIER,
    WITHOUT_LEVELS,
    FileOrders,
    HostCopies,
    HostFill,
    StepReport,
    attach_report,
    read_block_copies,
    read_messages,
)
from vllm_pyramid.kv_cache.bundle_file import write_file
from vllm_pyramid.kv_cache.head_layout import HeadKVCacheSpec
from vllm_pyramid.kv_cache.spec import KeyOnlyKVCacheSpec, LayerKVCacheSpec
from vllm_pyramid.plan import DeferredPlan, EvictionPoint, LateEviction, LevelPlan
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.heads import Heads
from vllm_pyramid.policy.planning import levels_per_token, peak_blocks_up_to
from vllm_pyramid.scheduler.scheduler import PyramidAsyncScheduler, PyramidScheduler
from vllm_pyramid.step.step import Step
from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

STOP_TOKEN = 7
ORDINARY_TOKEN = 8


def kv_cache_config(
    num_layers: int,
    block_size: int,
    num_blocks: int,
    device_layers: int | None = None,
    beside: Sequence[Beside] = (),
    stages: tuple[int, ...] = (),
    lanes: int = 1,
    heads: Heads | None = None,
) -> KVCacheConfig:
    """One group a layer over one pool of `num_blocks` blocks, the null block included.

    Args:
        device_layers: from this layer on the device holds K alone; None: in no layer.
        beside: layers that do not evict; the first group is the first of them, if there is any.
        stages: layers of each pipeline stage, with a pool of `num_blocks` each; they count lanes.
        lanes: KV heads of a group, each with a table of its own; `num_layers` counts these, and
            `block_size` is a lane's.
        heads: which of these never evict.
    """
    groups = []
    for layer in range(num_layers // lanes):
        spec = LayerKVCacheSpec(
            block_size=block_size // lanes,
            num_kv_heads=lanes,
            head_size=8,
            dtype=torch.float32,
            layer_idx=layer,
            num_layers=num_layers // lanes,
            model_layer=layer,
            stages=tuple(of_stage // lanes for of_stage in stages),
        )
        if device_layers is not None and layer >= device_layers:
            spec = KeyOnlyKVCacheSpec.of(spec)
        if lanes > 1:
            spec = HeadKVCacheSpec.of(spec, heads)
        groups.append(KVCacheGroupSpec([f"layer.{layer}"], spec))
    others = [
        KVCacheGroupSpec([f"beside.{index}"], layer.spec) for index, layer in enumerate(beside)
    ]
    groups = [*others[:1], *groups, *others[1:]]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@dataclass(frozen=True)
class Setup:
    """What a scheduler is built from."""

    policy: str = "pyramidkv"
    budget: str | int = "30%"
    min_tokens: int = 0
    policy_args: tuple[tuple[str, Any], ...] = (("window", 6),)
    asynchronous: bool = False
    runner_v2: bool = False
    reserve_full_prompt: bool = True  # vLLM's: admit a prompt only if all of it fits
    admission: str = "prompt"  # so that pools run out, and requests are preempted
    max_num_batched_tokens: int = 64
    long_prefill_token_threshold: int = 0
    max_num_seqs: int = 5
    max_model_len: int = 96
    num_layers: int = 3
    block_size: int = 4
    prefix_caching: bool | None = False  # None: vLLM's own default
    priorities: bool = False
    watermark: float = 0.0  # of the pool's blocks, as vLLM has it
    beside: tuple[Beside, ...] = ()
    turns: bool = False  # whether requests say to which conversations they belong
    drafts: int = 0  # of a request in a step, at most
    stages: tuple[int, ...] = ()  # layers of each pipeline stage
    lanes: int = 1  # KV heads with tables of their own, which count as layers
    host_slots: int = 0  # of the host cache
    host_folder: bool = False  # whether it survives a restart
    further: tuple[tuple[str, Any], ...] = ()  # settings of the engine

    @property
    def own_groups(self) -> range:
        """KV cache groups of the layers that evict."""
        first = int(bool(self.beside))
        return range(first, first + self.num_layers // self.lanes)

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """vLLM's; the drafts are the machine's own."""
        if not self.drafts:
            return None
        return {"method": "ngram", "num_speculative_tokens": self.drafts, "prompt_lookup_max": 2}

    @property
    def host_cache(self) -> dict[str, Any]:
        """Return the setting of a host cache with `host_slots` slots; empty without one."""
        if not self.host_slots:
            return {}
        page = 2 * self.block_size * 8 * 4  # K and V of one head of 8, in float32
        return {"kv_host_cache": (self.host_slots * self.num_layers * page + 1) / 2**30}

    @cached_property
    def device_layers(self) -> int | None:
        """See `kv_cache_config`."""
        args = dict(self.policy_args)
        return args.get("device_layers", 1) if args.get("values") == "host" else None

    @cached_property
    def block_sizes(self) -> list[int]:
        """Tokens of a block in each layer."""
        first = self.num_layers if self.device_layers is None else self.device_layers
        return [self.block_size * (1 + (layer >= first)) for layer in range(self.num_layers)]

    @property
    def largest_block(self) -> int:
        """What plans round to."""
        return max(self.block_sizes)

    @cached_property
    def stage_of(self) -> list[int]:
        """The pipeline stage of each layer."""
        layers = np.arange(self.num_layers)
        return np.searchsorted(np.cumsum(self.stages), layers, side="right").tolist()

    def of_fullest_stage(self, blocks: np.ndarray) -> int:
        """Of `[layers]` blocks, the most that a pool must have."""
        parts = np.split(blocks, np.cumsum(self.stages)[:-1]) if self.stages else [blocks]
        return max(int(part.sum()) for part in parts)

    @property
    def blocks_of_longest(self) -> int:
        """Blocks that the longest prompt holds at most, over all layers."""
        policy = load_policy(self.policy, self.budget, dict(self.policy_args))
        in_flight = (1 + self.asynchronous) * self.max_num_batched_tokens
        beside = sum(layer.most_blocks(self.max_model_len, in_flight) for layer in self.beside)
        if policy.inner_policy is not None:
            blocks = peak_blocks_up_to(
                policy, self.max_model_len, self.num_layers, self.block_size, self.stages
            )
            return self.of_fullest_stage(blocks) + beside
        blocks = np.array([cdiv(self.max_model_len, size) for size in self.block_sizes])
        return self.of_fullest_stage(blocks) + beside


@cache
def vllm_config(setup: Setup) -> VllmConfig:
    """The configuration of an engine with the policy; parsed and finished by the plugin itself."""
    config = EngineArgs(
        model=str(model_path()),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=16,
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        max_num_seqs=setup.max_num_seqs,
        long_prefill_token_threshold=setup.long_prefill_token_threshold,
        async_scheduling=False,
        enable_prefix_caching=setup.prefix_caching,
        watermark=setup.watermark,
        scheduling_policy="priority" if setup.priorities else "fcfs",
        speculative_config=setup.speculative_config,
        pipeline_parallel_size=max(len(setup.stages), 1),
        additional_config={
            "kv_policy": setup.policy,
            "kv_budget": setup.budget,
            "kv_min_tokens": setup.min_tokens,
            "kv_policy_args": dict(setup.policy_args),
            "kv_admission": setup.admission,
            **setup.host_cache,
            **dict(setup.further),
        },
    ).create_engine_config()
    assert config.scheduler_config.get_scheduler_cls() is PyramidScheduler
    config.cache_config.block_size = setup.block_size  # smaller than vLLM's platforms like
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.scheduler_config.scheduler_reserve_full_isl = setup.reserve_full_prompt
    config.cache_config.num_gpu_blocks = 1  # only asked whether there are any
    return config


@cache
def _structured_output_manager(setup: Setup) -> StructuredOutputManager:
    return StructuredOutputManager(vllm_config(setup))


def make_scheduler(
    setup: Setup, num_blocks: int, events: bool = False
) -> PyramidScheduler | PyramidAsyncScheduler:
    """A scheduler over a fresh pool of `num_blocks` usable blocks.

    Args:
        events: whether it publishes KV events (`router.py`).
    """
    cls = PyramidAsyncScheduler if setup.asynchronous else PyramidScheduler
    config = copy_of(vllm_config(setup))
    if events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=kv_cache_config(
            setup.num_layers,
            setup.block_size,
            num_blocks + 1,
            setup.device_layers,
            setup.beside,
            setup.stages,
            setup.lanes,
            load_policy(setup.policy, setup.budget, dict(setup.policy_args)).heads,
        ),
        structured_output_manager=_structured_output_manager(setup),
        block_size=lcm(setup.largest_block, *(layer.block_size for layer in setup.beside)),
        hash_block_size=setup.block_size,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = setup.runner_v2
    return scheduler


@cache
def hasher(block_size: int) -> Callable[[Request], list[BlockHash]]:
    """What makes a request's block hashes, as in an engine with prefix caching."""
    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


def make_request(
    request_id: str,
    prompt: int | list[int],
    max_tokens: int = 8,
    extra_args: dict[str, Any] | None = None,
    *,
    hash_block_size: int = 0,
    cache_salt: str | None = None,
    priority: int = 0,
) -> Request:
    """A request that ends after `max_tokens` tokens or at `STOP_TOKEN`.

    Args:
        prompt: its tokens, or how many. hash_block_size: 0 without prefix caching.
    """
    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=[STOP_TOKEN], extra_args=extra_args
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=[1] * prompt if isinstance(prompt, int) else prompt,
        sampling_params=params,
        pooling_params=None,
        cache_salt=cache_salt,
        priority=priority,
        block_hasher=hasher(hash_block_size) if hash_block_size else None,
    )


def solved_lengths(
    source: random.Random, plan: DeferredPlan, layers: int | None = None
) -> np.ndarray:
    """Any lengths that a solver might find: within the plan's promise, often at its ends.

    Args:
        layers: that share a part of the total; None: all of them.
    """
    layers = layers or plan.num_layers
    keep = np.full(layers, plan.budget_tokens)
    for _ in range(4 * layers):
        giver, taker = source.randrange(layers), source.randrange(layers)
        most = min(keep[giver] - plan.least, plan.prompt_len - keep[taker])
        if giver != taker and most > 0:
            count = source.choice([most, source.randint(0, most)])
            keep[giver] -= count
            keep[taker] += count
    if not plan.exact:
        keep = plan.floor + (keep - plan.floor) * source.randint(0, 10) // 10
    return keep


# A tag: the writer's serial, whether attention missed anything, the layer, the position.
FILE_WORDS = 32  # of a block in a file: K and V of four tokens of a head of 8, in float32
SERIAL, INEXACT, LAYER = 25, 24, 16


@dataclass
class Row:
    """A request as the worker knows it: `groups` are its tables, `tables` of layers that evict."""

    serial: int
    prompt: list[int]
    salt: str | None
    groups: list[list[int]]
    tables: list[list[int]]
    cells: np.ndarray  # [L, max_model_len] int64: the tag that each position should hold
    beside: np.ndarray  # the same of layers that do not evict
    computed: int = 0  # after the latest step, without drafts that were rejected
    believed: int = 0  # before the step, by the scheduler, which may not know yet what was rejected
    skip: np.ndarray | None = None  # [L], of the latest eviction
    adopted: int = 0  # tokens that it began with and has not looked at yet
    # Who evicted what it began with, and at how many tokens.
    origin: tuple[str, int] | None = None
    # The points of its evictions that gave something, and the skips from there on.
    history: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    def content(self, end: int) -> tuple[Any, ...]:
        """What the KV of its first `end` tokens depends on."""
        generated = [ORDINARY_TOKEN] * max(end - self.prompt_len, 0)
        return (self.salt, *self.prompt[:end], *generated)


@dataclass
class PlainWorker:
    """Executes `SchedulerOutput`s at once and in order, as a device stream does."""

    policy: Policy
    setup: Setup
    num_blocks: int
    seed: int = 0
    stop: set[str] = field(default_factory=set)  # requests that sample STOP_TOKEN from now on
    rows: dict[str, Row] = field(default_factory=dict)
    writers: dict[int, Row] = field(default_factory=dict)
    ended: dict[str, Row] = field(default_factory=dict)
    salts: dict[str, str] = field(default_factory=dict)  # of requests: workers are not told
    num_evictions: int = 0
    num_ordered: int = 0
    num_adopted: int = 0  # tokens
    num_adopted_beside: int = 0  # tokens, of layers that do not evict
    num_resumed_beside: int = 0  # of these with a state
    num_copied: int = 0  # blocks
    num_stored: int = 0  # slots of the host cache
    num_filled: int = 0  # of these from files
    num_loaded: int = 0
    num_resumed: int = 0  # requests
    num_left: int = 0  # requests that left copies behind
    num_solved: int = 0
    num_rejected: int = 0  # drafts
    num_accepted: int = 0
    num_answers: int = 0  # points behind a prompt at which tokens got levels
    levelled: dict[str, int] = field(default_factory=dict)  # where the last time
    marked: dict[str, np.ndarray] = field(default_factory=dict)  # tokens with levels, [L]
    without: Sequence[str] = ()  # who gets no levels in this step
    num_without: int = 0

    def __post_init__(self) -> None:
        setup = self.setup
        self.tracker = EvictionTracker(
            self.policy, setup.num_layers, setup.largest_block, setup.max_num_seqs + 1
        )
        sizes = [layer.block_size for layer in setup.beside if layer.kind != "state"]
        # Block ids are those of a stage's pool: its blocks stand behind those of the stage before.
        pools = max(len(setup.stages), 1)
        shape = (pools * (self.num_blocks + 1), max([setup.largest_block, *sizes]))
        self.memory_PN = np.full(shape, -1, np.int64)
        self.host_SLN = np.full((setup.host_slots, setup.num_layers, shape[1]), -1, np.int64)
        self.random = random.Random(self.seed)
        self.serial = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step; checks that every position that attention would read holds its token."""
        totals = self._update(output)
        messages = read_messages(output)
        self.tracker.copies = messages.get(PREFIXES, {})
        of_host = messages.get(TIER, HostCopies([], []))
        if of_host.files is not None:
            self._write_files(of_host.files)
        for copy in of_host.stored:
            self.host_SLN[copy.slot] = -1
            if isinstance(copy, HostFill):
                rows = np.frombuffer(b"".join(copy.contents), np.int64).reshape(-1, FILE_WORDS)
                rows = rows[:, : self.host_SLN.shape[2]]
                self.num_filled += 1
            else:
                rows = self.memory_PN[self._of_layers(copy.blocks)]
                self.num_stored += 1
            self.host_SLN[copy.slot, : len(rows)] = rows
        for stage in range(max(len(self.setup.stages), 1)):
            first = stage * (self.num_blocks + 1)
            for source, own in read_block_copies(output, stage):
                self.memory_PN[first + own] = self.memory_PN[first + source]
                self.num_copied += 1
        for slot, blocks in of_host.loaded:
            self.memory_PN[self._of_layers(blocks)] = self.host_SLN[slot, : len(blocks)]
            self.num_loaded += 1
        self.without = messages.get(WITHOUT_LEVELS, ())
        self.num_without += len(self.without)
        for request_id, order in messages.get(LEVELS, {}).items():
            # By the tokens of a step vLLM tells a report of before a preemption.
            assert output.num_scheduled_tokens[request_id] > 0
            if (plan := self.tracker.order(request_id, order.orders)) is not None:
                assert order.orders[-1][0] == self.levelled[request_id], "levels of another point"
                self._carry_out(request_id, plan.end, order)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        request_ids = list(output.num_scheduled_tokens)
        self.random.shuffle(request_ids)  # rows move between steps, as they do in vLLM
        rows = [self.rows[request_id] for request_id in request_ids]
        scheduled = np.array([output.num_scheduled_tokens[i] for i in request_ids], np.int32)
        computed = np.array([row.computed for row in rows], np.int32)
        believed = np.array([row.believed for row in rows], np.int32)
        prompt_lens = np.array([row.prompt_len for row in rows], np.int32)
        # A worker that does not wait for its device knows no better than the scheduler.
        step = self.tracker.begin_step(request_ids, prompt_lens, believed, scheduled)
        for index, row in enumerate(rows):
            if row.adopted and row.origin is not None:
                row.skip = step.skips[:, index]
            begins = step.requests[index].plan.exact_tokens
            assert not step.skips[:, index].any() or computed[index] >= begins
            if row.skip is not None:
                assert (step.skips[:, index] == row.skip).all()
            row.computed = int(computed[index] + scheduled[index])
            chooses = step.requests[index].policy.splits_at_prompt_end  # among keys, behind it
            self._write(row, int(computed[index]), row.computed, chooses)
        for index, row in enumerate(rows):
            own = self.setup.own_groups
            beside = [row.groups[group] for group in range(len(row.groups)) if group not in own]
            self._adopt_beside(row, beside)
            evicted = row.skip is not None and bool(row.skip.any())
            tag = (row.serial << SERIAL) + (evicted << INEXACT)
            compute(
                *(self.setup.beside, beside, self.memory_PN, row.beside, tag, LAYER),
                *(int(computed[index]), row.computed),
            )
        for index, row in enumerate(rows):
            self._adopt(row, step.requests[index].plan.in_place)
            self._read(row, step.skips[:, index], row.computed)
        if step.evictions is not None:
            for index in step.evictions.deferred.tolist():
                plan = step.evictions.plans[index]
                assert isinstance(plan, DeferredPlan)
                # The KV heads of a layer share its budget, and are solved before the next one's.
                together = self.setup.lanes if self.setup.lanes > 1 else plan.num_layers
                for first in range(0, plan.num_layers, together):
                    keep = solved_lengths(self.random, plan, together)
                    step.evictions.resolve(index, keep, first)
                self.num_solved += 1
            for index, request_id in enumerate(step.evictions.request_ids):
                if blocks := step.evictions.copies[index]:
                    plan = step.evictions.plans[index]
                    assert isinstance(plan, EvictionPoint)
                    self._leave_behind(self.rows[request_id], plan, blocks)
                end, kept_lens = (step.evictions.points[index], step.evictions.kept_lens[:, index])
                previous_skips = step.evictions.previous_skips[:, index]
                in_place = step.evictions.plans[index].in_place
                self._evict(
                    self.rows[request_id], int(end), previous_skips, kept_lens, in_place=in_place
                )
                step.evictions.tokens_done[index] = (end - previous_skips - kept_lens).sum()
                self.num_evictions += bool(step.evictions.tokens_done[index])
        drafts = output.scheduled_spec_decode_tokens
        losses = self._losses(step)
        self.check_marked()
        evictions, reports = self.tracker.end_step()
        return attach_report(
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
                sampled_token_ids=[
                    self._sample(request_id, row, len(drafts.get(request_id, ())))
                    if row.believed + scheduled[index] >= totals[request_id]
                    else []
                    for index, (request_id, row) in enumerate(zip(request_ids, rows, strict=True))
                ],
            ),
            StepReport(evictions, reports | ({LEVELS: losses} if losses else {}), {}, 0),
        )

    def _losses(self, step: Step) -> dict[str, tuple[int, list[float]]]:
        """Any shares that levels might lose of the requests that come to a point in this step."""
        found = {}
        for row, request in enumerate(step.requests):
            plan, before = request.initial, int(step.computed[row])
            if not isinstance(plan, LevelPlan):
                continue
            end = before + int(step.scheduled[row])
            point = plan.prompt_len if before < plan.prompt_len else plan.point_by(end)
            levels = plan.levels_at(point, step.skips[:, row]) if before < point <= end else ()
            if point > plan.prompt_len and self.random.random() < 0.2:
                continue  # without a place for its queries
            if levels and request.request_id not in self.without:
                self.levelled[request.request_id] = point
                self.marked[request.request_id] = point - step.skips[:, row]
                self.num_answers += point > plan.prompt_len
                found[request.request_id] = point, sorted(self.random.random() for _ in levels)
        return found

    def check_marked(self) -> None:
        """Levels, as many in each layer of a stage as in its longest, fit into what is reserved."""
        if not self.marked:
            return
        setup, stages = self.setup, np.cumsum(self.setup.stages)[:-1]
        each = levels_per_token(
            self.policy, setup.max_model_len, setup.num_layers, setup.largest_block
        )
        for of_stage in np.split(np.stack(list(self.marked.values()), axis=1), stages):
            needed = len(of_stage) * of_stage.max(axis=0).sum()
            assert needed <= each * (self.num_blocks + 1) * setup.block_size, "was not reserved"

    def _carry_out(self, request_id: str, point: EvictionPoint, order: LateEviction) -> None:
        """Evict a request to a level that was ordered; its answer stays where it is."""
        row = self.rows[request_id]
        before = np.zeros_like(point.skip) if row.skip is None else row.skip
        for layer, (first, blocks) in enumerate(zip(before.tolist(), order.blocks, strict=True)):
            size = self.setup.block_sizes[layer]
            assert blocks == row.tables[layer][first // size : cdiv(point.computed, size)]
        self._evict(row, point.computed, before, point.held, since=row.computed)
        self.num_ordered += 1
        self.marked[request_id] = point.held

    def _of_layers(self, blocks: Sequence[int]) -> np.ndarray:
        """Where blocks of a slot are: a block of each layer, in the pool of its stage."""
        if not self.setup.stages:
            return np.array(blocks)  # of a state, as many as it has
        return np.array(blocks) + np.array(self.setup.stage_of) * (self.num_blocks + 1)

    def _write_files(self, orders: FileOrders) -> None:
        """Do at once what a worker's thread does later."""
        for path in orders.removed:
            Path(path).unlink(missing_ok=True)
        for path, (begin,), blocks in orders.saved:
            content = np.full((len(blocks), FILE_WORDS), -1, np.int64)
            content[:, : self.memory_PN.shape[1]] = self.memory_PN[blocks]
            write_file(path, begin, content)

    def _sample(self, request_id: str, row: Row, drafts: int) -> list[int]:
        """The step's tokens; of rejected drafts nothing that is of use stays in the cache."""
        accepted = self.random.randint(0, drafts)
        self.num_accepted += accepted
        self.num_rejected += drafts - accepted
        gone = np.arange(row.computed - drafts + accepted, row.computed)
        for layer in range(self.setup.num_layers if len(gone) else 0):
            self.memory_PN[self._slots(row, layer, gone)] = -1
            row.cells[layer, gone] = -1
        row.computed -= len(gone)
        last = STOP_TOKEN if request_id in self.stop else ORDINARY_TOKEN
        return [ORDINARY_TOKEN] * accepted + [last]

    def _update(self, output: SchedulerOutput) -> dict[str, int]:
        """Take over what the step says about requests; returns the tokens that each has by now."""
        totals: dict[str, int] = {}
        for request_id in output.finished_req_ids:
            if (row := self.rows.pop(request_id, None)) is not None:
                self.ended[request_id] = row
            self.tracker.remove(request_id)
            self.marked.pop(request_id, None)
        for request_id in output.preempted_req_ids or ():
            self.marked.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            tokens = new.prefill_token_ids or new.prompt_token_ids
            params = new.sampling_params
            assert params is not None
            totals[new.req_id] = len(tokens)
            prompt = new.prompt_token_ids
            self._begin(new.req_id, prompt, new.block_ids, new.num_computed_tokens)
            self.tracker.add(new.req_id, len(new.prompt_token_ids), params.extra_args)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            row = self.rows[request_id]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                self._begin(request_id, row.prompt, blocks, cached.num_computed_tokens[index])
                row = self.rows[request_id]
            elif blocks is not None:
                for table, new_ids in zip(row.groups, blocks, strict=True):
                    table.extend(new_ids)
            row.believed = cached.num_computed_tokens[index]
            if self.setup.drafts and self.setup.asynchronous:
                assert row.computed <= row.believed
            else:
                assert row.computed == row.believed
            totals[request_id] = row.prompt_len + cached.num_output_tokens[index]
        for row in self.rows.values() if self.setup.lanes > 1 else ():
            row.tables = [
                row.groups[group][lane :: self.setup.lanes]
                for group in self.setup.own_groups
                for lane in range(self.setup.lanes)
            ]
        for request_id, origin in read_messages(output).get(SESSIONS, {}).items():
            self.rows[request_id].origin = origin
            self.num_resumed += 1
        return totals

    def _begin(
        self, request_id: str, prompt: list[int], block_ids: tuple[list[int], ...], computed: int
    ) -> None:
        self.serial += 1  # what an earlier life of the request left in the cache is not its own
        assert self.setup.prefix_caching or not computed
        groups = [list(ids) for ids in block_ids]
        row = self.rows[request_id] = self.writers[self.serial] = Row(
            self.serial,
            prompt,
            self.salts.get(request_id),
            groups,
            [groups[group] for group in self.setup.own_groups],
            np.full((self.setup.num_layers, self.setup.max_model_len), -1, np.int64),
            np.full((len(self.setup.beside), self.setup.max_model_len), -1, np.int64),
            computed,
            believed=computed,
            adopted=computed,
        )
        self.num_adopted += row.adopted

    def _adopt(self, row: Row, in_place: int) -> None:
        """Look at what a request began with; it may have been written in this very step."""
        if row.adopted and row.origin is not None:
            self._adopt_state(row, *row.origin, in_place)
            row.adopted = 0
            return
        positions = np.arange(row.adopted)
        for layer in range(self.setup.num_layers):
            found = self.memory_PN[self._slots(row, layer, positions)]
            self.check_shared(layer, positions, found, row)
            row.cells[layer, : row.adopted] = found
        row.adopted = 0

    def _adopt_state(self, row: Row, origin: str, point: int, in_place: int) -> None:
        """The same of an evicted state: survivors are who left it kept them, and where.

        What stayed in place is as good if somebody else has computed it.
        """
        left, skip = self.ended[origin], row.skip
        assert skip is not None
        row.history = [entry for entry in left.history if entry[0] <= point]
        assert row.history[-1] == (point, skip.tolist()), "another eviction's survivors"
        assert left.content(point) == row.content(point), "other tokens' survivors"
        for layer, first in enumerate(skip.tolist()):
            found = self.memory_PN[self._slots(row, layer, np.arange(first, row.adopted))]
            row.cells[layer, first : row.adopted] = found
            self.check_shared(layer, np.arange(in_place), found[:in_place], row)
            behind = found[in_place : point - first] == left.cells[layer, first + in_place : point]
            assert behind.all(), "other survivors"
            behind, positions = found[point - first :], np.arange(point, row.adopted)
            expected = (1 << INEXACT) + (layer << LAYER) + positions
            assert (behind % (1 << SERIAL) == expected).all(), "not computed behind the eviction"
            for serial in np.unique(behind >> SERIAL).tolist():
                writer, end = self.writers[serial], int(positions[behind >> SERIAL == serial][-1])
                assert writer.content(end + 1) == row.content(end + 1), "other tokens' KV"
                before = [entry for entry in writer.history if entry[0] <= point]
                assert before == row.history, "behind another eviction"

    def _adopt_beside(self, row: Row, tables: Sequence[Sequence[int]]) -> None:
        """The same in layers that do not evict: what the next token looks at."""
        if not row.adopted:
            return
        history: list[tuple[int, list[int]]] = []
        if row.origin is not None:
            origin, point = row.origin
            history = [entry for entry in self.ended[origin].history if entry[0] <= point]
        for index, (layer, table) in enumerate(zip(self.setup.beside, tables, strict=True)):
            positions, *places = seen(layer, table, row.adopted, row.adopted)
            found = self.memory_PN[places[0], places[1]]
            if len(positions):
                self.check_shared(FIRST_LAYER + index, positions, found, row, history)
            row.beside[index, positions] = found
            self.num_adopted_beside += len(positions)
            self.num_resumed_beside += len(positions) * bool(history)

    def check_shared(
        self,
        layer: int,
        positions: np.ndarray,
        tags: np.ndarray,
        row: Row,
        history: Sequence[tuple[int, list[int]]] = (),
    ) -> None:
        """That cells hold what the whole cache holds at these positions of a request.

        Args:
            history: evictions behind which the request is: then what a cache holds that was evicted
                there.
        """
        first = history[0][0] if history else 1 << LAYER
        expected = (layer << LAYER) + positions + ((positions >= first) << INEXACT)
        assert (tags >= 0).all() and (tags % (1 << SERIAL) == expected).all(), (
            f"layer {layer}: what was found is of another place, or of another cache"
        )
        for serial in np.unique(tags >> SERIAL).tolist():
            writer, last = self.writers[serial], int(positions[tags >> SERIAL == serial].max())
            assert writer.content(last + 1) == row.content(last + 1), "other tokens' KV"
            before = [entry for entry in writer.history if entry[0] <= last]
            assert before == [entry for entry in history if entry[0] <= last], "other evictions"

    def _slots(self, row: Row, layer: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table = np.array(row.tables[layer])
        block_size = self.setup.block_sizes[layer]
        blocks = table[positions // block_size]
        assert (blocks > 0).all(), "the null block is nobody's"
        return blocks + self.setup.stage_of[layer] * (self.num_blocks + 1), positions % block_size

    def _write(self, row: Row, start: int, end: int, chooses: bool) -> None:
        positions = np.arange(start, end)
        evicted = row.skip is not None and bool(row.skip.any())
        inexact = evicted | (positions >= row.prompt_len) & chooses
        for layer in range(self.setup.num_layers):
            tags = (row.serial << SERIAL) + (inexact << INEXACT) + (layer << LAYER) + positions
            row.cells[layer, start:end] = tags
            self.memory_PN[self._slots(row, layer, positions)] = row.cells[layer, start:end]

    def _read(self, row: Row, skips: np.ndarray, end: int) -> None:
        for layer, skip in enumerate(skips.tolist()):
            found = self.memory_PN[self._slots(row, layer, np.arange(skip, end))]
            assert (found == row.cells[layer, skip:end]).all(), (
                f"layer {layer}: a live position was overwritten"
            )

    def _leave_behind(self, row: Row, plan: EvictionPoint, blocks: list[int]) -> None:
        """Copy what the eviction overwrites; of blocks of `block_size` in every layer."""
        self.num_left += 1
        places, end = iter(blocks), plan.computed // plan.block_size
        for layer, skip in enumerate(plan.skip.tolist()):
            start = self.setup.stage_of[layer] * (self.num_blocks + 1)
            for index in range((skip + plan.in_place) // plan.block_size, end):
                source = row.tables[layer][index]
                self.memory_PN[start + next(places)] = self.memory_PN[start + source]

    def _evict(
        self,
        row: Row,
        end: int,
        previous_skips: np.ndarray,
        kept_lens: np.ndarray,
        since: int | None = None,
        in_place: int = 0,
    ) -> None:
        """Move random survivors, behind those that stay in their blocks.

        Args:
            since: tokens that were computed before the eviction; None: `end`.
            in_place: how many tokens stay so.
        """
        row.skip = end - kept_lens
        if (row.skip > previous_skips).any():
            row.history.append((end if since is None else since, row.skip.tolist()))
        for layer, (before, held) in enumerate(
            zip(previous_skips.tolist(), kept_lens.tolist(), strict=True)
        ):
            if held == end - before:
                continue
            first, skip, size = before + in_place, end - held, self.setup.block_sizes[layer]
            chosen = sorted(self.random.sample(range(first, end), held - in_place))
            moved = self.memory_PN[self._slots(row, layer, np.array(chosen, np.int64))]
            front = row.cells[layer, before:first].copy()
            tail = np.arange(skip + in_place, end)
            self.memory_PN[self._slots(row, layer, tail)] = moved
            row.cells[layer, :end] = -1
            row.cells[layer, skip:end] = [*front, *moved]
            old, new, count = (tokens // size for tokens in (before, skip, in_place))
            table = row.tables[layer]
            table[new : new + count] = table[old : old + count]
