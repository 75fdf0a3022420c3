# SPDX-License-Identifier: Apache-2.0
"""Requests that fail since their pages cannot be ranked, and the numbers of pages in their tables.

On the CPU both are known before attention. Other devices are not waited for: a flag for each row
travels to the host with the step's tokens (`step/failures.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm_pyramid.step.failures import METHOD, SCORES, Failure

if TYPE_CHECKING:
    from vllm_pyramid.methods.pages.choosing import Choosing
    from vllm_pyramid.methods.pages.decode_rows import DecodeRows
    from vllm_pyramid.methods.pages.step_rows import StepReadsPlan
    from vllm_pyramid.step.failures import Failures
    from vllm_pyramid.step.step import Step

_UNRANKED = Failure(
    SCORES, "its keys or queries have NaN or infinity, so its pages cannot be ranked"
)
_OTHER_COUNTS = Failure(METHOD, "its tables have other numbers of pages than were planned")


def fail_unranked(
    failures: Failures,
    choosing: Choosing,
    part: slice,
    scores: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """Let requests fail whose pages have NaN for scores, which are then replaced, in place.

    The scheduler does not hear of it from a pipeline stage before the last one. So their queries
    become NaN, and the pages of the layers above have NaN for scores, too.

    Args:
        part: of the rows that choose. scores: `[rows of it, G, pages]`.
        query: `[T, H, D]` of the step.
    """
    # Scores are weights, or -inf, so no sum of them is NaN unless one of them is.
    if scores.device.type == "cpu" and not math.isnan(scores.sum()):
        return
    wrong = scores.flatten(1).sum(dim=1).isnan()
    failures.flag(_UNRANKED, choosing.request_ids[part], wrong)
    scores.masked_fill_(wrong[:, None, None], 0.0)
    if failures.is_heard_in_evictions:
        own = query[part] if choosing.tokens is None else query[choosing.tokens[part]]
        own = own.masked_fill(wrong[:, None, None], torch.nan)
        if choosing.tokens is None:
            query[part] = own
        else:
            query.index_copy_(0, choosing.tokens[part], own)


def flag_decoding(step: Step, rows: DecodeRows) -> None:
    """Let the requests of a decode step fail whose rows will be flagged when the device has them.

    Call it before the step's layers. Nothing is read here, unless the flags are on the CPU: there
    `note_unranked` and `note_miscounted` say so.
    """
    names = [request.request_id for request in step.requests]
    if rows.unranked.device.type != "cpu":
        step.failures.flag(_UNRANKED, names, rows.unranked[: len(names)])
        step.failures.flag(_OTHER_COUNTS, names, rows.miscounted[: len(names)])


def note_unranked(step: Step | None, rows: DecodeRows, part: slice, scores: torch.Tensor) -> None:
    """Flag rows of a decode step that have NaN for scores, which are then replaced, in place.

    Args:
        step: None while a graph is captured. part: rows. scores: `[rows of it, G, pages]`.
    """
    wrong = scores.flatten(1).sum(dim=1).isnan()
    scores.masked_fill_(wrong[:, None, None], 0.0)
    _note(step, rows.unranked, part, wrong, _UNRANKED)


def note_miscounted(step: Step | None, rows: DecodeRows, part: slice, wrong: torch.Tensor) -> None:
    """Flag rows of a decode step whose tables have other numbers of pages than were planned."""
    _note(step, rows.miscounted, part, wrong, _OTHER_COUNTS)


def _note(
    step: Step | None, flags: torch.Tensor, part: slice, wrong: torch.Tensor, failure: Failure
) -> None:
    flags[part].logical_or_(wrong)
    if step is not None and wrong.device.type == "cpu":
        names = [request.request_id for request in step.requests][part]
        step.failures.flag(failure, names, wrong[: len(names)])


def note_counts(failures: Failures, plan: StepReadsPlan, choosing: Choosing, layer: int) -> None:
    """Take note of the pages in the tables that attention is given.

    On the CPU the plan compares them when the step ends, and the engine stops if they differ. Of
    other devices' tables the device compares them, and requests fail for which they differ.
    """
    counts = choosing.selection.counts
    if counts.device.type == "cpu":
        plan.note(layer, counts.numpy())
        return
    failures.flag(_OTHER_COUNTS, choosing.request_ids, counts != choosing.budgets[layer])
    plan.note_planned(layer)
