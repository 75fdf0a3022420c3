# SPDX-License-Identifier: Apache-2.0
"""Ending one request with an error.

Target: `Scheduler.grammar_compile_error_reqs`: a set of ids in vLLM 0.32, a dictionary of errors in
0.33. Why: an exception in the scheduler would end the engine. Remove when `add_request` may refuse.
"""

from __future__ import annotations

from typing import Any


def end_with_error(scheduler: Any, request_id: str, reason: str) -> None:
    """Let the request end with an error in the next step; from vLLM 0.33 on with its reason."""
    failed = scheduler.grammar_compile_error_reqs
    if isinstance(failed, set):
        failed.add(request_id)
        return
    from vllm.outputs import RequestError

    failed[request_id] = RequestError(code="validation_error", message=reason)
