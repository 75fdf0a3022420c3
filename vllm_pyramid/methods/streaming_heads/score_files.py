# SPDX-License-Identifier: Apache-2.0
"""Read scores of KV heads in the files that DuoAttention publishes (arXiv:2410.10819).

A folder holds `full_attention_heads.tsv`, a line for each layer with a number from 0 to 1 for each
of its KV heads, and `config.json` with `sink_size` and `recent_size`, the tokens that a streaming
head sees at the beginning and at the end. DuoAttention and kvpress read the same two files, and
`vllm-pyramid calibrate --heads` writes them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

SCORES, CONFIG = "full_attention_heads.tsv", "config.json"
_SIZES = {"sink_size": 0, "recent_size": 1}  # the least that each may be


class ScoreFiles(NamedTuple):
    """What a folder says.

    Attributes:
        scores: `[L][G]`, from 0 to 1: how much each KV head needs the whole cache.
        sinks, recent: tokens that a streaming head sees of the beginning and of the end.
    """

    scores: tuple[tuple[float, ...], ...]
    sinks: int
    recent: int


def read_scores(folder: Path) -> ScoreFiles:
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
    if not all(math.isfinite(x) for row in rows for x in row):
        raise ValueError(f"{folder / SCORES} holds a number that is not finite")
    clipped = tuple(tuple(min(max(x, 0.0), 1.0) for x in row) for row in rows)
    sizes = (_whole_number(config, key, least, folder) for key, least in _SIZES.items())
    return ScoreFiles(clipped, *sizes)


def _whole_number(config: Any, key: str, least: int, folder: Path) -> int:
    value = config.get(key) if isinstance(config, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{folder / CONFIG}: {key} must be a whole number of at least {least}, not {value!r}"
        )
    return value
