# SPDX-License-Identifier: Apache-2.0
"""vLLM's first model runner (`GPUModelRunner` and its CPU subclass) with a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.attention.host_slots import HostSlots
from vllm_pyramid.compat.drafts import extend_drafter
from vllm_pyramid.compat.runner_v1 import RunnerV1Points
from vllm_pyramid.worker.runtime import PyramidRunnerMixin


class PyramidRunnerV1(RunnerV1Points, PyramidRunnerMixin):
    """Reads the step from `input_batch`, just before the metadata of the layers is built."""

    input_batch: Any
    seq_lens: torch.Tensor
    tables_a_group = 1  # the other side of it is the host's
    intermediate_tensors: Any
    max_num_tokens: int
    model_config: Any

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """See the base; then the slots of all layers are worked out at once, on the host."""
        extend_drafter(self, self._table_of)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.intermediate_tensors is None and self.stages.stage > 0:
            # vLLM makes them in a warm-up, which the CPU's leaves out where nothing is compiled.
            self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(  # type: ignore[operator]
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        tables = self.input_batch.block_table
        whole = all(table.dcp_world_size == 1 for table in tables.block_tables)
        if self.device.type == "cpu" and whole:
            tables.compute_slot_mapping = HostSlots(tables.block_tables)

    def _table_of(self, group: int, num_reqs: int) -> torch.Tensor:
        table: torch.Tensor = self.input_batch.block_table[group].get_device_tensor(num_reqs)
        return table

    def table_shape(self, group: int) -> tuple[int, int]:
        """See the base."""
        rows, width = self.input_batch.block_table[group].block_table.cpu.shape
        return rows, width

    def set_tables(self, tables: Mapping[int, torch.Tensor]) -> None:
        """The device's side of the tables.

        `_prepare_inputs` copies the rows of all requests there from the host in every step and
        works out the slots from them. Then `_build_attention_metadata` is called, once, and behind
        it nothing reads them but attention: rows may be shifted there.
        """
        for group, table in tables.items():
            self.input_batch.block_table[group].block_table.gpu = table

    def requests_change(self, scheduler_output: SchedulerOutput) -> None:
        """See the base."""
        self.take_messages(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self.forget_request(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            self.tracker.add(
                request.req_id,
                request.prompt_len,
                params.extra_args if params is not None else None,
            )

    def runs_without_graphs(self) -> bool:
        """See the base."""
        names = self.input_batch.req_ids
        return self.tracker.without_graphs(
            names, self.input_batch.num_computed_tokens_cpu[: len(names)]
        )

    def metadata_is_due(
        self, num_reqs: int, num_rows: int, scheduled: dict[str, int] | None
    ) -> None:
        """See the base: the step's retention, and shifted tables where attention needs them."""
        host_lens = None
        if scheduled:
            batch = self.input_batch
            request_ids = batch.req_ids[:num_reqs]
            tokens = np.array([scheduled[name] for name in request_ids], np.int32)
            computed = batch.num_computed_tokens_cpu[:num_reqs]
            step = self.tracker.begin_step(
                request_ids, batch.num_prompt_tokens[:num_reqs], computed, tokens
            )
            host_lens = computed + tokens
        else:  # profiling, warm-up, graph capture
            step = self.tracker.idle_step(num_reqs)
        self.shift_tables(self.seq_lens[:num_rows], step, host_lens)
