# SPDX-License-Identifier: Apache-2.0
"""Pages that generated tokens read: counted by the workers, added up by the scheduler."""

from __future__ import annotations

from typing import NamedTuple

from vllm_pyramid.methods.step_sums import StepSums

NAME = "pages"  # of the hooks on both sides


class StepReads(NamedTuple):
    """What the tokens behind the prompts of a step read; lists of R, summed over the layers.

    Attributes:
        read: pages in the tables that attention was given, counted once for all KV heads.
        visible: pages that attention to everything would have read.
        tokens: tokens of the step that come behind the prompt.
    """

    request_ids: list[str]
    read: list[int]
    visible: list[int]
    tokens: list[int]


class PageReads(StepSums):
    """What tokens behind the prompts read, in all layers.

    `attended_tokens` went through the model: not the last one, but drafts and repeated ones, too.
    """

    name = NAME
    numbers = "pages_read", "pages_visible", "attended_tokens"
