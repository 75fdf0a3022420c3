# SPDX-License-Identifier: Apache-2.0
"""What does not work with a selection of pages, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from vllm_pyramid.compat.backend_names import SCALED_ROWS
from vllm_pyramid.policy.page_scorer import PageScorer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy


def check_config(policy: Policy, config: VllmConfig) -> None:
    """Refuse what does not work together with a selection of pages.

    Raises:
        ValueError: naming the flag to change.
    """
    speculation = config.speculative_config
    scorer = getattr(policy.attend, "scorer", None)
    assert isinstance(scorer, PageScorer), "the part that calls this has one"
    text = config.model_config.hf_text_config
    reason = None
    on_cpu = current_platform.device_type == "cpu"
    if not on_cpu and (scorer.needs_queries or not scorer.has_kernels):
        reason = (
            f"has the page scorer {scorer.kind!r}, which runs in PyTorch and would wait for the "
            "device in each step: choose attend.scorer spread or box, or serve on a CPU"
        )
    elif not on_cpu and speculation is not None:
        reason = (
            "pages are chosen by the host's word of each token's position, which drafts make wrong "
            "on CUDA devices (--speculative-config): leave drafts out, or serve on a CPU"
        )
    elif config.cache_config.cache_dtype in SCALED_ROWS:
        reason = (
            f"summaries know one scale a layer, and {config.cache_config.cache_dtype} has one for "
            "each token: choose --kv-cache-dtype fp8"
        )
    elif scorer.needs_queries and speculation is not None:
        reason = (
            f"has the page scorer {scorer.kind!r}, which keeps the queries of a page until it is "
            "full: drafts of the next page would overwrite them (--speculative-config). Choose "
            "attend.scorer spread"
        )
    elif scorer.needs_queries and getattr(text, "num_kv_shared_layers", None):
        reason = (
            f"has the page scorer {scorer.kind!r}, which needs the queries of a page: layers that "
            "read another layer's cache have queries of their own. Choose attend.scorer spread"
        )
    if reason is not None:
        raise ValueError(
            f"policy {policy.name!r} selects pages (attend: pages), and {reason}; or choose a "
            "policy without `attend`"
        )
    if ":" in scorer.kind:
        model, parallel = config.model_config, config.parallel_config
        try_scorer(
            scorer,
            model.get_num_attention_heads(parallel),
            model.get_num_kv_heads(parallel),
            model.get_head_size(),
            config.cache_config.block_size,
        )


def try_scorer(
    scorer: PageScorer, heads: int, kv_heads: int, head_size: int, page_size: int
) -> None:
    """Call a user's page scorer once with made-up keys and queries, in the shape of a model.

    Raises:
        ValueError: it fails, or returns another shape, another type or NaN.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, kv_heads, page_size, head_size, generator=generator)
    query = torch.randn(2, heads, head_size, generator=generator)
    width = scorer.summary_rows * head_size
    makes, given = "summarise", [keys]
    if scorer.needs_queries:
        makes = "represent"
        given.append(torch.randn(3, kv_heads, head_size, generator=generator))
    for name, args, shape in (
        (makes, given, (3, kv_heads, width)),
        ("extend", [query], (2, heads, width)),
    ):
        if name == "extend" and scorer.has_kernels:
            continue
        try:
            found = getattr(scorer, name)(*args)
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
