# SPDX-License-Identifier: Apache-2.0
"""Device memory that a policy needs in addition to the KV cache."""

from __future__ import annotations

from vllm.config import VllmConfig

from vllm_pyramid.step.hooks import MethodHooks
from vllm_pyramid.worker.worker_layers import WorkerLayers


class WorkerMemory:
    """Counts the bytes that vLLM's profile does not see, before anything is allocated.

    Args:
        tensors_per_group: device tensors that the runner keeps for each block table.
    """

    def __init__(
        self,
        config: VllmConfig,
        layers: WorkerLayers,
        hooks: MethodHooks,
        tensors_per_group: int,
    ) -> None:
        self._config, self._layers, self._hooks = config, layers, hooks.cache
        self._tensors_per_group = tensors_per_group

    def before_profile(self) -> None:
        """Prepare the model for vLLM's profile: its largest step must be as large as ours."""
        for hooks in self._hooks:
            hooks.before_profile()

    def table_bytes(self) -> int:
        """Return the bytes of the block tables, slots and lengths of all KV cache groups.

        vLLM allocates them after it has profiled its memory. With one group they are negligible;
        with a group for each of 32 layers and 1,024 requests of 131,072 tokens they take 2 GiB.
        """
        scheduler = self._config.scheduler_config
        longest, rows = self._config.model_config.max_model_len, scheduler.max_num_seqs
        specs = self._layers.specs
        entries = sum(-(-longest // spec.block_size) for spec in specs.values())
        tables = 4 * rows * self._tensors_per_group * entries
        lengths_and_skips = 4 * rows * 2 * len(self._layers.evicting)
        slots = 8 * len(specs) * scheduler.max_num_batched_tokens
        return tables + lengths_and_skips + slots

    def buffer_bytes(self) -> int:
        """Return the bytes that methods allocate whatever the size of the cache."""
        return sum(hooks.bytes_of_buffers() for hooks in self._hooks)

    def cache_bytes(self, available: int) -> int:
        """Return how many of the `available` bytes the KV cache may take.

        What a method gathers for each block takes its share, and a method may limit the cache.
        """
        page = self._layers.page_size_bytes
        if gathered := sum(hooks.bytes_per_block() for hooks in self._hooks):
            available = available * page // (page + gathered)
        for hooks in self._hooks:
            available = hooks.limit_cache(available)
        return available
