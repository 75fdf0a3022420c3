# SPDX-License-Identifier: Apache-2.0
"""A worker's V in host memory: the pool's size, attention to the best keys, what a step moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_pyramid.compat.cpu_resources import available_host_memory
from vllm_pyramid.methods.host_values.fetch import FetchedValues
from vllm_pyramid.methods.host_values.kernels import value_ops
from vllm_pyramid.methods.host_values.traffic import NAME, StepTraffic
from vllm_pyramid.plan import PlanMismatchError
from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite
from vllm_pyramid.step.hooks import CacheHooks, HostMemory, LayerHooks, StepHooks, WorkerContext
from vllm_pyramid.step.score_check import mark_wrong_attention
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.methods.host_values import HostValues
    from vllm_pyramid.policy.policy import Policy

logger = init_logger(f"vllm.{__name__}")

ROWS_AT_ONCE = 32  # kTopnRows of csrc/cpu/kernels.h
MORE_KEYS = 160  # for which a row of logits has room, beside a request's


class HostValueCache(CacheHooks, StepHooks, LayerHooks):
    """V of all layers that keep it in host memory, on devices whose memory is the host's."""

    name = NAME

    def __init__(self, policy: Policy, values: HostValues, context: WorkerContext) -> None:
        self.policy, self.values, self.context = policy, values, context
        self.host_pool: HostPool | None = None
        self._swapped = [spec for spec in context.specs if not values.on_device(spec.layer_idx)]
        # Of the current step, R requests; the layers add to `_value_rows` what they read.
        self._step: Step | None = None
        self._top_ns = torch.zeros(0, dtype=torch.int32)
        self._value_rows = torch.zeros(0, dtype=torch.int64)
        self._past_prompt = np.zeros(0, bool)
        self._last_queries = torch.zeros(0, dtype=torch.int64)

    def bytes_of_buffers(self) -> int:
        """Return the bytes in which the threads of the C++ kernel choose among a request's keys."""
        longest = self.context.config.model_config.max_model_len
        # Logits of some rows; of one, keys to choose from, as many that are left of them, places.
        of_thread = 4 * (ROWS_AT_ONCE + 3) * (longest + MORE_KEYS) + 2**18
        return 5 * torch.get_num_threads() * of_thread // 4  # scratch is a quarter larger

    def limit_cache(self, num_bytes: int) -> int:
        """Return the bytes that the device's KV cache may take, since V needs host memory, too.

        On the CPU the two share what vLLM would have given one, unless its size was set.
        ValueError: the host has too little memory, or may not use enough of it.
        """
        config, specs = self.context.config, self.context.specs
        longest = config.model_config.max_model_len
        if config.model_config.original_max_model_len == -1:
            longest = 1  # vLLM fits the length to the memory after this
        page_bytes = specs[0].page_size_bytes
        cache, on_cpu = config.cache_config, self.context.device.type == "cpu"
        swap_bytes = self.context.swap_space_bytes
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
                "kv-swap-space: %s of host memory for V; the device's KV cache gets the same "
                "number of pages: %s of %s",
                gib(capped),
                gib(capped),
                gib(num_bytes),
            )
        return capped

    def allocate(self, num_blocks: int) -> None:
        if self.host_pool is not None:
            self.host_pool.release()
        self.host_pool = None
        page_bytes = self.context.specs[0].page_size_bytes
        self.host_pool = HostPool(num_blocks, page_bytes, self.context.host_memory)
        logger.info(
            "kv-policy %s: V of %d of %d layers in host memory; %d pages there and in the device's "
            "KV cache, %s each",
            self.policy.name,
            len(self._swapped),
            self.context.num_layers,
            self.host_pool.num_pages,
            gib(self.host_pool.num_bytes),
        )

    def value_cache(self, layer: int, key_cache: torch.Tensor) -> torch.Tensor | None:
        if self.values.on_device(layer):
            return None
        assert self.host_pool is not None
        return self.host_pool.values(key_cache)

    def begin_step(self, step: Step) -> None:
        """Find how many keys each request uses: all of them until its prompt has been processed."""
        past_prompt = step.computed >= step.prompt_lens
        within = past_prompt | (step.computed + step.scheduled <= step.prompt_lens)
        if not within.all():
            row = int(np.flatnonzero(~within)[0])
            raise PlanMismatchError(
                f"request {step.requests[row].request_id}: a chunk of {step.scheduled[row]} tokens "
                f"behind {step.computed[row]} crosses the end of its prompt of "
                f"{step.prompt_lens[row]}, from which keys are chosen; report this"
            )
        # 0, all keys, where a request's policy keeps V on the device.
        chosen = [getattr(request.policy.values, "top_n", 0) for request in step.requests]
        top_ns = np.array(chosen, np.int32)
        self._step, self._past_prompt = step, past_prompt
        self._top_ns = torch.from_numpy(top_ns * past_prompt)
        self._value_rows = torch.zeros(len(top_ns), dtype=torch.int64)
        last = np.cumsum(step.scheduled, dtype=np.int64) - 1
        self._last_queries = upload(last, self.context.device)

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        if self.values.on_device(inputs.layer) or self._step is None:
            return False
        value_ops(inputs.ops).topn_attention(
            out,
            inputs.batch,
            inputs.softmax,
            self._top_ns,
            value_rows=self._value_rows,
            renormalize=self.values.renormalize,
        )
        self._check(inputs, out)
        return True

    def _check(self, inputs: AttentionInputs, out: torch.Tensor) -> None:
        """Let requests fail whose attention is NaN in the last layer: those below pass NaN on."""
        step = self._step
        if step is None or inputs.layer != self._swapped[-1].layer_idx:
            return
        rows = out.index_select(0, self._last_queries)
        mark_wrong_attention(step.failures, step.request_ids, inputs.layer, rows)

    def end_step(self, step: Step) -> Any | None:
        begun, self._step = self._step, None
        if begun is None:
            return None
        spec = self._swapped[0]
        ranks = self.context.config.parallel_config.tensor_parallel_size
        row_bytes = spec.head_size * spec.dtype.itemsize * ranks
        rows_of_token = sum(spec.num_kv_heads for spec in self._swapped)
        scheduled = begun.scheduled.astype(np.int64)
        return StepTraffic(
            begun.request_ids,
            (scheduled * (rows_of_token * row_bytes)).tolist(),
            (self._value_rows.numpy() * row_bytes).tolist(),
            (scheduled * self._past_prompt).tolist(),
        )


class FetchedValueCache(HostValueCache):
    """V on devices with a memory of their own, which fetch it from the host's."""

    def __init__(self, policy: Policy, values: HostValues, context: WorkerContext) -> None:
        super().__init__(policy, values, context)
        self._fetched = FetchedValues(context, values.device_layers, values.renormalize)

    def bytes_of_buffers(self) -> int:
        return self._fetched.num_bytes

    def allocate(self, num_blocks: int) -> None:
        self._fetched.allocate()
        super().allocate(num_blocks)

    def value_cache(self, layer: int, key_cache: torch.Tensor) -> torch.Tensor | None:
        cache = super().value_cache(layer, key_cache)
        if cache is not None:
            self._fetched.add(layer, cache)
        return cache

    def compile_kernels(self, inputs: AttentionInputs) -> None:
        if not self.values.on_device(inputs.layer):
            self._fetched.compile_kernels(inputs)

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._fetched.begin_step(step, self._top_ns.numpy())

    def after_write(self, write: CacheWrite) -> None:
        """Write V to the host, in layers that keep it there: the device's kernel wrote K alone."""
        if not self.values.on_device(write.layer):
            self._fetched.write(write)

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        if self.values.on_device(inputs.layer):
            return False
        if (rows := self._fetched.attend(inputs, out)) is not None:
            kv_heads, heads = inputs.key_cache.shape[1], inputs.query.shape[1]
            self._value_rows += torch.from_numpy(rows[0] * kv_heads + rows[1] * heads)
            self._check(inputs, out)
        return True

    def after_attention(self, inputs: AttentionInputs) -> None:
        """Begin to fetch V of the next layer: those with V on the device leave time for it."""
        self._fetched.prefetch(inputs.ops, inputs.layer)

    def end_step(self, step: Step) -> Any | None:
        self._fetched.end_step()
        return super().end_step(step)


class HostPool:
    """One region of host memory, `num_pages` pages of `page_bytes`, for all layers of a worker.

    Host page b holds V of the tokens whose K is in device page b, in the same order. Pages of
    layers that keep V on the device leave theirs unused.
    """

    def __init__(
        self, num_pages: int, page_bytes: int, make: Callable[[int], HostMemory] = HostMemory
    ) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._memory = make(num_pages * page_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def release(self) -> None:
        self._memory.release()

    def values(self, key_cache: torch.Tensor) -> torch.Tensor:
        """Return V of a layer in host memory, dense, shaped as the device pool's `key_cache`."""
        pages, heads, tokens, size = key_cache.shape
        page_bytes = heads * tokens * size * key_cache.element_size()
        if (pages, page_bytes) != (self.num_pages, self.page_bytes):
            raise RuntimeError(
                f"the device's cache has {pages} pages of {page_bytes} bytes of K, the host's "
                f"memory {self.num_pages} of {self.page_bytes}: V would lie elsewhere; report this"
            )
        return self._memory.bytes.view(key_cache.dtype).view(pages, heads, tokens, size)


_GIB = 2**30


def gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"


def capped_cache_bytes(
    device_bytes: int, swap_bytes: int | None, *, page_bytes: int, longest_pages: int, longest: int
) -> int:
    """Return the bytes that the device's KV cache may have, so that each page has one on the host.

    ValueError: the host could not hold a single request of `longest` tokens.
    """
    if swap_bytes is None or swap_bytes >= device_bytes:
        return device_bytes
    pages, needed = swap_bytes // page_bytes, longest_pages + 1  # and vLLM's null block
    if pages < needed:
        raise ValueError(
            f"--kv-swap-space {gib(swap_bytes)} holds {pages} pages of V of {page_bytes} bytes; a "
            f"request of max_model_len {longest} tokens needs {needed} ({gib(needed * page_bytes)})"
            ": raise --kv-swap-space or lower --max-model-len"
        )
    return pages * page_bytes


def check_host_memory(
    pool_bytes: int, swap_bytes: int | None, *, free_bytes: int, workers: int
) -> None:
    """Raise ValueError unless the pools of this machine's workers can be allocated."""
    if swap_bytes is not None and pool_bytes > swap_bytes:
        raise ValueError(
            f"the device's KV cache of {gib(pool_bytes)} has pages for which --kv-swap-space "
            f"{gib(swap_bytes)} has no room, because --num-gpu-blocks-override sets their number: "
            "leave the override out, or raise --kv-swap-space"
        )
    if pool_bytes * workers > free_bytes:
        raise ValueError(
            f"V takes {gib(pool_bytes)} of host memory a worker, as much as the device's KV cache, "
            f"{gib(pool_bytes * workers)} for {workers}; this host has {gib(free_bytes)} free: set "
            "a smaller --kv-swap-space (the device's KV cache then shrinks with it) without "
            "--num-gpu-blocks-override, or free memory"
        )
