# SPDX-License-Identifier: Apache-2.0
"""vLLM's second model runner (the default on CUDA) with a policy."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.worker.runner import PyramidRunnerMixin


class PyramidRunnerV2(PyramidRunnerMixin):
    """Reads the step from the input batch and `req_states`, when block tables are gathered."""

    block_tables: Any
    req_states: Any

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; then the gathered tables of all layers become one tensor, and layers are bound.

        vLLM gathers into one buffer a group. Views of a single allocation let one launch shift all
        of them.
        """
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        tables = self.block_tables
        self._gathered = torch.stack(tables.input_block_tables)
        tables.input_block_tables = list(self._gathered)
        tables.init_block_table_layout_tensors()
        self.bind_layers(*self._gathered.shape[1:])

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.finished_req_ids:
            self.retention.remove(request_id)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for request in scheduler_output.scheduled_new_reqs:  # resumed ones come again
            params = request.sampling_params
            self.retention.add(
                request.req_id,
                request.prompt_len,
                params.extra_args if params is not None else None,
            )
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def prepare_attn(self, input_batch: Any) -> Any:
        """vLLM's tables and slot mappings; then the step's retention."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)  # type: ignore[misc]
        step = self.retention.begin_step(
            input_batch.req_ids,
            self.req_states.prompt_len.np[input_batch.idx_mapping_np],
            input_batch.num_computed_tokens_np,
            input_batch.num_scheduled_tokens,
        )
        self.shift_tables(self._gathered[:, : len(block_tables[0])], input_batch.seq_lens, step)
        return block_tables, slot_mappings

    def prepare_dummy_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The same for profiling, warm-up and graph capture: nobody has skipped anything."""
        result = super().prepare_dummy_attn(input_batch, *args, **kwargs)  # type: ignore[misc]
        num_rows = len(result[0][0])
        step = self.retention.idle_step(num_rows)
        self.shift_tables(self._gathered[:, :num_rows], input_batch.seq_lens, step)
        return result
