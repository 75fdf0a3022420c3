# SPDX-License-Identifier: Apache-2.0
"""Device memory that a policy needs in addition to the KV cache."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_pyramid.kv_cache.spec import HostSlots
from vllm_pyramid.policy.planning import levels_per_token
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.step.eviction_memory import EvictionMemory
from vllm_pyramid.step.hooks import MethodHooks
from vllm_pyramid.worker.host_pool import waiting_bytes
from vllm_pyramid.worker.step_tables import RunnerTables
from vllm_pyramid.worker.worker_layers import WorkerLayers

logger = init_logger(f"vllm.{__name__}")


class WorkerMemory:
    """Counts the bytes that vLLM's profile does not see, before anything is allocated.

    Args:
        device: of the cache. settings: the served policy's.
        tables: of the model runner.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: ServedSettings,
        device: torch.device,
        layers: WorkerLayers,
        hooks: MethodHooks,
        tables: RunnerTables,
    ) -> None:
        self._config, self._layers, self._hooks = config, layers, hooks.cache
        self._settings, self._device = settings, device
        self._gathers = bool(hooks.after_compact)
        together = device.type != "cpu" or settings.policy.schedule.waits_for_orders
        self._at_step_end = together and not hooks.in_evictions
        self._followers = hooks.copy_blocks
        self._tables = tables

    def before_profile(self) -> None:
        """Prepare the model for vLLM's profile: its largest step must be as large as ours."""
        for hooks in self._hooks:
            hooks.before_profile()

    def table_bytes(self) -> int:
        """Return the bytes of the block tables, slots and lengths of all KV cache groups.

        vLLM allocates them after it has profiled its memory. With one group they are negligible;
        with a group for each of 32 layers and 1,024 requests of 131,072 tokens they take 1 GiB.
        """
        scheduler = self._config.scheduler_config
        longest, rows = self._config.model_config.max_model_len, scheduler.max_num_seqs
        specs, evicting = self._layers.specs, self._layers.evicting
        layout, tables = self._layers.layout, self._tables
        on_device = self._device.type != "cpu"
        own = others = tables.tensors_per_group
        if on_device:
            # The step's, and those of which they are made; in place where vLLM fills them.
            apart = tables.holds_tables or layout.tables_per_layer > 1
            own = 1 + (apart and not tables.held_on_host)
            others = int(not tables.held_on_host)
        entries, most = 0, 0
        for name, spec in specs.items():
            width = getattr(spec, "tables_per_layer", 1) * -(-longest // spec.block_size)
            entries += width * (own if name in evicting else tables.tensors_per_group)
            most = max(most, width)
        # Every stage of a pipeline has the groups of all stages.
        other_stages = self._layers.num_layers - len(evicting)
        entries += other_stages * most * others
        # Length and skip of each row, and the skip of each slot in 8 bytes.
        numbers = 4 * rows * 4 * len(evicting) * layout.tables_per_layer
        most_tokens = scheduler.max_num_batched_tokens
        found = 4 * rows * entries + numbers + 8 * (len(specs) + other_stages) * most_tokens
        if on_device:
            found += layout.device_bytes(len(evicting), rows, most_tokens)
        return found

    def buffer_bytes(self) -> int:
        """Return the bytes that methods allocate whatever the size of the cache, and of logits.

        vLLM makes logits of the prompts that the engine replays, and of these logarithms in
        float32; on the host by way of a copy in float32.
        """
        found = sum(hooks.bytes_of_buffers() for hooks in self._hooks)
        if (tokens := self._settings.max_prompt_logits) is not None:
            model = self._config.model_config
            found += tokens * model.get_vocab_size() * (model.head_dtype.itemsize + 2 * 4)
        return found

    def host_cache_bytes(self) -> int:
        """Return the bytes of host memory that this worker takes for the host cache.

        Raises:
            ValueError: they hold no slot, or a method keeps memory that does not follow blocks to
                the host.
        """
        wanted = self._settings.host_cache_bytes
        if wanted is None:
            return 0
        with_pools = [hooks for hooks in self._hooks if hooks.bytes_per_block()]
        behind = {
            hooks.label for hooks in (*with_pools, *self._followers) if hooks.block_extras() is None
        }
        if behind:
            raise ValueError(
                f"--kv-host-cache does not work with {', '.join(sorted(behind))} yet: it has "
                "memory for each block of the device, which is not copied to the host; leave the "
                "flag out"
            )
        specs = list(self._layers.evicting.values())
        slots = HostSlots.of(wanted, specs, self._settings.policy.extra_bytes(specs[0]))
        num_bytes = slots.count * slots.num_bytes
        if self._settings.host_cache_dir is None:
            return num_bytes
        return num_bytes + waiting_bytes(num_bytes)

    def check_host(self, free: int) -> None:
        """Raise ValueError unless this worker's part of the host cache fits into `free` bytes."""
        wanted = self.host_cache_bytes()
        if wanted > free:
            raise ValueError(
                f"a worker's share of --kv-host-cache, {wanted / 2**30:.2f} GiB, does not fit into "
                f"the {free / 2**30:.2f} GiB of free memory: lower it"
            )

    def eviction_bytes(self) -> int:
        """Return the most bytes that the evictions of a step take in addition to the cache."""
        model, policy = self._config.model_config, self._settings.policy
        parts = [part for part in (policy, policy.inner_policy) if part is not None]
        threads = torch.get_num_threads() if self._device.type == "cpu" else 0
        memories = [
            EvictionMemory(
                part,
                list(self._layers.evicting.values()),
                model.get_num_attention_heads(self._config.parallel_config),
                model.max_model_len,
                self._most_evicting(part),
                threads=threads,
                traces=self._settings.trace is not None,
                gathers=self._gathers,
                at_step_end=self._at_step_end,
                tables_per_layer=self._layers.tables_per_layer,
            )
            for part in parts
        ]
        return max(memory.num_bytes for memory in memories)

    def _most_evicting(self, policy: Policy) -> int:
        """Return the most requests that evict in a step: each has its window's queries in it."""
        scheduler = self._config.scheduler_config
        most = scheduler.max_num_seqs
        if policy.scorer.needs_queries and policy.window:
            most = min(most, max(1, scheduler.max_num_batched_tokens // policy.window))
        return most

    def reserve(self, available: int, is_fixed: bool) -> int:
        """Return how many of the `available` bytes are for the KV cache, and log what is not.

        Args:
            is_fixed: the user has set the cache's size, from which nothing is taken.

        Raises:
            ValueError: nothing would be left for the KV cache.
        """
        tables, buffers = self.table_bytes(), self.buffer_bytes()
        evictions = self.eviction_bytes()
        # On the CPU the host cache comes from the memory of which vLLM gives the KV cache a share.
        host = self.host_cache_bytes() if self._device.type == "cpu" else 0
        left = available if is_fixed else available - tables - buffers - evictions - host
        logger.info(
            "kv-policy: reserved %.2f GiB for block tables, %.2f GiB for buffers of the policy and "
            "%.2f GiB for evictions, %s %.2f GiB of KV cache; a smaller --max-num-seqs or "
            "--max-model-len reserves less",
            tables / 2**30,
            buffers / 2**30,
            evictions / 2**30,
            "beside" if is_fixed else "which leaves",
            left / 2**30,
        )
        if left <= 0:
            raise ValueError(
                f"no memory is left for the KV cache: of the {available / 2**30:.2f} GiB that vLLM "
                f"would give it, the block tables of all layers take {tables / 2**30:.2f} GiB, the "
                f"policy's own buffers {buffers / 2**30:.2f} GiB, evictions "
                f"{evictions / 2**30:.2f} GiB and the host cache {host / 2**30:.2f} GiB; lower "
                "--max-model-len, --max-num-seqs or --kv-host-cache, or raise "
                "--gpu-memory-utilization"
            )
        return self.cache_bytes(left)

    def check_room(self, cache_bytes: int, free: int) -> None:
        """Raise ValueError unless the host has room for a cache and for what comes in addition.

        Args:
            cache_bytes: of the KV cache, which is not allocated yet. free: bytes of the host.
        """
        extra = self.table_bytes() + self.buffer_bytes() + self.eviction_bytes()
        extra += self.host_cache_bytes()
        if cache_bytes + extra > free:
            raise ValueError(
                f"the KV cache of {cache_bytes / 2**30:.2f} GiB, and {extra / 2**30:.2f} GiB that "
                "block tables, buffers, evictions and the host cache may take in addition, do not "
                f"fit into the {free / 2**30:.2f} GiB of free memory: lower "
                "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE), --max-model-len, "
                "--max-num-seqs or --kv-host-cache"
            )

    def cache_bytes(self, available: int) -> int:
        """Return how many of the `available` bytes the KV cache may take.

        What a method gathers for each block takes its share, and a method may limit the cache. So
        do the levels of requests that may be ordered to evict: a byte for each token and KV head
        (`levels_per_token`).
        """
        page, layers, policy = self._layers.page_size_bytes, self._layers, self._settings.policy
        gathered = sum(hooks.bytes_per_block() for hooks in self._hooks)
        if policy.schedule.waits_for_orders and layers.evicting:
            longest = self._config.model_config.max_model_len
            levels = levels_per_token(policy, longest, layers.num_tables, layers.block_size)
            specs = layers.evicting.values()
            gathered += levels * max(spec.block_size * spec.num_kv_heads for spec in specs)
        if gathered:
            available = available * page // (page + gathered)
        for hooks in self._hooks:
            available = hooks.limit_cache(available)
        return available
