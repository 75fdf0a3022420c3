# SPDX-License-Identifier: Apache-2.0
"""Show finished requests to the front end, and let it ask whether an engine is idle.

Target: `OutputProcessor.process_outputs`, `.request_states` and what they hold (`external_req_id`,
`prompt_token_ids`, `detokenizer.output_token_ids`, `logprobs_processor.cumulative_logprob`),
`AsyncLLM.output_processor`. Why: sampled answers are replayed with the whole cache (--kv-shadow).
Remove when a plugin can see finished requests.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor


class FinishedRequest(NamedTuple):
    """A request that the engine has finished.

    Attributes:
        name: its id as the front end knows it. prompt, answer: ids of tokens.
        logprob: the sum over the answer; None if the client did not ask for log probabilities.
        report: what the scheduler reports of it.
    """

    name: str
    prompt: list[int]
    answer: list[int]
    logprob: float | None
    report: dict[str, Any]


class Observer(Protocol):
    """What is told of requests that end."""

    def on_finishing(self, name: str, report: dict[str, Any]) -> None:
        """Add to a report before the client gets it."""

    def on_finished(self, finished: FinishedRequest) -> None:
        """Take a request that has ended."""


# What this process tells; None before the first observer.
_observer: Observer | None = None


def install(observer: Observer) -> None:
    """Tell `observer` of all requests of this process that end with a report.

    A later observer replaces an earlier one.
    """
    global _observer
    is_installed, _observer = _observer is not None, observer
    if is_installed:
        return
    process_outputs = OutputProcessor.process_outputs

    @functools.wraps(process_outputs)
    def process_outputs_and_show(
        self: OutputProcessor, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kw: Any
    ) -> Any:
        told, ended = _observer, []
        assert told is not None
        for output in engine_core_outputs:
            report = output.kv_transfer_params
            if output.finish_reason is None or not isinstance(report, dict):
                continue
            if (state := self.request_states.get(output.request_id)) is not None:
                told.on_finishing(state.external_req_id, report)
                ended.append((state, dict(report)))
        result = process_outputs(self, engine_core_outputs, *args, **kw)
        for state, report in ended:
            if state.detokenizer is None or state.prompt_token_ids is None:
                continue
            logprobs = state.logprobs_processor
            finished = FinishedRequest(
                state.external_req_id,
                list(state.prompt_token_ids),
                list(state.detokenizer.output_token_ids),
                None if logprobs is None else logprobs.cumulative_logprob,
                report,
            )
            told.on_finished(finished)
        return result

    OutputProcessor.process_outputs = process_outputs_and_show  # type: ignore[method-assign]


def is_idle(engine_client: Any) -> bool:
    """Return whether no request of a front end waits or runs."""
    return not engine_client.output_processor.request_states
