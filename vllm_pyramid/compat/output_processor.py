# SPDX-License-Identifier: Apache-2.0
"""Answer a request that has ended with an error with the reason, and others with early reports.

vLLM 0.32 sends no reason from the engine core, and answers "Internal server error"; ours travels as
the output's `stop_reason`, and is raised where the server waits for the request. vLLM 0.33 has
`EngineCoreOutput.error`.

A report that comes before a request ends is kept for an answer that a stop string ends: the front
end finds these and answers before the engine core knows of it, so the report of the end comes too
late.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from vllm_pyramid.compat.wrap import wrap

_REPORT = "vllm_pyramid_report"


class RequestFailedError(GenerationError, GracefulHTTPError):
    """One request has failed, and the engine has not: status 500, with the reason."""

    def __init__(self, reason: str) -> None:
        GracefulHTTPError.__init__(self, reason, HTTPStatus.INTERNAL_SERVER_ERROR)
        self.status_code = HTTPStatus.INTERNAL_SERVER_ERROR


def install() -> None:
    """Wrap the functions that make answers of outputs. Idempotent."""
    wrap(RequestState, "make_request_output", _make_request_output)
    if not vllm_sends_reasons():
        wrap(OutputProcessor, "process_outputs", _process_outputs_and_errors)


def _process_outputs_and_errors(
    process_outputs: Any,
    self: OutputProcessor,
    engine_core_outputs: list[EngineCoreOutput],
    *args: Any,
    **kw: Any,
) -> Any:
    failed = []
    for output in engine_core_outputs:
        if output.finish_reason == FinishReason.ERROR and isinstance(output.stop_reason, str):
            state = self.request_states.get(output.request_id)
            if state is not None and state.queue is not None:
                failed.append((state.queue, output.stop_reason))
    result = process_outputs(self, engine_core_outputs, *args, **kw)
    for queue, reason in failed:
        queue.put(RequestFailedError(reason))  # in place of what vLLM has put there just now
    return result


def vllm_sends_reasons() -> bool:
    return "error" in EngineCoreOutput.__struct_fields__


def _make_request_output(
    original: Any,
    self: Any,
    new_token_ids: list[int],
    pooling_output: Any,
    finish_reason: Any,
    stop_reason: Any,
    kv_transfer_params: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if finish_reason is None and kv_transfer_params is not None:
        setattr(self, _REPORT, kv_transfer_params)
        kv_transfer_params = None
    elif finish_reason is not None and kv_transfer_params is None:
        kv_transfer_params = getattr(self, _REPORT, None)
    made = (new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params)
    return original(self, *made, *args, **kwargs)
