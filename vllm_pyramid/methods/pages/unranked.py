# SPDX-License-Identifier: Apache-2.0
"""Requests that fail since their pages cannot be ranked, and the numbers of pages in their tables.

On the CPU both are known before attention. Elsewhere a flag for each row travels to the host with
the step's tokens (`step/failures.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm_pyramid.step.failures import METHOD, SCORES, Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pyramid.methods.pages.choosing import Choosing
    from vllm_pyramid.methods.pages.kernels.records import PageLists
    from vllm_pyramid.step.failures import Failures

_UNRANKED = Failure(
    SCORES, "its keys or queries have NaN or infinity, so its pages cannot be ranked"
)
_OTHER_COUNTS = Failure(METHOD, "its tables have other numbers of pages than were planned")


def fail_unranked(
    failures: Failures, choosing: Choosing, part: slice, scores: torch.Tensor, query: torch.Tensor
) -> None:
    """Let requests fail whose pages have NaN for scores, which are then replaced, in place.

    `scores` are `[rows of part, G, pages]` on the host, `query` `[T, H, D]`.
    """
    # Scores are weights, or -inf, so no sum of them is NaN unless one of them is.
    if not math.isnan(scores.sum()):
        return
    wrong = scores.flatten(1).sum(dim=1).isnan()
    failures.flag(_UNRANKED, choosing.request_ids[part], wrong)
    scores.masked_fill_(wrong[:, None, None], 0.0)
    pass_on(failures, choosing, part, wrong, query)


def pass_on(
    failures: Failures, choosing: Choosing, part: slice, wrong: torch.Tensor, query: torch.Tensor
) -> None:
    """Make the queries of failed rows NaN in a pipeline stage before the last one.

    The scheduler sees no failure there. With these queries the layers above fail, too.
    """
    if not failures.reports_evictions:
        return
    own = query[part] if choosing.tokens is None else query[choosing.tokens[part]]
    own = own.masked_fill(wrong[:, None, None], torch.nan)
    if choosing.tokens is None:
        query[part] = own
    else:
        query.index_copy_(0, choosing.tokens[part], own)


def flag_lists(failures: Failures, request_ids: Sequence[str], lists: PageLists) -> None:
    """Let the requests fail whose rows are flagged, or will be when the device has chosen."""
    rows = len(request_ids)
    failures.flag(_UNRANKED, request_ids, lists.unranked[:rows])
    failures.flag(_OTHER_COUNTS, request_ids, lists.miscounted[:rows])
