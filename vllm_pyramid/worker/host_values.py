# SPDX-License-Identifier: Apache-2.0
"""The model runner's part in V in host memory: the pool's size, its binding, what a step moved."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_pyramid.compat.cpu_resources import available_host_memory
from vllm_pyramid.compat.runner import attention_layer
from vllm_pyramid.config import KVSettings
from vllm_pyramid.scheduler.spec import LayerKVCacheSpec
from vllm_pyramid.swap.pool import HostPool
from vllm_pyramid.swap.space import capped_cache_bytes, check_host_memory, gib
from vllm_pyramid.swap.traffic import StepTraffic
from vllm_pyramid.worker.context import LayerContext
from vllm_pyramid.worker.retention import Retention

logger = init_logger(f"vllm.{__name__}")


class HostValuesMixin:
    """Does nothing with a policy that keeps V on the device."""

    vllm_config: VllmConfig
    device: torch.device
    retention: Retention
    host_pool: HostPool | None = None
    _specs: dict[str, LayerKVCacheSpec]

    def _settings(self) -> KVSettings:
        settings = KVSettings.from_additional_config(self.vllm_config.additional_config)
        assert settings is not None
        return settings

    def limit_cache_memory(self, num_bytes: int) -> int:
        """The bytes that vLLM may plan the device's KV cache with, where V needs host memory too.

        Without `--kv-swap-space` V gets as much as the device's cache. On the CPU, where both are
        the same memory, the two share what vLLM would have given one, unless its size was set.

        Args:
            num_bytes: what the device has room for.

        Raises:
            ValueError: the host has too little memory, or may not use enough of it.
        """
        if not self.retention.policy.swap_v:
            return num_bytes
        config, specs = self.vllm_config, self._specs.values()
        longest = config.model_config.max_model_len
        if config.model_config.original_max_model_len == -1:
            longest = 1  # vLLM fits the length to the memory after this
        page_bytes = next(iter(specs)).page_size_bytes
        cache, on_cpu = config.cache_config, self.device.type == "cpu"
        swap_bytes = self._settings().swap_space_bytes
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

    def take_host_pool(self, kv_cache_config: Any, *args: Any) -> None:
        """Allocate host memory for V of every page of the device's pool, where the policy asks."""
        policy = self.retention.policy
        if not policy.swap_v:
            return
        self.host_pool = HostPool(
            kv_cache_config.num_blocks,
            next(iter(self._specs.values())).page_size_bytes,
            pinned=self.device.type != "cpu",
        )
        logger.info(
            "kv-policy %s: V of %d of %d layers in host memory; %d pages there and in the device's "
            "KV cache, %s each",
            policy.name,
            sum(policy.swaps_layer(spec.layer_idx) for spec in self._specs.values()),
            len(self._specs),
            self.host_pool.num_pages,
            gib(self.host_pool.num_bytes),
        )

    def bind_host_values(self, name: str, context: LayerContext) -> None:
        """Give a layer its V in host memory, beside the K that vLLM has allocated for it."""
        policy = self.retention.policy
        if self.host_pool is not None and policy.swaps_layer(context.layer):
            cache = attention_layer(self.vllm_config, name).kv_cache
            context.host_values = self.host_pool.values(cache)
            context.renormalize = policy.renormalize

    def step_traffic(self) -> StepTraffic | None:
        """What the step moved between device and host memory, over all ranks; once a step."""
        choice, self.retention.step.choice = self.retention.step.choice, None
        if choice is None:
            return None
        policy = self.retention.policy
        swapped = [spec for spec in self._specs.values() if policy.swaps_layer(spec.layer_idx)]
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        return choice.traffic(
            swapped[0].head_size * swapped[0].dtype.itemsize * ranks,
            sum(spec.num_kv_heads for spec in swapped),
        )
