# SPDX-License-Identifier: Apache-2.0
"""What both model runners need: specs a layer, contexts for the layers, the report of a step."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tp_group
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_pyramid.attention.layer_context import LayerContext, ReaderContext
from vllm_pyramid.attention.shifted_tables import ShiftedTables
from vllm_pyramid.compat.cache_specs import set_scales_of_tokens
from vllm_pyramid.compat.drafts import draft_layers
from vllm_pyramid.compat.runner import (
    attention_layer,
    rotary_of_layer,
    send_report,
)
from vllm_pyramid.compat.side_channel import read_block_copies, read_copies, read_origins
from vllm_pyramid.kv_cache.layer_roles import LayerRoles, roles_of
from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.step.hooks import WorkerHooks, WorkerSide
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.worker.copy_stream import copies_of, host_memory_of
from vllm_pyramid.worker.eviction_tracker import EvictionTracker
from vllm_pyramid.worker.pipeline_sync import PipelineSync
from vllm_pyramid.worker.warm_up import compile_kernels

COPIED_BYTES = 64 << 20  # of blocks that are copied at once, which takes as much memory beside them


class _TensorParallelRanks:
    """`hooks.Ranks` over vLLM's group, which does nothing where there is one rank."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank_in_group, group.world_size

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.group.all_reduce(values)
        return total

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.group.broadcast(values, src=0)
        return first


class PyramidRunnerMixin:
    """Mixed into vLLM's model runner; subclasses add how that runner tells what a step holds."""

    kv_caches: list[torch.Tensor]
    kv_cache_config: KVCacheConfig

    vllm_config: VllmConfig
    device: torch.device
    attn_groups: list[list[Any]]
    get_model: Callable[[], torch.nn.Module]
    tracker: EvictionTracker
    stages: PipelineSync
    hooks: list[WorkerHooks]
    shifted: ShiftedTables | None = None
    tables_a_group: int  # that vLLM keeps on the device for each KV cache group
    _settings: ServedSettings
    _roles: LayerRoles
    _trace: TraceWriter | None = None
    _contexts: dict[str, LayerContext]
    _groups: dict[int, int]  # of KV cache groups that evict, the layer
    _own_layers: slice  # of the layers that evict those of this pipeline stage
    _model_layers: list[int]  # of all that evict, the model's own numbers

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One spec a layer that evicts, so that each gets a KV cache group of its own."""
        stock: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        settings = ServedSettings.of(self.vllm_config)
        assert settings is not None, "this worker is only chosen when a policy was asked for"
        self._settings, policy = settings, settings.policy
        self.stages = PipelineSync(get_pp_group(), self.vllm_config.max_concurrent_batches)
        readers = get_shared_kv_cache_layers(self.vllm_config)
        of_stages = self.stages.layers_of_all(stock, readers)
        drafts = draft_layers(self.vllm_config, self.get_model(), {*stock, *readers})
        roles = roles_of(
            dict(ChainMap(*(dict(layers) for layers, _ in of_stages))),
            policy,
            self.vllm_config.model_config.max_model_len,
            dict(ChainMap(*(dict(readers) for _, readers in of_stages))),
            [layers.keys() for layers, _ in of_stages] if self.stages.count > 1 else (),
            drafts,
        )
        num_layers = len(roles.evicting)
        policy.check_layers(num_layers)
        if roles.stock_groups.keys() - drafts or roles.readers:
            policy.check_hybrid()
        # Multiples of it end blocks in all layers.
        block_size = max(spec.block_size for spec in roles.evicting.values())
        self._model_layers = [spec.model_layer for spec in roles.evicting.values()]
        self._roles = roles.of_stage(stock)
        specs = list(self._roles.evicting.values())
        self._own_layers = slice(specs[0].layer_idx, specs[-1].layer_idx + 1)
        self.tracker = EvictionTracker(
            policy,
            num_layers=num_layers,
            block_size=block_size,
            max_num_reqs=self.vllm_config.scheduler_config.max_num_seqs + 1,
        )
        self.hooks = policy.worker_hooks(
            WorkerSide(
                self.vllm_config,
                self.device,
                specs,
                self.tracker.block_size,
                _TensorParallelRanks(get_tp_group()),
                model=self.get_model,
                step=lambda: self.tracker.step,
                swap_space_bytes=settings.swap_space_bytes,
                allow_device_sync=gpu_sync_allowed,
                host_memory=host_memory_of(self.device),
                copies=copies_of(self.device),
                table=self._table,
            )
        )
        self.tracker.hooks = self.hooks
        return self._roles.specs

    def table_shape(self, group: int) -> tuple[int, int]:
        """Rows and entries of the block table of a group that attention reads: `(R_max, M)`."""
        raise NotImplementedError

    def set_tables(self, tables: Mapping[int, torch.Tensor]) -> None:
        """Replace the tensors `[R_max, M]` of groups that vLLM fills and attention reads."""
        raise NotImplementedError

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's; then the layers exist and can be bound.

        vLLM may call it twice, first to measure what CUDA graphs need. What the first call bound
        goes before the second allocates: two generations of tables never exist together.
        """
        if self.shifted is not None:
            for name in self._roles.evicting:
                for layer in (name, *self._roles.readers.get(name, ())):
                    attention_layer(self.vllm_config, layer).impl.context = None
            self._drop_tables()
            self.shifted = None
            self._contexts = {}
        for hooks in self.hooks:
            hooks.allocate(kv_cache_config.num_blocks)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        set_scales_of_tokens(self.vllm_config.compilation_config.static_forward_context.values())
        self._bind_layers()

    def room_for_cache(self, available: int) -> int:
        """Of the memory that vLLM would give the KV cache, what is left beside ours: bytes.

        What some methods gather grows with the cache's blocks, so it takes its share.
        """
        page = next(iter(self._roles.evicting.values())).page_size_bytes
        if own := sum(hooks.bytes_beside_block() for hooks in self.hooks):
            available = available * page // (page + own)
        for hooks in self.hooks:
            available = hooks.limit_cache(available)
        return available

    def bytes_of_tables(self) -> int:
        """Device memory that block tables, slots and lengths of all groups will take.

        vLLM allocates them after it has profiled its memory. With one group that goes unnoticed;
        with one a layer, 32 layers and 1,024 requests of 131,072 tokens they are 2 GiB.
        """
        config = self.vllm_config.scheduler_config
        longest, rows = self.vllm_config.model_config.max_model_len, config.max_num_seqs
        entries = sum(-(-longest // spec.block_size) for spec in self._roles.specs.values())
        slots = 8 * len(self._roles.specs) * config.max_num_batched_tokens
        return 4 * rows * (self.tables_a_group * entries + 2 * len(self._roles.evicting)) + slots

    def before_profile(self) -> None:
        """vLLM is about to measure what its largest step takes: let it be as large as ours."""
        for hooks in self.hooks:
            hooks.before_profile()

    def bytes_of_buffers(self) -> int:
        """Device memory that methods take beside the cache, however large it is."""
        return sum(hooks.bytes_beside_cache() for hooks in self.hooks)

    def compile_kernels(self) -> None:
        """Compile every variant of the kernels of evictions, so that no request waits for one."""
        layers = [
            (context, attention_layer(self.vllm_config, name))
            for name, context in self._contexts.items()
        ]
        model = self.vllm_config.model_config
        traces = self._settings.trace is not None
        compile_kernels(layers, model.max_model_len, model.dtype, traces=traces)

    def _drop_tables(self) -> None:
        nothing = torch.empty(0, dtype=torch.int32, device=self.device)
        self.set_tables(dict.fromkeys(self._groups, nothing))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # no part of a small cached block can serve a large tensor

    def _bind_layers(self) -> None:
        """Give the metadata builders and attention of every layer that evicts their context.

        Raises:
            RuntimeError: a layer that vLLM gave an attention which does not follow a policy.
            ValueError: a layer whose attention an evicted cache would falsify.
        """
        tracker, ranks = self.tracker, _TensorParallelRanks(get_tp_group())
        self._contexts = {
            name: LayerContext(
                tracker, spec.layer_idx, self.hooks, ranks, self._rotary_of(name), self._trace
            )
            for name, spec in self._roles.evicting.items()
        }
        self._groups = {}
        shifting = False
        for place, groups in enumerate(self.attn_groups):
            if not groups:
                continue  # a layer of another pipeline stage
            name = groups[0].layer_names[0]
            if name not in self._contexts:
                continue  # a companion
            (group,) = groups
            context = self._contexts[name]
            impl = attention_layer(self.vllm_config, name).impl
            self._check_attention(name, group, impl)
            impl.context = context
            context.values = self._values_of(name, context.layer)
            self._bind_readers(name, context, group.layer_names)
            for builder in group.metadata_builders:
                builder.context = context
                shifting |= builder.reads_shifted_tables
            self._groups[place] = context.layer
        evicting = {context.layer for context in self._contexts.values()}
        missing = evicting - set(self._groups.values())
        if missing:
            raise RuntimeError(f"layers without an attention group of their own: {sorted(missing)}")
        if not shifting:
            return
        shapes = {layer: self.table_shape(group) for group, layer in self._groups.items()}
        (rows,) = {rows for rows, _ in shapes.values()}
        sizes = {spec.layer_idx: spec.block_size for spec in self._roles.evicting.values()}
        self._drop_tables()  # vLLM's own; freed before ours, of the same size, are allocated
        self.shifted = ShiftedTables(
            self._own_layers,
            rows,
            [(shapes[layer][1], sizes[layer]) for layer in sorted(evicting)],
            self.device,
        )
        self.set_tables(
            {
                place: self.shifted.tables[self.shifted.place(layer)]
                for place, layer in self._groups.items()
            }
        )
        for context in self._contexts.values():
            context.shifted = self.shifted

    def _table(self, layer: int) -> torch.Tensor:
        """The step's block table of a layer."""
        assert self.shifted is not None, "asked of devices whose attention reads shifted tables"
        return self.shifted.tables[self.shifted.place(layer)]

    def _bind_readers(self, name: str, context: LayerContext, members: Sequence[str]) -> None:
        readers = self._roles.readers.get(name, [])
        if set(members) != {name, *readers}:
            raise RuntimeError(f"layer {name} shares its group with {members}, not with {readers}")
        for reader in readers:
            impl = attention_layer(self.vllm_config, reader).impl
            impl.context = ReaderContext(context, is_last=reader == readers[-1])
        context.is_read = bool(readers)

    def _rotary_of(self, name: str) -> Rotary | None:
        """The rotary embedding of a layer, where the policy's scorer needs it.

        Raises:
            ValueError: the layer has one that scorers cannot undo.
        """
        policy = self.tracker.policy
        scorers = [one.scorer for one in (policy, policy.inner_policy) if one is not None]
        scorer = next((scorer for scorer in scorers if scorer.needs_rotary), None)
        if scorer is None:
            return None
        try:
            return rotary_of_layer(self.get_model(), name)
        except ValueError as error:
            raise ValueError(
                f"policy {policy.name!r} has the scorer {scorer.kind!r}, which "
                f"looks at queries without their rotary embedding: {error}"
            ) from error

    def _values_of(self, name: str, layer: int) -> torch.Tensor | None:
        """V of a layer, where a method keeps it somewhere else than beside K."""
        if self.tracker.policy.values.on_device(layer):
            return None
        cache = attention_layer(self.vllm_config, name).kv_cache
        found = (hooks.value_cache(layer, cache) for hooks in self.hooks)
        return next(values for values in found if values is not None)

    def _check_attention(self, name: str, group: Any, impl: Any) -> None:
        for part, needed in (
            (impl, ("context",)),
            *(
                (builder, ("context", "reads_shifted_tables"))
                for builder in group.metadata_builders
            ),
        ):
            if not all(hasattr(part, attribute) for attribute in needed):
                raise RuntimeError(
                    f"layer {name} has the attention {type(part).__qualname__}, which does not "
                    "follow a KV policy: serve this model with --kv-policy none, or without "
                    "settings that give some layers another attention backend"
                )
        if group.kernel_block_size is not None:
            raise RuntimeError(
                f"the attention of layer {name} splits the cache's blocks of "
                f"{self.tracker.block_size} tokens into blocks of {group.kernel_block_size}, "
                "which tables of a KV policy do not follow: set --block-size "
                f"{group.kernel_block_size}"
            )
        if self.tracker.policy.evicts and getattr(impl, "alibi_slopes", None) is not None:
            raise ValueError(
                f"layer {name} weights keys by their distance (ALiBi), and an evicted cache loses "
                "the distances: serve this model with --kv-policy none or full"
            )

    def start_trace(self) -> None:
        """Write traces from now on. The worker calls this when its warm-up requests are over."""
        folder = self._settings.trace
        if folder is None:
            return
        self._trace = TraceWriter(
            folder,
            [spec.num_kv_heads for spec in self._roles.evicting.values()],
            get_tensor_model_parallel_rank(),
            self.vllm_config.parallel_config.tensor_parallel_size,
            self._model_layers,
            first_layer=self._own_layers.start,
            stage=self.stages.stage if self.stages.count > 1 else None,
        )
        for context in self._contexts.values():
            context.trace = self._trace
        for hooks in self.hooks:
            hooks.trace = self._trace

    def take_messages(self, scheduler_output: SchedulerOutput) -> None:
        """Do what the scheduler says beside what it schedules, before the step begins."""
        self.tracker.copies = read_copies(scheduler_output)
        self._copy_blocks(scheduler_output)
        if self._trace is not None:
            for request_id, (origin, point) in read_origins(scheduler_output).items():
                self._trace.resume(request_id, origin, point)

    def _copy_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Make the step's copies of blocks, in order and piece by piece.

        vLLM's runners would make them all at once, and hold all that is copied a second time.
        """
        copies = read_block_copies(scheduler_output, self.stages.stage)
        if not copies:
            return
        page = next(iter(self._roles.evicting.values())).page_size_bytes
        count = max(COPIED_BYTES // page, 1)
        for start in range(0, len(copies), count):
            piece = list(copies[start : start + count])
            copy_kv_cache_blocks_inplace(self.kv_caches, self.kv_cache_config.num_blocks, piece)
        scheduler_output.kv_cache_block_copies = None
        if new := scheduler_output.new_block_ids_to_zero:  # with caches of several types
            filled = {copy.dst_block_id for copy in copies}
            scheduler_output.new_block_ids_to_zero = [one for one in new if one not in filled]

    def forget_request(self, request_id: str) -> None:
        """A request has finished."""
        self.tracker.remove(request_id)
        if self._trace is not None:
            self._trace.forget(request_id)

    def shift_tables(
        self,
        seq_lens: torch.Tensor,
        step: Step,
        host_lens: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Shift the tables that vLLM has just filled, where the attention kernels need it.

        Args: see `ShiftedTables.update`.
        """
        if self.shifted is None:
            return
        if (layout := step.layout) is None:
            self.shifted.update(seq_lens, step.skips, host_lens)
        else:
            self.shifted.update(seq_lens, layout.skips, host_lens, layout.seq_lens)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the evictions of the step attached to the output."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        evictions = self.tracker.step.evictions
        if evictions is not None:
            self.stages.all_reduce(evictions)
        evicted, reports = self.tracker.end_step()
        if self._trace is not None and evictions is not None:
            self._trace.finish_step(evictions)
        return send_report(output, evicted, reports) if self.stages.is_last else output
