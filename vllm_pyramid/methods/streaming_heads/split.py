# SPDX-License-Identifier: Apache-2.0
"""What all kinds of `heads` that give KV heads lengths of their own have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_pyramid.methods.observation_window import ObservationWindowScorer
from vllm_pyramid.methods.streaming_heads.score_files import (
    ScoreFiles,
    Scores,
    check_heads,
    check_lanes,
    read_scores,
)
from vllm_pyramid.policy.heads import Heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy


class HeadLengths(Heads):
    """Base class of kinds that give each KV head a block table and a length of its own.

    Class attributes:
        plain: kinds that other sections must have, with which lengths of heads were tried.
    """

    splits: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, str]] = {
        "allocator": "uniform",
        "selector": "top_k",
        "schedule": "prompt_end",
        "values": "device",
        "attend": "all",
        "prefill": "all",
    }

    def check_parts(self, policy: Policy) -> None:
        """Refuse parts that would have no effect, or were not tried with lengths of heads."""
        for section, kind in self.plain.items():
            if (found := getattr(policy, section).kind) != kind:
                raise ValueError(
                    f"policy {policy.name!r} has heads of kind {self.kind!r}, which go with "
                    f"{section} {kind!r} alone so far, not {found!r}: leave {section} out"
                    + (f", but for scorer: {kind}" if section == "scorer" else "")
                )

    def check_scorer(self, policy: Policy) -> None:
        """Refuse scorers that look across heads, or gather what has a place for each layer."""
        scorer, reason = policy.scorer, None
        if not scorer.evicts:
            reason = "ranks nothing"
        elif scorer.works_in_every_step or scorer.gathers(policy):
            reason = "gathers numbers in every step, which have one place for each layer"
        elif scorer.asks_ranks:
            reason = "looks at all KV heads of a layer together"
        elif not (scorer.in_parts or isinstance(scorer, ObservationWindowScorer)):
            reason = "does not say that it looks at each KV head by itself (`in_parts`)"
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} gives each KV head a length of its own (heads), and its "
                f"scorer {scorer.kind!r} {reason}: choose another, such as observation_window"
            )

    def check_hybrid(self, policy: Policy) -> None:
        """Refuse models of which some layers do not evict, or read another layer's cache."""
        raise ValueError(
            f"policy {policy.name!r} gives each KV head a length of its own (heads), which goes "
            "with models of which every layer has full attention and a cache of its own alone so "
            "far: choose a policy without `heads`"
        )

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        """Refuse what was not tried together with tables of single heads."""
        from vllm_pyramid.methods.streaming_heads.refusals import check_config

        check_config(policy, config)


class SplitHeads(HeadLengths):
    """Base class of kinds whose KV heads have lengths that scores of the model's heads say.

    Class attributes:
        scored: the field with the scores.
    """

    scored: ClassVar[str]

    @property
    def head_scores(self) -> Scores | None:
        """The field `scored`."""
        found: Scores | None = getattr(self, self.scored)
        return found

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError unless the scores can be those of as many lanes."""
        if self.head_scores is not None:
            check_lanes(f"heads.{self.scored}", self.head_scores, num_layers)

    def check_shape(self, num_layers: int, num_kv_heads: int, num_heads: int | None = None) -> None:
        """Raise ValueError unless the scores are for a model of this shape."""
        if self.head_scores is not None:
            what = f"heads.{self.scored}"
            check_heads(what, self.head_scores, num_layers, num_kv_heads, num_heads)


def with_scores(data: Any, field: str) -> tuple[Any, ScoreFiles | None]:
    """Return a section's data with a path in `field` replaced by what the path holds.

    Other processes then open no file. Lists of YAML and JSON become tuples.

    Returns:
        The data, and what was read; None where no path was given.
    """
    if not isinstance(data, Mapping):
        return data, None
    if isinstance(rows := data.get(field), list):
        lists = (tuple(row) if isinstance(row, list) else row for row in rows)
        return {**data, field: tuple(lists)}, None
    if not isinstance(rows, str):
        return data, None
    found = read_scores(Path(rows).expanduser())
    return {**data, field: found.scores}, found
