# SPDX-License-Identifier: Apache-2.0
"""A worker's V in host memory: the pool's size, attention to the best keys, what a step moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_pyramid.compat.cpu_resources import available_host_memory
from vllm_pyramid.methods.host_values.fetch import FetchedValues
from vllm_pyramid.methods.host_values.pool import HostPool
from vllm_pyramid.methods.host_values.space import capped_cache_bytes, check_host_memory, gib
from vllm_pyramid.methods.host_values.traffic import NAME, StepTraffic
from vllm_pyramid.step.attention_inputs import AttentionInputs, ValueWrite
from vllm_pyramid.step.hooks import WorkerHooks, WorkerSide
from vllm_pyramid.step.step import Step

if TYPE_CHECKING:
    from vllm_pyramid.methods.host_values import HostValues
    from vllm_pyramid.policy.policy import Policy

logger = init_logger(f"vllm.{__name__}")


class HostValueCache(WorkerHooks):
    """V of all layers that keep it in host memory; one object a model runner."""

    name = NAME

    def __init__(self, policy: Policy, values: HostValues, side: WorkerSide) -> None:
        self.policy, self.values, self.side = policy, values, side
        self.host_pool: HostPool | None = None
        self._swapped = [spec for spec in side.specs if not values.on_device(spec.layer_idx)]
        # Of the current step, R requests; the layers add to `_value_rows` what they read.
        self._step: Step | None = None
        self._top_ns = torch.zeros(0, dtype=torch.int32)
        self._value_rows = torch.zeros(0, dtype=torch.int64)
        self._past_prompt = np.zeros(0, bool)
        # Of a device with a memory of its own.
        self._fetched: FetchedValues | None = None
        if side.copies is not None:
            self._fetched = FetchedValues(side, values.device_layers, values.renormalize)

    # Memory ---------------------------------------------------------------------------------------

    def bytes_beside_cache(self) -> int:
        """See the base: buffers for V that is fetched."""
        return self._fetched.num_bytes if self._fetched is not None else 0

    def limit_cache(self, num_bytes: int) -> int:
        """The bytes that vLLM may plan the device's KV cache with, since V needs host memory too.

        Without `--kv-swap-space` V gets as much as the device's cache. On the CPU, where both are
        the same memory, the two share what vLLM would have given one, unless its size was set.

        Args:
            num_bytes: what the device has room for.

        Raises:
            ValueError: the host has too little memory, or may not use enough of it.
        """
        config, specs = self.side.config, self.side.specs
        longest = config.model_config.max_model_len
        if config.model_config.original_max_model_len == -1:
            longest = 1  # vLLM fits the length to the memory after this
        page_bytes = specs[0].page_size_bytes
        cache, on_cpu = config.cache_config, self.side.device.type == "cpu"
        swap_bytes = self.side.swap_space_bytes
        sized = cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override
        if on_cpu and swap_bytes is None and not sized:
            swap_bytes = num_bytes // 2
        capped = capped_cache_bytes(
            num_bytes,
            swap_bytes,
            page_bytes=page_bytes,
            longest_pages=sum(-(-longest // spec.block_size) for spec in specs),
            longest=longest,
        )
        pool_bytes = capped
        if (override := cache.num_gpu_blocks_override) is not None:
            pool_bytes = override * page_bytes
        # Now, while no worker has allocated anything: on the CPU the "device's" half comes first.
        workers = config.parallel_config.tensor_parallel_size
        taken = pool_bytes * workers if on_cpu else 0
        free_bytes = max(0, available_host_memory() - taken)
        check_host_memory(pool_bytes, swap_bytes, free_bytes=free_bytes, workers=workers)
        if capped < num_bytes:
            logger.info(
                "kv-swap-space: %s of host memory for V; the device's KV cache gets as many pages, "
                "%s of the %s that it could have",
                gib(capped),
                gib(capped),
                gib(num_bytes),
            )
        return capped

    def allocate(self, num_blocks: int) -> None:
        """Host memory for V of every page of the device's pool."""
        if self.host_pool is not None:
            self.host_pool.release()
        self.host_pool = None
        if self._fetched is not None:
            self._fetched.allocate()
        page_bytes = self.side.specs[0].page_size_bytes
        self.host_pool = HostPool(num_blocks, page_bytes, self.side.host_memory)
        logger.info(
            "kv-policy %s: V of %d of %d layers in host memory; %d pages there and in the device's "
            "KV cache, %s each",
            self.policy.name,
            len(self._swapped),
            self.side.num_layers,
            self.host_pool.num_pages,
            gib(self.host_pool.num_bytes),
        )

    def value_cache(self, layer: int, key_cache: torch.Tensor) -> torch.Tensor | None:
        """See the base."""
        if self.values.on_device(layer):
            return None
        assert self.host_pool is not None
        cache = self.host_pool.values(key_cache)
        if self._fetched is not None:
            self._fetched.add(layer, cache)
        return cache

    def compile_kernels(self, call: AttentionInputs) -> None:
        """See the base."""
        if self._fetched is not None and not self.values.on_device(call.layer):
            self._fetched.compile_kernels(call)

    # Every step -----------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """How many keys each request uses: all of them until its prompt has been processed."""
        past_prompt = step.computed >= step.prompt_lens
        within = past_prompt | (step.computed + step.scheduled <= step.prompt_lens)
        assert within.all(), "a chunk crosses the end of a prompt, where keys are chosen from"
        top_ns = np.array([_top_n(request.policy) for request in step.requests], np.int32)
        self._step, self._past_prompt = step, past_prompt
        self._top_ns = torch.from_numpy(top_ns * past_prompt)
        self._value_rows = torch.zeros(len(top_ns), dtype=torch.int64)
        if self._fetched is not None:
            self._fetched.begin_step(step, self._top_ns.numpy())

    def write_values(self, write: ValueWrite) -> None:
        """See the base."""
        assert self._fetched is not None, "V is written beside K, into another memory"
        self._fetched.write(write)

    def attend(self, call: AttentionInputs, out: torch.Tensor) -> bool:
        """Attention to the best keys, in layers whose V is on the host."""
        if self.values.on_device(call.layer):
            return False
        if self._fetched is not None:
            if (rows := self._fetched.attend(call, out)) is not None:
                kv_heads, heads = call.key_cache.shape[1], call.query.shape[1]
                self._value_rows += torch.from_numpy(rows[0] * kv_heads + rows[1] * heads)
            return True
        if self._step is None:
            return False
        call.ops.topn_attention(
            out,
            call.batch,
            call.softmax,
            self._top_ns,
            value_rows=self._value_rows,
            renormalize=self.values.renormalize,
        )
        return True

    def after_attention(self, call: AttentionInputs) -> None:
        """See the base: the layers below those with V on the host have time to fetch it."""
        if self._fetched is not None:
            self._fetched.prefetch(call.ops, call.layer)

    def end_step(self, step: Step) -> None:
        """See the base."""
        if self._fetched is not None:
            self._fetched.end_step()

    def report(self) -> Any | None:
        """What the step moved between device and host memory, over all ranks; once a step."""
        step, self._step = self._step, None
        if step is None:
            return None
        spec = self._swapped[0]
        ranks = self.side.config.parallel_config.tensor_parallel_size
        row_bytes = spec.head_size * spec.dtype.itemsize * ranks
        rows_of_token = sum(spec.num_kv_heads for spec in self._swapped)
        scheduled = step.scheduled.astype(np.int64)
        return StepTraffic(
            [request.request_id for request in step.requests],
            (scheduled * (rows_of_token * row_bytes)).tolist(),
            (self._value_rows.numpy() * row_bytes).tolist(),
            (scheduled * self._past_prompt).tolist(),
        )


def _top_n(policy: Policy) -> int:
    """Of a request's policy; 0, all keys, with one that keeps V on the device."""
    return int(getattr(policy.values, "top_n", 0))
