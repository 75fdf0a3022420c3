# SPDX-License-Identifier: Apache-2.0
"""The adapter to vLLM's first model runner (`GPUModelRunner` and its CPU subclass)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.attention.host_slots import HostSlots
from vllm_pyramid.compat.drafts import extend_drafter
from vllm_pyramid.compat.runner_v1 import RunnerV1Points, begin_answer
from vllm_pyramid.worker.adapter import RunnerAdapter


class TablesV1:
    """The block tables of `input_batch`, whose other tensor of each group is the host's.

    `_prepare_inputs` copies the rows of all requests to the device in every step and computes the
    slots from them. After that, `_build_attention_metadata` is called once, and only attention
    reads the tables: rows may be shifted there.
    """

    tensors_per_group, holds_tables, held_on_host = 1, False, False

    def __init__(self, runner: AdapterV1) -> None:
        self._runner = runner  # its `input_batch` may be replaced

    def shape(self, group: int) -> tuple[int, int]:
        rows, width = self._runner.input_batch.block_table[group].block_table.cpu.shape
        return rows, width

    def held(self, groups: Sequence[int]) -> None:
        """Return None: vLLM fills the tables of a step."""

    def replace(self, tables: Mapping[int, torch.Tensor]) -> None:
        for group, table in tables.items():
            self._runner.input_batch.block_table[group].block_table.gpu = table

    def move_front(
        self, request_id: str, starts: Mapping[int, tuple[int, int]], count: int
    ) -> None:
        """Move them in the batch's row, and in the request's own list, from which rows are made."""
        batch, state = self._runner.input_batch, self._runner.requests.get(request_id)
        if state is None:
            return
        row = batch.req_id_to_index.get(request_id)
        for group, (old, new) in starts.items():
            blocks = state.block_ids[group]
            blocks[new : new + count] = blocks[old : old + count]
            if row is not None:
                table = batch.block_table[group].block_table.np[row]
                table[new : new + count] = table[old : old + count].copy()

    def rows(self, group: int, num_reqs: int) -> torch.Tensor:
        """Return the device's block table of the first `num_reqs` requests."""
        tables = self._runner.input_batch.block_table
        table: torch.Tensor = tables[group].get_device_tensor(num_reqs)
        return table


class AdapterV1(RunnerV1Points, RunnerAdapter):
    """Reads the step from `input_batch`, just before the metadata of the layers is built."""

    input_batch: Any
    intermediate_tensors: Any
    max_num_tokens: int
    model_config: Any
    query_start_loc: Any
    requests: dict[str, Any]
    seq_lens: torch.Tensor

    def runner_tables(self) -> TablesV1:
        """Return the tables of `input_batch`."""
        return TablesV1(self)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Initialize as vLLM does; on the CPU, compute the slots of all layers at once."""
        extend_drafter(self, self.runner_tables().rows)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.intermediate_tensors is None and self.pyramid.pipeline.stage > 0:
            # vLLM makes them in a warm-up, which the CPU's leaves out where nothing is compiled.
            self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(  # type: ignore[operator]
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        tables = self.input_batch.block_table
        whole = all(table.dcp_world_size == 1 for table in tables.block_tables)
        if self.device.type == "cpu" and whole:
            tables.compute_slot_mapping = HostSlots(tables.block_tables)

    def requests_change(self, scheduler_output: SchedulerOutput) -> None:
        """Tell the runtime which requests have finished or come."""
        num_blocks = self.kv_cache_config.num_blocks
        self.pyramid.take_messages(scheduler_output, self.kv_caches, num_blocks)
        self.pyramid.add_requests(scheduler_output.scheduled_new_reqs)

    def requests_changed(self, scheduler_output: SchedulerOutput) -> None:
        """Add what was answered before to the state of requests that begin behind it."""
        for new in scheduler_output.scheduled_new_reqs:
            if new.prefill_token_ids is not None:
                begin_answer(self, new.req_id, new.prefill_token_ids[new.prompt_len :])

    def needs_eager_step(self) -> bool:
        """Return whether the step must run without CUDA graphs."""
        names = self.input_batch.req_ids
        computed = self.input_batch.num_computed_tokens_cpu[: len(names)]
        return self.pyramid.tracker.needs_eager_step(names, computed)

    def before_metadata(
        self, num_reqs: int, num_rows: int, scheduled: dict[str, int] | None
    ) -> None:
        """Begin the step in the runtime."""
        seq_lens = self.seq_lens[:num_rows]
        query_starts = self.query_start_loc.gpu[: num_rows + 1]
        if not scheduled:  # profiling, warm-up, graph capture
            self.pyramid.idle_step(num_reqs, seq_lens, query_starts)
            return
        batch = self.input_batch
        request_ids = batch.req_ids[:num_reqs]
        self.pyramid.begin_step(
            request_ids,
            batch.num_prompt_tokens[:num_reqs],
            batch.num_computed_tokens_cpu[:num_reqs],
            np.array([scheduled[name] for name in request_ids], np.int32),
            seq_lens,
            query_starts,
        )
