# SPDX-License-Identifier: Apache-2.0
"""What both model runners need: specs a layer, contexts for the layers, the report of a step."""

from __future__ import annotations

from typing import Any

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
from vllm_pyramid.worker.retention import Retention
from vllm_pyramid.worker.trace import TraceWriter


class PyramidRunnerMixin:
    """Mixed into vLLM's model runner; subclasses add how that runner tells what a step holds."""

    vllm_config: VllmConfig
    attn_groups: list[list[Any]]
    retention: Retention

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One spec a layer, so that each gets a KV cache group of its own."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        if shared := getattr(self, "shared_kv_cache_layers", None):
            raise ValueError(
                f"layer {next(iter(shared))} reads the cache of another layer, which that layer "
                "would evict first: serve this model with --kv-policy none"
            )
        settings = KVSettings.from_additional_config(self.vllm_config.additional_config)
        policy = settings.policy() if settings is not None else None
        assert settings is not None and policy is not None
        specs = per_layer_specs(specs, policy)
        self.retention = Retention(
            policy,
            num_layers=len(specs),
            block_size=self.vllm_config.cache_config.block_size,
            max_num_reqs=self.vllm_config.scheduler_config.max_num_seqs + 1,
        )
        trace = None
        if settings.kv_trace is not None and policy.evicts:
            world_size = self.vllm_config.parallel_config.tensor_parallel_size
            trace = TraceWriter(
                settings.kv_trace, len(specs), get_tensor_model_parallel_rank(), world_size
            )
        self._contexts = {
            name: LayerContext(self.retention, layer, trace) for layer, name in enumerate(specs)
        }
        return specs

    def bind_layers(self) -> None:
        """Give every layer's metadata builders and attention their context."""
        bound = set()
        for groups in self.attn_groups:
            for group in groups:
                (name,) = group.layer_names
                for builder in group.metadata_builders:
                    builder.context = self._contexts[name]
                attention_layer(self.vllm_config, name).impl.context = self._contexts[name]
                bound.add(name)
        missing = self._contexts.keys() - bound
        if missing:
            raise RuntimeError(f"layers without an attention group of their own: {sorted(missing)}")

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the evictions of the step attached to the output."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
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
