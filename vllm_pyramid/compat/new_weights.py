# SPDX-License-Identifier: Apache-2.0
"""Forget what was computed with weights that an engine no longer has.

`reload_weights` and updates of weights are calls of the workers that no scheduler sees; prefixes,
sessions and the host cache would go on with the KV of other weights, beyond a restart.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from vllm_pyramid.compat.wrap import wrap

logger = init_logger(f"vllm.{__name__}")

# Methods of vLLM's workers behind which weights are others. A function that a program sends to the
# workers by itself may change them, too, which cannot be seen.
METHODS = frozenset(
    ("reload_weights", "update_weights", "finish_weight_update", "update_draft_weights")
)


def install() -> None:
    """Reset the prefix cache of a policy's scheduler behind `METHODS`. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    wrap(EngineCore, "collective_rpc", _collective_rpc_and_reset)


def _collective_rpc_and_reset(
    collective_rpc: Any, self: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    changes = isinstance(method, str) and method in METHODS
    changes = changes and hasattr(self.scheduler, "pyramid")
    try:
        return collective_rpc(self, method, *args, **kwargs)
    finally:
        if changes:  # a call that has failed may have changed some of them
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
            logger.info("%s: dropped all KV that was computed with the old weights", method)
