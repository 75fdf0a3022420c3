#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a block table for each layer costs the scheduler, in decode steps without an engine.

Four schedulers alternate step by step: vLLM's with one KV cache group for all layers, vLLM's with
a group for each layer, and ours with a group for each layer and every request evicted to its
budget, without and with prefix caching. The first one is the baseline. The prompts share nothing
and differ in length, so that in each step some requests need a new block.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pandas as pd
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_pyramid.compat.side_channel import StepReport, attach_report
from vllm_pyramid.kv_cache.spec import LayerKVCacheSpec
from vllm_pyramid.plan import Eviction
from vllm_pyramid.plugin import register
from vllm_pyramid.scheduler.scheduler import PyramidScheduler
from vllm_pyramid.tools.bench.scheduler_log import evictions_counted
from vllm_pyramid.tools.bench.shapes import BLOCK_SIZE
from vllm_pyramid.tools.command_parts import numbers
from vllm_pyramid.tools.demo import model_path

ONE_GROUP, GROUPS, PYRAMID = "vLLM, one group", "vLLM, a group a layer", "vllm-pyramid"
CACHING = "vllm-pyramid, prefix caching"
_SHAPE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": torch.bfloat16,
}


class SchedulerDriver:
    """A scheduler with all its requests decoding, and the times of its steps."""

    def __init__(
        self,
        cls: type[Scheduler],
        config: VllmConfig,
        groups: list[KVCacheGroupSpec],
        prompt_lens: list[int],
        steps: int,
    ) -> None:
        hasher = None
        if config.cache_config.enable_prefix_caching:
            init_none_hash(sha256)
            hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
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
            prompt = [index + 1] * length
            self.scheduler.add_request(
                Request(f"request-{index}", prompt, params, None, block_hasher=hasher)
            )
        while self.scheduler.waiting or any(r.is_prefill_chunk for r in self.scheduler.running):
            self.step()
        self.step()  # evicted blocks are freed in the step after the prompt's last
        self.times: list[dict[str, float]] = []

    def step(self) -> dict[str, float]:
        """Call `schedule` and `update_from_output`; return the first's and both's milliseconds."""
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
            evicted = _evictions_to_report(self.scheduler, names)
            result = attach_report(result, StepReport(evicted, {}, {}, 0))
        begin = time.perf_counter()
        self.scheduler.update_from_output(output, result)
        end = time.perf_counter()
        schedule = 1000 * (scheduled - start)
        return {"schedule_ms": schedule, "step_ms": schedule + 1000 * (end - begin)}

    @property
    def blocks_held(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _evictions_to_report(scheduler: Any, names: Iterable[str]) -> dict[str, Eviction]:
    """Return the evictions that a worker would report for this step."""
    coordinator, found = scheduler.coordinator, {}
    for name in names:
        plan, before = coordinator.plans.of(name), coordinator.plans.confirmed_number(name)
        number = plan.evictions_by(scheduler.requests[name].num_computed_tokens)
        if plan.evicts and number > before:
            tokens = int((plan.skip_after(number) - plan.skip_after(before)).sum())
            found[name] = Eviction(tokens, number=number)
    return found


def compare(layers: int, requests: int, steps: int, prompt_len: int) -> pd.DataFrame:
    """Return the medians of the four schedulers, and their ratios to the first one's.

    RuntimeError: not every request was evicted.
    """
    prompt_lens = [prompt_len + index % BLOCK_SIZE for index in range(requests)]

    def config(additional: dict[str, Any], *, caching: bool = False) -> VllmConfig:
        return EngineArgs(
            model=str(model_path()),
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=prompt_len + BLOCK_SIZE + steps + 128,
            max_num_batched_tokens=8192,
            max_num_seqs=requests,
            enable_prefix_caching=caching,
            async_scheduling=False,
            additional_config=additional,
        ).create_engine_config()

    names = [f"layer.{layer}" for layer in range(layers)]
    one = [KVCacheGroupSpec(names, FullAttentionSpec(**_SHAPE))]
    each = [KVCacheGroupSpec([name], FullAttentionSpec(**_SHAPE)) for name in names]
    own = [
        KVCacheGroupSpec(
            [name],
            LayerKVCacheSpec(layer_idx=layer, num_layers=layers, model_layer=layer, **_SHAPE),
        )
        for layer, name in enumerate(names)
    ]
    policy = {"kv_policy": "pyramidkv", "kv_budget": "12%", "kv_min_tokens": 0}
    stock = config({})
    kinds: dict[str, tuple[type[Scheduler], VllmConfig, list[KVCacheGroupSpec]]] = {
        ONE_GROUP: (Scheduler, stock, one),
        GROUPS: (Scheduler, stock, each),
        PYRAMID: (PyramidScheduler, config(policy), own),
        CACHING: (PyramidScheduler, config(policy, caching=True), own),
    }
    drivers = {name: SchedulerDriver(*kind, prompt_lens, steps) for name, kind in kinds.items()}
    for name in (PYRAMID, CACHING):
        if (evicted := evictions_counted(drivers[name].scheduler)) != requests:
            raise RuntimeError(f"{name}: {evicted} of {requests} requests were evicted")
    gc.collect()
    gc.freeze()  # as the engine core does, so that collections do not walk the four pools
    try:
        for _ in range(steps):
            for driver in drivers.values():
                driver.times.append(driver.step())
    finally:
        gc.unfreeze()
    rows = pd.DataFrame(
        {name: pd.DataFrame(driver.times).median() for name, driver in drivers.items()}
    ).T
    held = [driver.blocks_held for driver in drivers.values()]
    made = {"layers": layers, "requests": requests, "steps": steps, **rows}
    made |= {f"{name}_ratio": rows[f"{name}_ms"] / rows[f"{name}_ms"].iloc[0]
             for name in ("schedule", "step")}  # fmt: skip
    frame = pd.DataFrame(made | {"blocks_held": held}, index=rows.index)
    return frame.rename_axis("scheduler").reset_index()


def main() -> None:
    """Print a table for each number of layers and of running requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="8,32", help="attention layers (%(default)s)")
    parser.add_argument("--requests", default="16,64,256", help="running at once (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="that are measured (%(default)s)")
    parser.add_argument("--prompt-len", type=int, default=512, help="at least 64 (%(default)s)")
    args = parser.parse_args()
    register()
    layers = numbers(args.layers, "--layers", 1)
    for pair in itertools.product(layers, numbers(args.requests, "--requests", 1)):
        rows = compare(*pair, args.steps, args.prompt_len)
        print(rows.set_index("scheduler").T.round(3).to_string(), flush=True)


if __name__ == "__main__":
    main()
