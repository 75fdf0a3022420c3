# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected` in Triton: those of PyTorch so far."""

from __future__ import annotations

from vllm_pyramid.methods.observed_expected.kernels.reference import (
    future_queries,
    observed_expected_scores,
)

__all__ = ["future_queries", "observed_expected_scores"]
