# SPDX-License-Identifier: Apache-2.0
"""Small matrices that measure vectors as a layer's output projection does."""

from __future__ import annotations

import torch


def output_factors(weights: torch.Tensor) -> torch.Tensor:
    """Return R of each query head, for which `R x` and `W x` have the same norm.

    R is the triangular factor of `W = Q R`. A hidden size C of thousands becomes a head size of
    hundreds, so a scorer sees what a change of V does to the output at the price of products in D.

    Args:
        weights: `[H, C, D]`, the columns W of the output projection that each query head feeds.

    Returns:
        `[H, min(C, D), D]` float32.
    """
    factors: torch.Tensor = torch.linalg.qr(weights.float(), mode="r").R
    return factors
