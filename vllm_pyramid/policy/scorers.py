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
        accumulates: the scores are gathered beside the cache in every step, whatever the schedule
            (`AccumulatingScorer`); `Policy.gatherer` looks at the schedule too.
        thins: the scores are taken in every layer while the prompt is processed, and tokens that
            are not kept leave the forward pass. Goes with the allocator `decay`.
    """

    section: ClassVar[str] = "scorer"
    evicts: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    thins: ClassVar[bool] = False


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


class AccumulatingScorer(Scorer):
    """Base of the scorers whose evidence is gathered in every step, prefill and generation alike.

    What each query gives each key (`ops/reference_mass.py: add_key_mass`) is added up beside the
    cache: 4 bytes a token, layer and KV head. So these scorers can evict at any time.

    Class attributes:
        mass_kind: what is added up, `kind` of `add_key_mass`.
        sign: 1 where the greatest sums are kept, -1 where the smallest are.
        starts_over: an eviction sets the sums to zero instead of moving them with their keys.
    """

    accumulates: ClassVar[bool] = True
    mass_kind: ClassVar[str] = "sum"
    sign: ClassVar[float] = 1.0
    starts_over: ClassVar[bool] = False

    @property
    def history(self) -> int | None:
        """How many of the last queries before an eviction count; None for all."""
        return None


class AccumulatedAttentionScorer(AccumulatingScorer):
    """H2O's heavy hitters: the attention that a key was given by all queries so far.

    Softmax probabilities, summed over all queries since the key was written (its own and those of
    the prompt included) and over the query heads of the KV head (arXiv:2306.14048, section 4).
    """

    kind: Literal["accumulated_attention"] = "accumulated_attention"


class PersistenceScorer(AccumulatingScorer):
    """Scissorhands: how seldom a key was below the average among the last queries.

    For each of the last `queries` queries before an eviction, a key counts 1 for every query head
    of its KV head that gives it less than 1 / t of its attention, t being the keys that the query
    sees. The keys with the smallest counts stay (arXiv:2305.17118, section 4: the counter of low
    scores of its algorithm, over its history window).

    Attributes:
        queries: length of the history window; not longer than the interval between evictions.
    """

    kind: Literal["persistence"] = "persistence"
    queries: int = Field(default=128, ge=1)

    mass_kind: ClassVar[str] = "below_average"
    sign: ClassVar[float] = -1.0
    starts_over: ClassVar[bool] = True

    @property
    def history(self) -> int | None:
        return self.queries


class RecentEnsembleScorer(AccumulatingScorer):
    """Attention that the recent sequence pays to a context token (PyramidInfer, section 4).

    The softmax over all keys is averaged over the recent queries, later ones weighing more, and
    over all query heads: one score a token, so that a layer keeps one set for all its heads.

    While a prompt is processed, it is taken from the piece. It is gathered in every step only with
    the schedule `thin_generated`, of generated tokens, from the queries of the sliding window.

    Attributes:
        distance_weight: weight of the last query of a piece's recent sequence; they rise linearly
            from 1 at the first. The queries of the sliding window weigh alike.
    """

    accumulates: ClassVar[bool] = False
    thins: ClassVar[bool] = True
    kind: Literal["recent_ensemble"] = "recent_ensemble"
    distance_weight: float = Field(default=1.2, gt=0)


SCORERS: dict[str, type[Scorer]] = {
    "none": NoScorer,
    "recency": RecencyScorer,
    "observation_window": ObservationWindowScorer,
    "accumulated_attention": AccumulatedAttentionScorer,
    "persistence": PersistenceScorer,
    "recent_ensemble": RecentEnsembleScorer,
}
parse_scorer = partial(parse_component, Scorer, SCORERS)
