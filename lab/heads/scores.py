# SPDX-License-Identifier: Apache-2.0
"""Scores of a model's KV heads, in the files of `methods/streaming_heads/score_files.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.heads.probe import retrieval_heads
from vllm_pyramid.methods.streaming_heads import RECENT, SINKS
from vllm_pyramid.methods.streaming_heads.score_files import (
    CONFIG,
    SCORES,
    ScoreFiles,
    of_kv_heads,
    read_scores,
)


@dataclass(frozen=True)
class HeadScores:
    """How much each KV head needs the whole cache.

    Attributes:
        scores: `[L, G]` float64 from 0 to 1.
        sinks, recent: tokens that a streaming head sees of the beginning and of the end.
    """

    scores: torch.Tensor
    sinks: int
    recent: int

    @classmethod
    def read(cls, folder: Path) -> HeadScores:
        """Read a folder; errors as of `read_scores`."""
        found = read_scores(folder)
        return cls.of(found, len(found.scores[0]))

    @classmethod
    def of(
        cls, found: ScoreFiles, num_kv_heads: int, sinks: int = SINKS, recent: int = RECENT
    ) -> HeadScores:
        """Return what was read as scores of `num_kv_heads` heads; query heads give their best.

        `sinks` and `recent` are for a file that does not say them.
        """
        return cls(
            torch.from_numpy(of_kv_heads(found.scores, num_kv_heads)),
            sinks if found.sinks is None else found.sinks,
            recent if found.recent is None else found.recent,
        )

    def write(self, folder: Path, more: Mapping[str, Any]) -> None:
        """Write both files, with `more` in `config.json`; ValueError: they cannot be written."""
        rows = ["\t".join(f"{x:.6f}" for x in row) for row in self.scores.tolist()]
        config = {"sink_size": self.sinks, "recent_size": self.recent, **more}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SCORES).write_text("\n".join(rows) + "\n", encoding="utf-8")
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {error.filename}: {error.strerror}") from error

    def count(self, share: float) -> int:
        """Return how many KV heads a share of them is, rounded."""
        return round(share * self.scores.numel())

    def mask(self, share: float) -> torch.Tensor:
        """Return which heads keep everything, `[L, G]` bool: the share with the highest scores."""
        return retrieval_heads(self.scores, self.count(share))

    def held(self, mask: torch.Tensor, tokens: int) -> float:
        """Return the share of a cache of `tokens` tokens that heads of `mask`, `[L, G]`, keep."""
        whole = mask.double().mean().item()
        return whole + (1 - whole) * min(1.0, (self.sinks + self.recent) / tokens)
