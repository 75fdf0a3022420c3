# SPDX-License-Identifier: Apache-2.0
"""vLLM's second model runner (the default on CUDA) with a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.worker.runtime import PyramidRunnerMixin


class NotingReplays:
    """In place of `ModelState.prepare_attn`, which builds the metadata of all layers.

    Args:
        prepare: vLLM's. runner: whose tables are told that a full graph is about to be replayed.
    """

    def __init__(self, prepare: Callable[..., Any], runner: PyramidRunnerV2) -> None:
        self.prepare, self.runner = prepare, runner

    def __call__(
        self,
        input_batch: Any,
        mode: CUDAGraphMode,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> Any:
        shifted = self.runner.shifted
        if shifted is not None:
            shifted.replays = mode == CUDAGraphMode.FULL and not for_capture
        try:
            return self.prepare(input_batch, mode, *args, for_capture=for_capture, **kwargs)
        finally:
            if shifted is not None:
                shifted.replays = False


class LeavingOutGraphs:
    """In place of `CudaGraphManager.dispatch`, which chooses the graph of a step, or none.

    Args:
        dispatch: vLLM's. runner: which knows whether the step may be a graph.
    """

    def __init__(self, dispatch: Callable[..., Any], runner: PyramidRunnerV2) -> None:
        self.dispatch, self.runner = dispatch, runner

    def __call__(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        found = self.dispatch(num_reqs, num_tokens, *args, **kwargs)
        if not self.runner.without_graphs:
            return found
        return replace(
            found,
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_token_count=None,
        )


class PyramidRunnerV2(PyramidRunnerMixin):
    """Reads the step from the input batch and `req_states`, when block tables are gathered.

    Attributes:
        without_graphs: whether the step that has been gathered must run without graphs.
    """

    without_graphs = False
    cudagraph_manager: Any
    block_tables: Any
    req_states: Any
    model_state: Any
    tables_a_group = 2  # of all requests, and of the step's

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """See the base."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        state = self.model_state
        if not isinstance(state.prepare_attn, NotingReplays):
            state.prepare_attn = NotingReplays(state.prepare_attn, self)
        manager = self.cudagraph_manager  # a new one in every initialisation
        manager.dispatch = LeavingOutGraphs(manager.dispatch, self)

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, which comes right before the step's graph is chosen."""
        found = super().gather_batch_req_state(*args, **kwargs)  # type: ignore[misc]
        state, _ = found
        self.without_graphs = state is not None and self.tracker.without_graphs(
            state.req_ids, state.num_computed_prefill_tokens_np
        )
        return found

    def table_shape(self, group: int) -> tuple[int, int]:
        """See the base. vLLM keeps two tables a group: of all requests, and of the step's."""
        rows, width = self.block_tables.block_tables[group].gpu.shape
        return rows, width

    def set_tables(self, tables: Mapping[int, torch.Tensor]) -> None:
        """The step's tables, and the addresses that vLLM's gathering kernel writes to."""
        for group, table in tables.items():
            self.block_tables.input_block_tables[group] = table
        self.block_tables.init_block_table_layout_tensors()

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        self.take_messages(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self.forget_request(request_id)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for request in scheduler_output.scheduled_new_reqs:  # resumed ones come again
            params = request.sampling_params
            self.tracker.add(
                request.req_id,
                request.prompt_len,
                params.extra_args if params is not None else None,
            )
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def prepare_attn(self, input_batch: Any) -> Any:
        """vLLM's tables and slot mappings; then the step's retention."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)  # type: ignore[misc]
        computed, scheduled = input_batch.num_computed_tokens_np, input_batch.num_scheduled_tokens
        step = self.tracker.begin_step(
            input_batch.req_ids,
            self.req_states.prompt_len.np[input_batch.idx_mapping_np],
            computed,
            scheduled,
        )
        rows = input_batch.num_reqs_after_padding
        self.shift_tables(input_batch.seq_lens[:rows], step, computed + scheduled)
        return block_tables, slot_mappings

    def prepare_dummy_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The same for profiling and warm-up: nobody has skipped anything."""
        result = super().prepare_dummy_attn(input_batch, *args, **kwargs)  # type: ignore[misc]
        num_rows = input_batch.num_reqs
        self.shift_tables(input_batch.seq_lens[:num_rows], self.tracker.idle_step(num_rows))
        return result

    def capture_model(self, *args: Any, **kwargs: Any) -> int:
        """vLLM's. It builds metadata without `prepare_attn`, so no earlier step may be left."""
        self.tracker.idle_step(0)
        if self.shifted is not None:
            self.shifted.forget_step()
        num_bytes: int = super().capture_model(*args, **kwargs)  # type: ignore[misc]
        return num_bytes
