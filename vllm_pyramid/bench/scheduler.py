# SPDX-License-Identifier: Apache-2.0
"""What per-layer block tables cost the scheduler: milliseconds a decode step, without an engine.

Three schedulers run the same decode steps in turn, one step each, so that whatever else the machine
does meets all of them: vLLM's with one group for all layers, vLLM's with a group a layer, and ours
with a group a layer and every request evicted to its budget. The medians are compared with the
first. The prompts are staggered, so that each step some requests need a new block.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_pyramid.compat.side_channel import attach_evictions
from vllm_pyramid.demo import model_path
from vllm_pyramid.plugin import register
from vllm_pyramid.policy.plans import Eviction
from vllm_pyramid.scheduler.scheduler import PyramidScheduler
from vllm_pyramid.scheduler.spec import LayerKVCacheSpec

__all__ = ["SchedulerRow", "scheduler_steps"]

BLOCK_SIZE = 16
ONE_GROUP, GROUPS, PYRAMID = "vLLM, one group", "vLLM, a group a layer", "vllm-pyramid"


@dataclass(frozen=True)
class SchedulerRow:
    """One scheduler's decode steps.

    Attributes:
        layers, requests: of the model, and running. steps: measured. schedule_ms: median of
            `schedule()`. step_ms: with `update_from_output`. schedule_ratio, step_ratio: to vLLM's
            with one group. blocks_held: of one layer, or of all layers with one group.
    """

    scheduler: str
    layers: int
    requests: int
    steps: int
    schedule_ms: float
    step_ms: float
    schedule_ratio: float
    step_ratio: float
    blocks_held: int


class Lane:
    """A scheduler with all its requests decoding, and the times of its steps."""

    def __init__(
        self,
        cls: type[Scheduler],
        config: VllmConfig,
        groups: list[KVCacheGroupSpec],
        prompt_lens: list[int],
        steps: int,
    ) -> None:
        blocks = sum(cdiv(length + steps + 2, BLOCK_SIZE) for length in prompt_lens)
        config.cache_config.num_gpu_blocks = blocks * len(groups) + 1
        self.scheduler = cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(config.cache_config.num_gpu_blocks, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        for index, length in enumerate(prompt_lens):
            params = SamplingParams(max_tokens=steps + 64, ignore_eos=True)
            self.scheduler.add_request(Request(f"request-{index}", [1] * length, params, None))
        while self.scheduler.waiting or any(r.is_prefill_chunk for r in self.scheduler.running):
            self.step()
        self.step()  # the head blocks go back in the step after the prompt's last
        self.schedule_ms: list[float] = []
        self.update_ms: list[float] = []

    def step(self) -> tuple[float, float]:
        """One `schedule` and `update_from_output`; their times in milliseconds."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        scheduled = time.perf_counter()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [] if self.scheduler.requests[name].is_prefill_chunk else [2] for name in names
            ],
        )
        if isinstance(self.scheduler, PyramidScheduler):
            result = attach_evictions(result, self._evictions(names))
        begin = time.perf_counter()
        self.scheduler.update_from_output(output, result)
        end = time.perf_counter()
        return 1000 * (scheduled - start), 1000 * (end - begin)

    def _evictions(self, names: list[str]) -> dict[str, Eviction]:
        """What the worker reports: the tokens evicted of the prompts that end in this step."""
        plans = self.scheduler.coordinator._plans
        return {
            name: Eviction(int(plans[name].skip.sum()))
            for name in names
            if name in plans
            and not self.scheduler.coordinator.is_confirmed(name)
            and self.scheduler.requests[name].num_computed_tokens >= plans[name].prompt_len
        }

    def measure(self) -> None:
        """Run a step and keep its times."""
        schedule, update = self.step()
        self.schedule_ms.append(schedule)
        self.update_ms.append(update)

    def medians(self) -> tuple[float, float]:
        """Milliseconds of `schedule()` and of the whole step."""
        total = [a + b for a, b in zip(self.schedule_ms, self.update_ms, strict=True)]
        return statistics.median(self.schedule_ms), statistics.median(total)

    @property
    def blocks_held(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _config(requests: int, longest: int, additional: dict[str, Any]) -> VllmConfig:
    return EngineArgs(
        model=str(model_path()),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_num_batched_tokens=8192,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        async_scheduling=False,
        additional_config=additional,
    ).create_engine_config()


def _groups(layers: int, per_layer: bool, own: bool) -> list[KVCacheGroupSpec]:
    names = [f"layer.{layer}" for layer in range(layers)]
    shape: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": torch.bfloat16,
    }
    if own:
        specs = [LayerKVCacheSpec(layer_idx=layer, **shape) for layer in range(layers)]
        return [KVCacheGroupSpec([n], spec) for n, spec in zip(names, specs, strict=True)]
    if per_layer:
        return [KVCacheGroupSpec([name], FullAttentionSpec(**shape)) for name in names]
    return [KVCacheGroupSpec(names, FullAttentionSpec(**shape))]


def scheduler_steps(
    layers: int, requests: int, steps: int, prompt_len: int, on_step: Callable[[], None]
) -> Iterator[SchedulerRow]:
    """Measure the three schedulers and compare them.

    Args:
        prompt_len: of the shortest prompt, at least 64.

    Raises:
        RuntimeError: not every request was evicted.
    """
    register()
    prompt_lens = [prompt_len + index % BLOCK_SIZE for index in range(requests)]
    longest = prompt_len + BLOCK_SIZE + steps + 128
    stock = _config(requests, longest, {})
    ours = _config(requests, longest, {"kv_policy": "pyramidkv", "kv_budget": "12%"})
    lanes = {
        ONE_GROUP: Lane(Scheduler, stock, _groups(layers, False, False), prompt_lens, steps),
        GROUPS: Lane(Scheduler, stock, _groups(layers, True, False), prompt_lens, steps),
        PYRAMID: Lane(PyramidScheduler, ours, _groups(layers, True, True), prompt_lens, steps),
    }
    pyramid = lanes[PYRAMID].scheduler
    assert isinstance(pyramid, PyramidScheduler)
    if pyramid.coordinator.num_evictions != requests:
        raise RuntimeError(f"{pyramid.coordinator.num_evictions} of {requests} were evicted")
    gc.collect()
    gc.freeze()  # as the engine core does, so that collections do not walk the three pools
    try:
        for _ in range(steps):
            for lane in lanes.values():
                lane.measure()
            on_step()
    finally:
        gc.unfreeze()
    base_schedule, base_step = lanes[ONE_GROUP].medians()
    for name, lane in lanes.items():
        schedule, step = lane.medians()
        yield SchedulerRow(
            scheduler=name,
            layers=layers,
            requests=requests,
            steps=steps,
            schedule_ms=schedule,
            step_ms=step,
            schedule_ratio=schedule / base_schedule,
            step_ratio=step / base_step,
            blocks_held=lane.blocks_held,
        )
