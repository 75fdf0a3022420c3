# SPDX-License-Identifier: Apache-2.0
"""One attention layer whose KV heads have block tables of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_pyramid.attention.cpu_metadata import PyramidCpuMetadata, check_size
from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.attention.per_head.lane_tables import LaneTables
from vllm_pyramid.attention.per_head.lanes import HeadLanes
from vllm_pyramid.step.attention_inputs import AttentionInputs


@dataclass
class HeadCpuMetadata(PyramidCpuMetadata):
    """One layer's view of a step, whose requests are lanes; `slots` is `[T * G]` int64."""

    slots: torch.Tensor


@dataclass
class HeadContext(LayerContext):
    """A layer whose attention has a request of one KV head for each of its `lanes`."""

    computes_log_sum_exp: ClassVar[bool] = False  # rows of single heads are in another order

    lanes: HeadLanes = field(kw_only=True)

    def cpu_metadata(self, common: CommonAttentionMetadata) -> PyramidCpuMetadata:
        lanes, step, num_reqs = self.lanes, self.step, common.num_reqs
        first = self.layer * lanes.count
        skips = torch.from_numpy(step.skips[first : first + lanes.count])
        check_size(num_reqs, skips.shape[1])
        shared = lanes.of_step(
            step,
            common.query_start_loc[: num_reqs + 1],
            common.seq_lens[:num_reqs],
            common.max_seq_len,
        )
        return HeadCpuMetadata(
            num_tokens=common.num_actual_tokens,
            block_table=lanes.tables(shared, common.block_table_tensor),
            query_start_loc=shared.query_starts,
            seq_lens=shared.seq_lens,
            skips=skips.T.flatten(),
            slots=lanes.slots(shared, common.block_table_tensor),
        )

    def to_write(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        key, value = (self.lanes.as_one_head(rows) for rows in (key, value))
        return key, value, self._slots(layer, len(slots))

    def _slots(self, layer: Any, num_tokens: int) -> torch.Tensor:
        if self.shifted is not None:
            assert isinstance(self.shifted, LaneTables)
            return self.shifted.slots_of(self.layer, num_tokens)
        found: Any = get_forward_context().attn_metadata
        metadata = found[layer.layer_name]
        assert isinstance(metadata, HeadCpuMetadata)
        return metadata.slots

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        if super().attend(inputs, out):
            return True
        if self.shifted is not None:
            return False  # vLLM's kernel does, see `attention_of`
        self.lanes.attend(inputs.ops, inputs.batch, inputs.softmax, out)
        return True

    def attention_of(self, impl: Any) -> Any:
        return partial(self._attend_in_lanes, impl)

    def _attend_in_lanes(
        self,
        impl: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend by vLLM's kernel to each KV head as a request; `metadata` is stock, of the lanes.

        `kv_cache` is `[P, 1, N, 2 * D]`. `kv_order` is None where queries are in their order.
        """
        if metadata is None:  # profiling run
            found: torch.Tensor = impl.stock_attention(
                layer, query, key, value, kv_cache, metadata, output, *args, **kwargs
            )
            return found
        if any(scale is not None for scale in (*args, *kwargs.values())):
            raise NotImplementedError("lengths of single heads have no fused output quantisation")
        tokens = metadata.num_actual_tokens // self.lanes.count
        rows = self.lanes.as_one_head(query[:tokens])
        out = output[:tokens].view(rows.shape)
        order, written = metadata.kv_order, out
        if order is not None:
            rows, written = rows.index_select(0, order), torch.empty_like(out)
        # Keys and values are in the cache; those of the step are not read.
        impl.of_one_head.stock_attention(layer, rows, rows, rows, kv_cache, metadata, written)
        if order is not None:
            out.index_copy_(0, order, written)
        return output

    def split(self, inputs: AttentionInputs) -> Iterable[AttentionInputs]:
        return self.lanes.split(inputs)
