# SPDX-License-Identifier: Apache-2.0
"""The host cache of one scheduler: how it is made, what it counts, and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_pyramid.compat.side_channel import HOST_CACHE
from vllm_pyramid.kv_cache.coordinator import LockstepCoordinator
from vllm_pyramid.kv_cache.host_cache import HostCache
from vllm_pyramid.kv_cache.host_files import HostFiles
from vllm_pyramid.kv_cache.spec import HostSlots
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.scheduler.host_folder import files_of
from vllm_pyramid.step.hooks import SchedulerHooks

logger = init_logger(f"vllm.{__name__}")


class HostTier(SchedulerHooks):
    """The scheduler's hooks of `--kv-host-cache`; a block has `block_bytes` in all ranks."""

    name = HOST_CACHE

    def __init__(self, cache: HostCache, block_bytes: int) -> None:
        self._cache, self._block_bytes = cache, block_bytes

    def on_step_report(self, report: int, is_alive: Callable[[str], bool]) -> None:
        """Count files that a worker could not write."""
        assert self._cache.files is not None, "nothing else writes files"
        self._cache.files.failed_to_write(report)

    def totals(self) -> dict[str, Any]:
        """Return the counters, in tokens, and in bytes of all ranks."""
        cache, of_block = self._cache, self._block_bytes
        counters, of_slot = cache.counters, cache.slot_blocks * of_block
        return {
            self.name: {
                "queries": counters.queries,
                "hits": counters.hits,
                "evictions": counters.evictions,
                "dropped": counters.dropped,
                "bytes_stored": counters.stored * of_block,
                "bytes_loaded": counters.loaded * of_block,
                "bytes_used": cache.used_slots * of_slot,
                "bytes": cache.num_slots * of_slot,
                **({} if cache.files is None else _of_files(cache.files)),
            }
        }

    def close(self) -> None:
        """Leave the folder to others."""
        if self._cache.files is not None:
            self._cache.files.close()


def _of_files(files: HostFiles) -> dict[str, int]:
    counters = files.counters
    return {
        "file_bytes_written": counters.ordered,
        "file_bytes_read": counters.read,
        "file_evictions": counters.evictions,
        "files_damaged": counters.damaged,
        "files_unwritten": counters.unwritten,
        "file_bytes_used": files.used_bytes,
    }


def add_host_tier(
    coordinator: LockstepCoordinator,
    config: VllmConfig,
    settings: ServedSettings,
    *,
    finds_prefixes: bool,
) -> list[HostTier]:
    """Let bundles live on in host memory, and in files, if the settings say so; return the hooks.

    ValueError: requests find no prefixes, the memory holds no bundle, or a folder is not usable.
    """
    num_bytes = settings.host_cache_bytes
    if num_bytes is None:
        return []
    if not finds_prefixes:
        raise ValueError(
            "--kv-host-cache keeps what prefix caching finds, and prefix caching is off for this "
            "model: leave the flag out"
        )
    layer_blocks, specs = coordinator.layer_blocks, coordinator.layer_specs
    slots = HostSlots.of(num_bytes, specs, settings.policy.extra_bytes(specs[0]))
    files = files_of(config, settings, specs, slots)
    cache = HostCache(slots.count, layer_blocks.num_tables, files)
    coordinator.block_pool.tier = cache
    ranks = config.parallel_config.tensor_parallel_size
    logger.info(
        "kv-host-cache: %.2f GiB of host memory%s for the KV of %d tokens: %d slots of %d tokens, "
        "%.3g MiB each%s",
        slots.count * slots.num_bytes * ranks / 2**30,
        f" of {ranks} ranks together" if ranks > 1 else "",
        slots.count * layer_blocks.largest,
        slots.count,
        layer_blocks.largest,
        slots.num_bytes / 2**20,
        " and rank" if ranks > 1 else "",
    )
    return [HostTier(cache, slots.num_bytes // layer_blocks.num_tables * ranks)]
