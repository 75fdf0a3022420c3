# SPDX-License-Identifier: Apache-2.0
"""What both model runners need: specs a layer, contexts for the layers, the report of a step."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_pyramid.compat.runner import (
    attention_layer,
    extend_runner,
    per_layer_specs,
    report_evictions,
)
from vllm_pyramid.config import KVSettings
from vllm_pyramid.worker.context import LayerContext
from vllm_pyramid.worker.retention import Retention, StepRetention
from vllm_pyramid.worker.shifted import ShiftedTables
from vllm_pyramid.worker.trace import TraceWriter


class PyramidRunnerMixin:
    """Mixed into vLLM's model runner; subclasses add how that runner tells what a step holds."""

    vllm_config: VllmConfig
    device: torch.device
    attn_groups: list[list[Any]]
    retention: Retention
    shifted: ShiftedTables | None = None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One spec a layer, so that each gets a KV cache group of its own."""
        stock: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        if shared := getattr(self, "shared_kv_cache_layers", None):
            raise ValueError(
                f"layer {next(iter(shared))} reads the cache of another layer, which that layer "
                "would evict first: serve this model with --kv-policy none"
            )
        settings = KVSettings.from_additional_config(self.vllm_config.additional_config)
        policy = settings.policy() if settings is not None else None
        assert settings is not None and policy is not None
        specs = per_layer_specs(stock, policy, self.vllm_config.model_config.max_model_len)
        self.retention = Retention(
            policy,
            num_layers=len(specs),
            block_size=self.vllm_config.cache_config.block_size,
            max_num_reqs=self.vllm_config.scheduler_config.max_num_seqs + 1,
        )
        self._trace = None
        if settings.kv_trace is not None:
            self._trace = TraceWriter(
                settings.kv_trace,
                [spec.num_kv_heads for spec in specs.values()],
                get_tensor_model_parallel_rank(),
                self.vllm_config.parallel_config.tensor_parallel_size,
            )
        self._layer_names = list(specs)
        return dict(specs)

    def bind_layers(self, max_num_reqs: int, table_width: int) -> None:
        """Give every layer's metadata builders and attention their context.

        Args:
            max_num_reqs: rows of the runner's block tables. table_width: entries of a row.
        """
        retention = self.retention
        builders = [
            builder
            for groups in self.attn_groups
            for group in groups
            for builder in group.metadata_builders
        ]
        if any(builder.reads_shifted_tables for builder in builders):
            self.shifted = ShiftedTables(
                retention.num_layers,
                max_num_reqs,
                table_width,
                retention.block_size,
                self.device,
            )
        contexts = {
            name: LayerContext(retention, layer, self._trace, self.shifted)
            for layer, name in enumerate(self._layer_names)
        }
        bound = set()
        for groups in self.attn_groups:
            for group in groups:
                (name,) = group.layer_names
                for builder in group.metadata_builders:
                    builder.context = contexts[name]
                attention_layer(self.vllm_config, name).impl.context = contexts[name]
                bound.add(name)
        missing = contexts.keys() - bound
        if missing:
            raise RuntimeError(f"layers without an attention group of their own: {sorted(missing)}")

    def shift_tables(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, step: StepRetention
    ) -> None:
        """Write the step's short tables, where the attention kernels need them.

        Args:
            block_tables: `[L, R, M]` int32. seq_lens: `[>= R]` int32.
        """
        if self.shifted is not None:
            self.shifted.update(block_tables, seq_lens[: block_tables.shape[1]], step.skips)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the evictions of the step attached to the output."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        evictions = self.retention.step.evictions
        if self._trace is not None and evictions is not None:
            self._trace.finish_step(evictions)
        return report_evictions(output, self.retention.take_report())


def extend_with_policy(runner: Any, uses_v2: bool) -> None:
    """Make the worker's finished model runner follow the policy."""
    if uses_v2:
        from vllm_pyramid.worker.runner_v2 import PyramidRunnerV2 as Mixin
    else:
        from vllm_pyramid.worker.runner_v1 import (  # type: ignore[assignment]
            PyramidRunnerV1 as Mixin,
        )
    extend_runner(runner, Mixin)
