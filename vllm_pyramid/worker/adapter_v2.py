# SPDX-License-Identifier: Apache-2.0
"""The adapter to vLLM's second model runner, the default on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.attention.shifted_tables import HeldTables, Slots
from vllm_pyramid.compat.held_tables import copy_each, has_host_tables, hold_on_host
from vllm_pyramid.worker.adapter import RunnerAdapter
from vllm_pyramid.worker.step_tables import StepTables


class TablesV2:
    """The two block tables of each group: of all requests, and of the step's, in batch order."""

    tensors_per_group, holds_tables = 2, True

    def __init__(self, runner: AdapterV2) -> None:
        self._runner = runner  # its `block_tables` are replaced in every initialization

    @property
    def held_on_host(self) -> bool:
        """Whether `hold_on_host` has moved, or will move, tables of all requests."""
        return has_host_tables()

    def shape(self, group: int) -> tuple[int, int]:
        rows, width = self._runner.block_tables.block_tables[group].gpu.shape
        return rows, width

    def held(self, groups: Sequence[int]) -> HeldTables:
        """Return the tables of all requests, of groups that evict and of this worker's others."""
        block_tables = self._runner.block_tables
        tables = block_tables.block_tables
        others = [
            (tables[place].gpu, block_tables.input_block_tables[place], place)
            for place, group in enumerate(self._runner.kv_cache_config.kv_cache_groups)
            if group.layer_names and place not in groups
        ]
        return HeldTables([tables[group].gpu for group in groups], others)

    def replace(self, tables: Mapping[int, torch.Tensor]) -> None:
        """Replace the step's tables, and vLLM's gathering of their entries."""
        block_tables = self._runner.block_tables
        of_steps = block_tables.input_block_tables
        for group, table in tables.items():
            of_steps[group] = table
        # vLLM has none between two initializations, when tables are freed alone.
        config = getattr(self._runner, "kv_cache_config", None)
        for place, spec in enumerate([] if config is None else config.kv_cache_groups):
            if not spec.layer_names:  # of another pipeline stage, which nobody reads here
                of_steps[place] = of_steps[place].new_empty(block_tables.max_num_reqs, 0)
        block_tables.init_block_table_layout_tensors()

        def gathered_later(idx_mapping: Any, num_reqs_padded: int) -> tuple[torch.Tensor, ...]:
            """Return the step's tables, which `begin_step` writes: no slots follow from them."""
            return tuple(table[:num_reqs_padded] for table in of_steps)

        block_tables.gather_block_tables = gathered_later

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
    """Takes the place of `CudaGraphManager.dispatch`, which chooses the graph of a step."""

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

    `step_is_eager`: whether the step that has been gathered must run without CUDA graphs.
    """

    step_is_eager = False
    cudagraph_manager: Any
    model_state: Any
    req_states: Any

    def runner_tables(self) -> TablesV2:
        """Return the tables of `block_tables`."""
        return TablesV2(self)

    @property
    def block_tables(self) -> Any:
        """vLLM's tables, new ones in every initialization."""
        return self._block_tables

    @block_tables.setter
    def block_tables(self, tables: Any) -> None:
        """Take vLLM's tables, of which some go to host memory before it allocates the cache."""
        others = self.pyramid.layers.specs.keys() - self.pyramid.layers.evicting.keys()
        groups = enumerate(self.kv_cache_config.kv_cache_groups)
        hold_on_host(tables, [g for g, group in groups if not others & {*group.layer_names}])
        self._block_tables = tables

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
        self.step_is_eager = state is not None and self.pyramid.tracker.needs_eager_step(
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
        """Find slots as vLLM does, and begin the step in the runtime, which gathers tables."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)  # type: ignore[misc]
        num_blocks = self.block_tables.num_blocks.gpu
        self.pyramid.begin_step(
            input_batch.req_ids,
            self.req_states.prompt_len.np[input_batch.idx_mapping_np],
            input_batch.num_computed_tokens_np,
            input_batch.num_scheduled_tokens,
            input_batch.seq_lens[: input_batch.num_reqs_after_padding],
            input_batch.query_start_loc[: input_batch.num_reqs_after_padding + 1],
            Slots(input_batch.idx_mapping_np, input_batch.idx_mapping, num_blocks),
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
