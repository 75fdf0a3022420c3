# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected`, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.methods.observed_expected.kernels.contract import ObservedExpectedOps


def observed_expected_ops(ops: Ops) -> ObservedExpectedOps:
    """Return the kernels of `observed_expected` that go with the others."""
    own: ObservedExpectedOps = ops.of_method(__name__)
    return own
