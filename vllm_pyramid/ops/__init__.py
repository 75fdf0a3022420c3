# SPDX-License-Identifier: Apache-2.0
"""Kernels (placeholder until the C++ bindings land)."""
def get_ops(device_type: str):
    from vllm_pyramid.ops import reference
    return reference
