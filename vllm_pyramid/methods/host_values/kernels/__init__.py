# SPDX-License-Identifier: Apache-2.0
"""The kernels for V in host memory, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.methods.host_values.kernels.contract import ValueOps


def value_ops(ops: Ops) -> ValueOps:
    """Return the kernels of V in host memory that go with the others."""
    own: ValueOps = ops.of_method(__name__)
    return own
