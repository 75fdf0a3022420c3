# SPDX-License-Identifier: Apache-2.0
"""Scores of a model's KV heads, in the files that DuoAttention publishes (arXiv:2410.10819).

A folder holds `full_attention_heads.tsv`, a line for each layer with a number from 0 to 1 for each
of its KV heads, and `config.json` with `sink_size` and `recent_size`, the tokens that a streaming
head sees at the beginning and at the end. DuoAttention and kvpress read the same two files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_pyramid.tools.head_probe import retrieval_heads

SCORES, CONFIG = "full_attention_heads.tsv", "config.json"
_SIZES = {"sink_size": 0, "recent_size": 1}  # the least that each may be


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
        """Read a folder. Numbers beyond 0 and 1 are clipped, as DuoAttention clips them.

        Raises:
            ValueError: a file is missing or holds something else.
        """
        try:
            lines = (folder / SCORES).read_text(encoding="utf-8").splitlines()
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the scores of heads in {folder}: {error}") from error
        try:
            rows = [[float(x) for x in line.split("\t")] for line in lines if line.strip()]
        except ValueError as error:
            raise ValueError(f"{folder / SCORES}: {error}") from None
        if not rows or len({len(row) for row in rows}) > 1:
            raise ValueError(f"{folder / SCORES} must have equally many numbers in each line")
        scores = torch.tensor(rows, dtype=torch.float64)
        if not scores.isfinite().all():
            raise ValueError(f"{folder / SCORES} holds a number that is not finite")
        sinks, recent = (_whole_number(config, key, least, folder) for key, least in _SIZES.items())
        return cls(scores.clamp(0, 1), sinks, recent)

    def write(self, folder: Path, more: Mapping[str, Any]) -> None:
        """Write the two files; `more` goes into `config.json`.

        Raises:
            ValueError: they cannot be written.
        """
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
        """Return the share of a request's cache that is kept if each head has its own length.

        Args:
            mask: `[L, G]` bool. tokens: of the request.
        """
        whole = mask.double().mean().item()
        return whole + (1 - whole) * min(1.0, (self.sinks + self.recent) / tokens)


def _whole_number(config: Any, key: str, least: int, folder: Path) -> int:
    value = config.get(key) if isinstance(config, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{folder / CONFIG}: {key} must be a whole number of at least {least}, not {value!r}"
        )
    return value
