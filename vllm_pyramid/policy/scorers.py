# SPDX-License-Identifier: Apache-2.0
"""Scorers: how important is each cached key of the prompt?

A scorer here only says what is to be computed; the kernels that compute it are in `ops/`, and
`ops/reference.py` defines the result.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from vllm_pyramid.policy.component import Component, parse_component


class Scorer(Component):
    """Base of all scorers.

    Class attributes:
        evicts: False only for the scorer that ranks nothing, so that nothing can be evicted.
        needs_attention: the scores come from queries and keys of the prefill; the last `window`
            queries of a prompt must then be in one chunk, with all keys in the cache.
    """

    section: ClassVar[str] = "scorer"
    evicts: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False


class NoScorer(Scorer):
    """Every token is kept."""

    evicts: ClassVar[bool] = False
    kind: Literal["none"] = "none"


class RecencyScorer(Scorer):
    """Later tokens matter more: sinks and the most recent tokens are kept (StreamingLLM)."""

    kind: Literal["recency"] = "recency"


class ObservationWindowScorer(Scorer):
    """Attention that the prompt's last `window` queries pay to a key (SnapKV; PyramidKV 4.2.2).

    The float32 softmax over all keys is summed over the window's queries, reduced over the query
    heads that share a KV head, and pooled along the positions.

    Attributes:
        pooling: `avg` or `max` with stride 1 and zero padding, or `none`.
        kernel_size: width of the pooling in tokens, odd.
        gqa_reduce: how the query heads of a group become one score: `mean`, `max` or `sum`.
    """

    needs_attention: ClassVar[bool] = True
    kind: Literal["observation_window"] = "observation_window"
    pooling: Literal["avg", "max", "none"] = "avg"
    kernel_size: int = Field(default=5, ge=1, le=1023)
    gqa_reduce: Literal["mean", "max", "sum"] = "mean"

    @field_validator("kernel_size")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"kernel_size must be odd, not {value}: a token is its own centre")
        return value


SCORERS: dict[str, type[Scorer]] = {
    "none": NoScorer,
    "recency": RecencyScorer,
    "observation_window": ObservationWindowScorer,
}
parse_scorer = partial(parse_component, Scorer, SCORERS)
