# SPDX-License-Identifier: Apache-2.0
"""Try a user's page scorer before an engine starts, and check what its functions return."""

from __future__ import annotations

import torch

from vllm_pyramid.policy.page_scorer import PageScorer


def try_scorer(
    scorer: PageScorer, heads: int, kv_heads: int, head_size: int, page_size: int
) -> None:
    """Call a user's page scorer once with made-up keys and queries; ValueError: it is wrong."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, kv_heads, page_size, head_size, generator=generator)
    query = torch.randn(2, heads, head_size, generator=generator)
    width = scorer.rows * head_size
    for name, given, shape in (
        ("summarise", keys, (3, kv_heads, width)),
        ("extend", query, (2, heads, width)),
    ):
        if name == "extend" and scorer.has_kernels:
            continue
        try:
            found = getattr(scorer, name)(given)
        except Exception as error:
            raise ValueError(
                f"`{name}` of the page scorer {scorer.kind!r} failed on made-up input: "
                f"{type(error).__name__}: {error}"
            ) from error
        check_result(scorer, name, found, shape)


def check_result(scorer: PageScorer, name: str, found: object, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a function of a page scorer has returned finite float32 numbers."""
    what = f"a {type(found).__name__}"
    if isinstance(found, torch.Tensor):
        if found.dtype == torch.float32 and tuple(found.shape) == shape and found.isfinite().all():
            return
        what = f"{list(found.shape)} of {found.dtype}"
    raise ValueError(
        f"`{name}` of the page scorer {scorer.kind!r} must return {list(shape)} finite numbers of "
        f"torch.float32, not {what}"
    )
