# SPDX-License-Identifier: Apache-2.0
"""Points in a step of vLLM's first model runner at which the adapter is called."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.compat.drafts import take_own_tables


def begin_answer(runner: Any, request_id: str, tokens: list[int]) -> None:
    """Put the first tokens of an answer into the runner's state of a request that has just come.

    vLLM's own new requests have none; a resumed one has them already.
    """
    batch = runner.input_batch
    row, output = batch.req_id_to_index[request_id], runner.requests[request_id].output_token_ids
    assert batch.req_output_token_ids[row] is output and not output, "it has an answer already"
    output.extend(tokens)
    start = int(batch.num_prompt_tokens[row])
    batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
    batch.is_token_ids[row, start : start + len(tokens)] = True
    batch.num_tokens_no_spec[row] = start + len(tokens)


class RunnerV1Points:
    """Precedes the runner's class; the adapter overrides the methods with public names."""

    _step_is_eager = False

    def requests_change(self, scheduler_output: SchedulerOutput) -> None:
        """Called when requests have finished or come, before vLLM updates its state."""

    def requests_changed(self, scheduler_output: SchedulerOutput) -> None:
        """Called after that."""

    def needs_eager_step(self) -> bool:
        """Return whether the step of the current requests must run without CUDA graphs."""
        return False

    def before_metadata(
        self, num_reqs: int, num_rows: int, scheduled: dict[str, int] | None
    ) -> None:
        """Called before the metadata of the step's layers is built.

        `num_rows` includes the padding of a captured batch; `scheduled`, tokens by request, is None
        in steps without real requests.
        """

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self.requests_change(scheduler_output)
        corrections = super()._update_states(scheduler_output)  # type: ignore[misc]
        self.requests_changed(scheduler_output)
        self._step_is_eager = self.needs_eager_step()
        return corrections

    def _determine_batch_execution_and_padding(
        self, *args: Any, force_eager: bool = False, **kwargs: Any
    ) -> Any:
        """Decide as vLLM does, which calls this for steps without real requests, too."""
        force_eager, self._step_is_eager = force_eager or self._step_is_eager, False
        return super()._determine_batch_execution_and_padding(  # type: ignore[misc]
            *args, force_eager=force_eager, **kwargs
        )

    def _build_attention_metadata(
        self,
        num_tokens: int,
        num_reqs: int,
        *args: Any,
        num_scheduled_tokens: dict[str, int] | None = None,
        num_reqs_padded: int | None = None,
        **kwargs: Any,
    ) -> Any:
        self.before_metadata(num_reqs, num_reqs_padded or num_reqs, num_scheduled_tokens)
        metadata, draft_metadata = super()._build_attention_metadata(  # type: ignore[misc]
            num_tokens,
            num_reqs,
            *args,
            num_scheduled_tokens=num_scheduled_tokens,
            num_reqs_padded=num_reqs_padded,
            **kwargs,
        )
        take_own_tables(self, draft_metadata)
        return metadata, draft_metadata
