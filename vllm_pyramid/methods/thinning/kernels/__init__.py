# SPDX-License-Identifier: Apache-2.0
"""The kernels of thinning, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.methods.thinning.kernels.contract import RecentOps


def recent_ops(ops: Ops) -> RecentOps:
    """Return the kernels of thinning that go with the others."""
    own: RecentOps = ops.of_method(__name__)
    return own
