# SPDX-License-Identifier: Apache-2.0
"""The adapter to vLLM's second model runner, the default on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.compat.fused_copy import copy_each
from vllm_pyramid.worker.adapter import RunnerAdapter
from vllm_pyramid.worker.step_tables import StepTables


class TablesV2:
    """The two block tables of each group: of all requests, and of the step's, in batch order."""

    tensors_per_group = 2

    def __init__(self, runner: AdapterV2) -> None:
        self._runner = runner  # its `block_tables` are replaced in every initialization

    def shape(self, group: int) -> tuple[int, int]:
        rows, width = self._runner.block_tables.block_tables[group].gpu.shape
        return rows, width

    def replace(self, tables: Mapping[int, torch.Tensor]) -> None:
        """Replace the step's tables, and the addresses that vLLM's gathering kernel writes to."""
        block_tables = self._runner.block_tables
        for group, table in tables.items():
            block_tables.input_block_tables[group] = table
        block_tables.init_block_table_layout_tensors()

    def move_front(
        self, request_id: str, starts: Mapping[int, tuple[int, int]], count: int
    ) -> None:
        row = self._runner.req_states.req_id_to_index.get(request_id)
        if row is None:
            return
        tables = self._runner.block_tables.block_tables
        rows = [(tables[group].gpu[row], *places) for group, places in starts.items()]
        fronts = torch.stack([table[old : old + count] for table, old, _ in rows])
        copy_each([table[new : new + count] for table, _, new in rows], fronts.unbind())


class MetadataBuilding:
    """Takes the place of `ModelState.prepare_attn`, which builds the metadata of all layers.

    It tells the shifted tables when a full graph is about to be replayed, which reads no metadata.

    Args:
        prepare: vLLM's.
    """

    def __init__(self, prepare: Callable[..., Any], tables: StepTables) -> None:
        self._prepare, self._tables = prepare, tables

    def __call__(
        self,
        input_batch: Any,
        mode: CUDAGraphMode,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> Any:
        shifted = self._tables.shifted
        if shifted is not None:
            shifted.replays = mode == CUDAGraphMode.FULL and not for_capture
        try:
            return self._prepare(input_batch, mode, *args, for_capture=for_capture, **kwargs)
        finally:
            if shifted is not None:
                shifted.replays = False


class GraphDispatch:
    """Takes the place of `CudaGraphManager.dispatch`, which chooses the graph of a step, or none.

    Args:
        dispatch: vLLM's. runner: knows whether the step must be eager.
    """

    def __init__(self, dispatch: Callable[..., Any], runner: AdapterV2) -> None:
        self._dispatch, self._runner = dispatch, runner

    def __call__(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        graph = self._dispatch(num_reqs, num_tokens, *args, **kwargs)
        if not self._runner.step_is_eager:
            return graph
        return replace(
            graph,
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_token_count=None,
        )


class AdapterV2(RunnerAdapter):
    """Reads the step from the input batch and `req_states`, when block tables are gathered.

    Attributes:
        step_is_eager: whether the step that has been gathered must run without CUDA graphs.
    """

    step_is_eager = False
    block_tables: Any
    cudagraph_manager: Any
    model_state: Any
    req_states: Any

    def runner_tables(self) -> TablesV2:
        """Return the tables of `block_tables`."""
        return TablesV2(self)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Initialize as vLLM does; graphs and metadata of steps go through the runtime."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        state = self.model_state
        if not isinstance(state.prepare_attn, MetadataBuilding):
            state.prepare_attn = MetadataBuilding(state.prepare_attn, self.pyramid.tables)
        manager = self.cudagraph_manager  # a new one in every initialization
        manager.dispatch = GraphDispatch(manager.dispatch, self)

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        """Gather as vLLM does, right before it chooses the step's graph."""
        gathered = super().gather_batch_req_state(*args, **kwargs)  # type: ignore[misc]
        state, _ = gathered
        self.step_is_eager = state is not None and self.pyramid.needs_eager_step(
            state.req_ids, state.num_computed_prefill_tokens_np
        )
        return gathered

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Remove requests from the runtime and from vLLM's state."""
        num_blocks = self.kv_cache_config.num_blocks
        self.pyramid.take_messages(scheduler_output, self.kv_caches, num_blocks)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add requests to the runtime and to vLLM's state; resumed ones are added again."""
        self.pyramid.add_requests(scheduler_output.scheduled_new_reqs)
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def prepare_attn(self, input_batch: Any) -> Any:
        """Gather block tables and slots as vLLM does, and begin the step in the runtime."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)  # type: ignore[misc]
        self.pyramid.begin_step(
            input_batch.req_ids,
            self.req_states.prompt_len.np[input_batch.idx_mapping_np],
            input_batch.num_computed_tokens_np,
            input_batch.num_scheduled_tokens,
            input_batch.seq_lens[: input_batch.num_reqs_after_padding],
            input_batch.query_start_loc[: input_batch.num_reqs_after_padding + 1],
        )
        return block_tables, slot_mappings

    def prepare_dummy_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Do the same for profiling and warm-up, in which no request has skipped anything."""
        result = super().prepare_dummy_attn(input_batch, *args, **kwargs)  # type: ignore[misc]
        num_reqs = input_batch.num_reqs
        self.pyramid.idle_step(
            num_reqs,
            input_batch.seq_lens[:num_reqs],
            input_batch.query_start_loc[: num_reqs + 1],
        )
        return result

    def capture_model(self, *args: Any, **kwargs: Any) -> int:
        """Capture graphs as vLLM does, which builds their metadata without `prepare_attn`."""
        self.pyramid.before_capture()
        num_bytes: int = super().capture_model(*args, **kwargs)  # type: ignore[misc]
        return num_bytes
