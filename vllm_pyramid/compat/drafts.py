# SPDX-License-Identifier: Apache-2.0
"""Draft models under vLLM's first model runner, with a block table for each of their layers.

vLLM's proposer requires all its layers in one KV cache group, and takes the tables of a standalone
draft model from the first group, which is the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_pyramid.compat.runner import attention_layer

# Returns the block table of a KV cache group for a number of requests: `[requests, M]` int32.
Tables = Callable[[int, int], torch.Tensor]


def draft_layers(config: VllmConfig, target: torch.nn.Module, names: Collection[str]) -> set[str]:
    """Return those of the attention layers `names` that belong to a draft model."""
    if config.speculative_config is None:
        return set()
    modules = set(target.modules())
    return {name for name in names if attention_layer(config, name) not in modules}


def extend_drafter(runner: Any, tables: Tables) -> None:
    """Let a runner's proposer use a group for each of its layers, if it has layers with a cache."""
    drafter: Any = getattr(runner, "drafter", None)
    has_layers = bool(getattr(drafter, "_draft_attn_layer_names", None))
    if has_layers and not isinstance(drafter, LayerwiseProposer):
        cls = type(drafter)
        drafter.__class__ = type(f"Layerwise{cls.__name__}", (LayerwiseProposer, cls), {})
        drafter.tables = tables


class LayerwiseProposer:
    """Precedes a proposer's class.

    Attributes:
        tables: returns block tables by group and number of requests.
    """

    tables: Tables
    draft_attn_groups: list[Any]
    kv_cache_gid: int
    vllm_config: VllmConfig
    _draft_attn_layer_names: set[str]
    _slot_mapping_buffer: torch.Tensor
    _slots: dict[str, torch.Tensor]  # slot mappings of the layers after the first
    _filled: int = 0  # entries of each that the latest step has written
    _get_positions: Callable[[int], torch.Tensor]

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Accept layers in different groups."""

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        """Initialize one layer at a time, so that each gets its own attention group."""
        names, groups = self._draft_attn_layer_names, []
        for name in sorted(names):
            self._draft_attn_layer_names = {name}
            super().initialize_attn_backend(*args, **kwargs)  # type: ignore[misc]
            groups += self.draft_attn_groups
        self._draft_attn_layer_names, self.draft_attn_groups = names, groups
        sizes = {group.kv_cache_spec.block_size for group in groups}
        if len(sizes) > 1:
            raise ValueError(f"layers of the draft model have blocks of {sorted(sizes)} tokens")
        if len(groups) > 1 and self.vllm_config.model_config.uses_mrope:
            raise ValueError(
                "a draft model of several layers does not work with a KV policy yet where the "
                "model's positions are not those of tokens (M-RoPE): leave --speculative-config out"
            )
        self.kv_cache_gid = groups[0].kv_cache_group_id
        self._slots = {
            group.layer_names[0]: torch.zeros_like(self._slot_mapping_buffer)
            for group in groups[1:]
        }

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: Any, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        """Build each layer's metadata from its table; the argument has the first layer's."""
        all_metadata, by_layer = [], {}
        for group in self.draft_attn_groups:
            (name,) = group.layer_names
            common = common_attn_metadata
            if name in self._slots:
                common = self._with_tables_of(group, common_attn_metadata)
            metadata = group.build_metadata_for_drafting(
                common_attn_metadata=common, draft_index=draft_index
            )
            all_metadata.append(metadata)
            by_layer[name] = metadata
        return all_metadata, by_layer

    def _with_tables_of(self, group: Any, common: Any) -> Any:
        """Return the step's metadata with the table and slots of a layer after the first."""
        count = len(common.slot_mapping)
        table = self.tables(group.kv_cache_group_id, common.num_reqs)
        size = group.kv_cache_spec.block_size
        positions = self._get_positions(count)
        positions = positions if positions.dim() == 1 else positions[0]
        requests = torch.repeat_interleave(
            torch.arange(common.num_reqs, device=table.device),
            common.query_start_loc[1 : common.num_reqs + 1]
            - common.query_start_loc[: common.num_reqs],
            output_size=count,
        )
        entries = (positions // size).clamp(max=table.shape[1] - 1)
        slots = table[requests, entries].long() * size + positions % size
        slot_mapping = self._slots[group.layer_names[0]]
        slot_mapping[:count] = slots.masked_fill_(common.slot_mapping < 0, PAD_SLOT_ID)
        self._filled = count
        common = copy(common)
        common.block_table_tensor, common.slot_mapping = table, slot_mapping[:count]
        return common

    def _get_slot_mapping(self, num_tokens: int, *args: Any) -> dict[str, torch.Tensor]:
        mapping: dict[str, torch.Tensor] = super()._get_slot_mapping(num_tokens, *args)  # type: ignore[misc]
        for slots in self._slots.values():
            slots[self._filled : num_tokens] = PAD_SLOT_ID
        return mapping | {name: slots[:num_tokens] for name, slots in self._slots.items()}


def take_own_tables(runner: Any, common: Any) -> None:
    """Replace, in place, the tables in a proposer's metadata by those of its own first layer."""
    drafter = getattr(runner, "drafter", None)
    if common is None or not isinstance(drafter, LayerwiseProposer):
        return
    table = runner.input_batch.block_table[drafter.kv_cache_gid]
    common.block_table_tensor = table.get_device_tensor(len(common.block_table_tensor))
    common.slot_mapping = table.slot_mapping.gpu[: len(common.slot_mapping)]
