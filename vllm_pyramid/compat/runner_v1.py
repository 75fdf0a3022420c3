# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's first model runner lets another one have a word, under public names.

Target: `GPUModelRunner._update_states`, `._determine_batch_execution_and_padding`,
`._build_attention_metadata`. Why: which requests come and go, whether a step may be a graph, and
what it holds, right before the metadata of the layers is built. Remove with `runner`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pyramid.compat.drafts import take_own_tables


class RunnerV1Points:
    """Goes in front of the runner's class."""

    _without_graphs = False

    def requests_change(self, scheduler_output: SchedulerOutput) -> None:
        """Requests have ended or come, as the scheduler says."""

    def runs_without_graphs(self) -> bool:
        """Whether no graph may stand for the step of the requests that are there now."""
        return False

    def metadata_is_due(
        self, num_reqs: int, num_rows: int, scheduled: dict[str, int] | None
    ) -> None:
        """The metadata of the step's layers is about to be built.

        Args:
            num_reqs: requests of the step. num_rows: with the padding of a captured batch.
            scheduled: tokens by request; None in steps without real requests.
        """

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self.requests_change(scheduler_output)
        corrections = super()._update_states(scheduler_output)  # type: ignore[misc]
        self._without_graphs = self.runs_without_graphs()
        return corrections

    def _determine_batch_execution_and_padding(
        self, *args: Any, force_eager: bool = False, **kwargs: Any
    ) -> Any:
        """vLLM calls it for steps without real requests, too."""
        force_eager, self._without_graphs = force_eager or self._without_graphs, False
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
        self.metadata_is_due(num_reqs, num_reqs_padded or num_reqs, num_scheduled_tokens)
        of_layers, of_drafts = super()._build_attention_metadata(  # type: ignore[misc]
            num_tokens,
            num_reqs,
            *args,
            num_scheduled_tokens=num_scheduled_tokens,
            num_reqs_padded=num_reqs_padded,
            **kwargs,
        )
        take_own_tables(self, of_drafts)
        return of_layers, of_drafts
