# SPDX-License-Identifier: Apache-2.0
"""Contexts for the attention and the metadata builders of every layer that evicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_pyramid.attention.deferred import DeferredEviction
from vllm_pyramid.attention.layer_context import LayerContext, ReaderContext
from vllm_pyramid.attention.step_end import StepEndEviction
from vllm_pyramid.compat.runner import attention_layer, rotary_of_layer
from vllm_pyramid.policy.policy import Policy
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.rotary import Rotary
from vllm_pyramid.step.trace import TraceWriter
from vllm_pyramid.worker.eviction_tracker import EvictionTracker
from vllm_pyramid.worker.step_tables import StepTables
from vllm_pyramid.worker.worker_layers import WorkerLayers


class LayerBinding:
    """Gives each layer that evicts its context, by layer name, and takes it away again."""

    def __init__(
        self,
        config: VllmConfig,
        get_model: Callable[[], torch.nn.Module],
        layers: WorkerLayers,
        tracker: EvictionTracker,
        tables: StepTables,
        ranks: Ranks,
        *,
        traces: bool = False,
    ) -> None:
        self.contexts: dict[str, LayerContext] = {}
        self._config, self._get_model, self._layers = config, get_model, layers
        self._tracker, self._tables, self._ranks = tracker, tables, ranks
        self._traces = traces
        self.at_step_end = False  # whether layers are evicted together

    def bind(self, attn_groups: Sequence[Sequence[Any]], trace: TraceWriter | None) -> None:
        """Give the metadata builders and attention of every layer that evicts their context.

        Raises:
            RuntimeError: a layer has an attention which does not follow a policy.
            ValueError: an evicted cache would falsify the attention of a layer.
        """
        tracker = self._tracker
        deferred = DeferredEviction.of(tracker.policy, tracker.hooks, self._layers.num_tables)
        caches = [attention_layer(self._config, name).kv_cache for name in self._layers.evicting]
        step_end, self.at_step_end = None, evicts_at_step_end(caches, tracker.policy)
        if self.at_step_end:
            step_end = StepEndEviction.of(
                *(tracker.policy, tracker.hooks, len(caches) * self._layers.tables_per_layer),
                tables_per_layer=self._layers.tables_per_layer,
                traces=self._traces,
            )
        make = self._layers.layout.context_factory()
        self.contexts = {
            name: make(
                tracker,
                spec.layer_idx,
                tracker.hooks,
                self._ranks,
                rotary_for_scorers(tracker.policy, self._get_model(), name),
                trace,
                deferred=deferred,
                step_end=step_end,
            )
            for name, spec in self._layers.evicting.items()
        }
        layer_of_group: dict[int, int] = {}
        reads_shifted_tables = False
        for kv_cache_group, groups in enumerate(attn_groups):
            if not groups:
                continue  # the layers of another pipeline stage
            name = groups[0].layer_names[0]
            if name not in self.contexts:
                continue  # a group of vLLM's own, which does not evict
            (group,) = groups
            context = self.contexts[name]
            self._bind_layer(name, context, group)
            for builder in group.metadata_builders:
                builder.context = context
                reads_shifted_tables |= builder.reads_shifted_tables
            layer_of_group[kv_cache_group] = context.layer
        evicting = {context.layer for context in self.contexts.values()}
        if missing := evicting - set(layer_of_group.values()):
            raise RuntimeError(f"layers without an attention group of their own: {sorted(missing)}")
        self._tables.bind(layer_of_group)
        if reads_shifted_tables:
            max_tokens = self._config.scheduler_config.max_num_batched_tokens
            shifted = self._tables.shift_in_place_of(layer_of_group, max_tokens)
            for context in self.contexts.values():
                context.shifted = shifted

    def _bind_layer(self, name: str, context: LayerContext, group: Any) -> None:
        impl = attention_layer(self._config, name).impl
        check_attention(name, group, impl, self._tracker)
        self._layers.layout.check(name, impl)
        impl.context = context
        context.values = self._values_elsewhere(name, context.layer)
        readers = self._layers.readers.get(name, [])
        if set(group.layer_names) != {name, *readers}:
            raise RuntimeError(
                f"layer {name} shares its group with {group.layer_names}, not with {readers}"
            )
        for reader in readers:
            impl = attention_layer(self._config, reader).impl
            impl.context = ReaderContext(context, is_last=reader == readers[-1])
        context.has_readers = bool(readers)

    def _values_elsewhere(self, name: str, layer: int) -> torch.Tensor | None:
        """Return V of a layer that a method keeps elsewhere than next to K; None: next to K."""
        if self._tracker.policy.values.on_device(layer):
            return None
        cache = attention_layer(self._config, name).kv_cache
        caches = (hooks.value_cache(layer, cache) for hooks in self._tracker.hooks.cache)
        return next(values for values in caches if values is not None)

    def release(self) -> None:
        """Take the contexts away from the layers, and with them their tables."""
        for name in self.contexts:
            for layer in (name, *self._layers.readers.get(name, ())):
                attention_layer(self._config, layer).impl.context = None
        self.contexts = {}
        self._tables.release()

    def set_trace(self, trace: TraceWriter) -> None:
        """Let all bound layers write what they keep to `trace`."""
        for context in self.contexts.values():
            context.trace = trace

    def layers(self) -> list[tuple[LayerContext, Any]]:
        """Return the contexts with vLLM's attention layers."""
        return [
            (context, attention_layer(self._config, name))
            for name, context in self.contexts.items()
        ]


def evicts_at_step_end(caches: Sequence[torch.Tensor], policy: Policy) -> bool:
    """Return whether all layers are evicted at a step's end, where their policy allows it.

    That pays where launches are dear: on devices, and on the CPU for levels, which are many small
    operations.
    """
    pays = policy.schedule.waits_for_orders or any(one.device.type != "cpu" for one in caches)
    return pays and are_one_memory(caches)


def are_one_memory(caches: Sequence[torch.Tensor]) -> bool:
    """Return whether a block is the same memory in the caches of all layers."""
    return len({cache.data_ptr() for cache in caches}) == 1


def check_attention(name: str, group: Any, impl: Any, tracker: EvictionTracker) -> None:
    """Raise unless the attention of a layer follows a policy; errors as of `LayerBinding.bind`."""
    builders = [
        (builder, ("context", "reads_shifted_tables")) for builder in group.metadata_builders
    ]
    for part, needed in ((impl, ("context", "called_hooks")), *builders):
        if not all(hasattr(part, attribute) for attribute in needed):
            raise RuntimeError(
                f"layer {name} has the attention {type(part).__qualname__}, which does not "
                "follow a KV policy: serve this model with --kv-policy none, or without "
                "settings that give some layers another attention backend"
            )
    tracker.hooks.check_called(type(impl).__qualname__, impl.called_hooks(tracker.policy))
    if group.kernel_block_size is not None:
        raise RuntimeError(
            f"the attention of layer {name} splits the cache's blocks of "
            f"{tracker.block_size} tokens into blocks of {group.kernel_block_size}, "
            "which tables of a KV policy do not follow: set --block-size "
            f"{group.kernel_block_size}"
        )
    if tracker.policy.evicts and getattr(impl, "alibi_slopes", None) is not None:
        raise ValueError(
            f"layer {name} weights keys by their distance (ALiBi), and an evicted cache loses "
            "the distances: serve this model with --kv-policy none or full"
        )


def rotary_for_scorers(policy: Policy, model: torch.nn.Module, name: str) -> Rotary | None:
    """Return the rotary embedding of a layer, where a scorer of the policy needs it.

    ValueError: scorers cannot undo the layer's embedding.
    """
    policies = [policy] if policy.inner_policy is None else [policy, policy.inner_policy]
    scorers = [part.scorer for part in policies if part.scorer.needs_rotary]
    if not scorers:
        return None
    try:
        rotary = rotary_of_layer(model, name)
        if rotary is not None and any(scorer.looks_ahead for scorer in scorers):
            _ = rotary.frequencies  # the host waits for them now, not in a step
        return rotary
    except ValueError as error:
        raise ValueError(
            f"policy {policy.name!r} has the scorer {scorers[0].kind!r}, which "
            f"looks at queries without their rotary embedding: {error}"
        ) from error
