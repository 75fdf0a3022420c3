# SPDX-License-Identifier: Apache-2.0
"""The kernels of page selection, in plain PyTorch, C++ and Triton."""

from __future__ import annotations

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.methods.pages.kernels.contract import DevicePageOps, PageOps


def page_ops(ops: Ops) -> PageOps:
    return ops.of_method(__name__)


def device_page_ops(ops: Ops) -> DevicePageOps:
    """Return the same where the host does not wait for the scores."""
    return ops.of_method(__name__)
