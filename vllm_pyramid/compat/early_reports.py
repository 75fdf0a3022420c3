# SPDX-License-Identifier: Apache-2.0
"""Keep a report that comes before a request ends, for an answer that a stop string ends.

The front end finds stop strings and answers before the engine core knows of it, so the report of
the end comes too late.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.output_processor import RequestState

from vllm_pyramid.compat.wrap import wrap

_REPORT = "vllm_pyramid_report"


def install() -> None:
    """Wrap `make_request_output` so that it keeps early reports. Idempotent."""
    wrap(RequestState, "make_request_output", _make_request_output)


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
