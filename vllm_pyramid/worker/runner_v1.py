# SPDX-License-Identifier: Apache-2.0
"""vLLM's first model runner (`GPUModelRunner` and its CPU subclass) with a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.worker.runner import PyramidRunnerMixin


class PyramidRunnerV1(PyramidRunnerMixin):
    """Reads the step from `input_batch`, just before the metadata of the layers is built."""

    input_batch: Any
    seq_lens: torch.Tensor

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; then the layers exist and can be bound."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        self.bind_layers(*self.input_batch.block_table[0].block_table.gpu.shape)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self.retention.remove(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            self.retention.add(
                request.req_id,
                request.prompt_len,
                params.extra_args if params is not None else None,
            )
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _build_attention_metadata(
        self,
        num_tokens: int,
        num_reqs: int,
        *args: Any,
        num_scheduled_tokens: dict[str, int] | None = None,
        num_reqs_padded: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if num_scheduled_tokens:
            batch = self.input_batch
            request_ids = batch.req_ids[:num_reqs]
            scheduled = [num_scheduled_tokens[request_id] for request_id in request_ids]
            step = self.retention.begin_step(
                request_ids,
                batch.num_prompt_tokens[:num_reqs],
                batch.num_computed_tokens_cpu[:num_reqs],
                np.array(scheduled, np.int32),
            )
        else:  # profiling, warm-up, graph capture
            step = self.retention.idle_step(num_reqs)
        if self.shifted is not None:
            rows = num_reqs_padded or num_reqs
            tables = self.input_batch.block_table.block_tables
            source = torch.stack([table.get_device_tensor(rows) for table in tables])
            source[:, num_reqs:] = 0  # padding rows point at the null block
            self.shift_tables(source, self.seq_lens, step)
        return super()._build_attention_metadata(  # type: ignore[misc]
            num_tokens,
            num_reqs,
            *args,
            num_scheduled_tokens=num_scheduled_tokens,
            num_reqs_padded=num_reqs_padded,
            **kwargs,
        )
