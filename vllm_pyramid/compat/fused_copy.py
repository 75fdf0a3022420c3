# SPDX-License-Identifier: Apache-2.0
"""Copies of many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, of the same shape; none of them overlap."""
    torch._foreach_copy_(list(targets), list(sources))
