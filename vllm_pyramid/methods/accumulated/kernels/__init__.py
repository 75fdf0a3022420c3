# SPDX-License-Identifier: Apache-2.0
"""The kernels of accumulated attention, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.methods.accumulated.kernels.contract import MassOps


def mass_ops(ops: Ops) -> MassOps:
    """Return the kernels of accumulated attention that go with the others."""
    own: MassOps = ops.of_method(__name__)
    return own
