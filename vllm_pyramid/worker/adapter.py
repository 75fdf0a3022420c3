# SPDX-License-Identifier: Apache-2.0
"""What the adapters to both of vLLM's model runners have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.worker.pipeline_sync import PipelineSync
from vllm_pyramid.worker.runtime import WorkerRuntime
from vllm_pyramid.worker.step_tables import RunnerTables

logger = init_logger(f"vllm.{__name__}")


class TensorParallelRanks:
    """`step.ranks.Ranks` over vLLM's group, which returns its input where there is one rank."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank_in_group, group.world_size

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        total: torch.Tensor = self._group.all_reduce(values)
        return total

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, bit for bit."""
        first: torch.Tensor = self._group.broadcast(values, src=0)
        return first

    def any(self, is_true: bool) -> bool:
        """Return whether `is_true` on some rank."""
        if self.size == 1:
            return is_true
        count = torch.tensor([int(is_true)])
        torch.distributed.all_reduce(count, group=self._group.cpu_group)
        return bool(count)


class RunnerAdapter:
    """Precedes a model runner's class; its methods call vLLM's and the runtime's.

    `pyramid` is the runtime, made when vLLM first asks for the layers' specs. The other attributes
    are the runner's.
    """

    pyramid: WorkerRuntime
    attn_groups: list[list[Any]]
    device: torch.device
    get_model: Callable[[], torch.nn.Module]
    kv_cache_config: KVCacheConfig
    kv_caches: list[torch.Tensor]
    vllm_config: VllmConfig

    def runner_tables(self) -> RunnerTables:
        """Return this runner's block tables."""
        raise NotImplementedError

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return a spec of its own for each layer that evicts, so that each gets its own group.

        vLLM asks again where it measures what CUDA graphs need.
        """
        stock: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        if not hasattr(self, "pyramid"):
            settings = ServedSettings.of(self.vllm_config)
            assert settings is not None, "this worker is only chosen when a policy was asked for"
            self.pyramid = WorkerRuntime(
                self.vllm_config,
                settings,
                self.device,
                self.get_model,
                stock,
                self.runner_tables(),
                PipelineSync(get_pp_group(), self.vllm_config.max_concurrent_batches),
                TensorParallelRanks(get_tp_group()),
            )
        return self.pyramid.layers.specs

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache as vLLM does, and bind the layers, which exist from then on."""
        self.pyramid.prepare_cache(kv_cache_config.num_blocks)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        self.pyramid.bind(self.attn_groups)
        self.pyramid.bind_host_pool(self.kv_caches, kv_cache_config.num_blocks)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step as vLLM does; a worker that fails ends unless the engine reports it."""
        with self._ending_unreported():
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as vLLM does; the step's evictions are attached to the output."""
        with self._ending_unreported():
            return self.pyramid.end_step(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    @contextmanager
    def _ending_unreported(self) -> Iterator[None]:
        """End this worker where it fails and only others answer the engine.

        vLLM's executor hears one worker's exception. Where another one fails, it logs that and goes
        on, while the worker that answers waits for it in a collective: for 300 seconds, by default.
        The executor notices at once that a worker has ended, and ends the others.
        """
        try:
            yield
        except Exception:
            if self.pyramid.reports_errors:
                raise
            logger.exception(
                "Worker failed during a collective step; other ranks are blocked. Shutting down "
                "the engine"
            )
            raise SystemExit(1) from None
