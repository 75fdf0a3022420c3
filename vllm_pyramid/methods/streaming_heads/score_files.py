# SPDX-License-Identifier: Apache-2.0
"""Read scores of heads in the files that DuoAttention and HeadKV publish.

DuoAttention (arXiv:2410.10819): a folder holds `full_attention_heads.tsv`, a line for each layer
with a number from 0 to 1 for each of its KV heads, and `config.json` with `sink_size` and
`recent_size`, the tokens that a streaming head sees at the beginning and at the end. DuoAttention
and kvpress read the same two files, and `python -m lab.heads` writes them.

HeadKV (arXiv:2410.19258) and the detector of retrieval heads that it starts from: a `.json` file
with a list of numbers for each query head, one for each needle that was found: `{"0-31": [0.1,
0.3], ...}`, layer and head. A query head's score is their mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SCORES, CONFIG = "full_attention_heads.tsv", "config.json"
_SIZES = {"sink_size": 0, "recent_size": 1}  # the least that each may be


Scores = tuple[tuple[float, ...], ...]


class ScoreFiles(NamedTuple):
    """What a folder or a file says.

    Attributes:
        scores: how much each head needs the whole cache: `[L][G]` from 0 to 1 of a folder, `[L][H]`
            of a file, whose heads are query heads.
        sinks, recent: tokens that a streaming head sees of both ends; None of a file.
    """

    scores: Scores
    sinks: int | None
    recent: int | None


def read_scores(path: Path) -> ScoreFiles:
    """Read DuoAttention's folder, clipped to 0 .. 1, or HeadKV's file; ValueError: wrong."""
    if path.suffix == ".json":
        return ScoreFiles(_query_heads(path), None, None)
    return _read_folder(path)


def of_kv_heads(scores: Scores, num_kv_heads: int) -> npt.NDArray[np.float64]:
    """Return scores of KV heads, `[L, G]`: of `[L][H]` those of their best query heads."""
    grouped = np.array(scores).reshape(len(scores), num_kv_heads, -1)
    found: npt.NDArray[np.float64] = grouped.max(axis=2)
    return found


def check_scores(what: str, scores: Scores) -> None:
    """Raise ValueError unless there are equally many finite numbers for each layer."""
    if not scores or len({len(row) for row in scores}) > 1 or not scores[0]:
        raise ValueError(f"{what} must have equally many numbers for each layer")
    if not np.isfinite(scores).all():
        raise ValueError(f"{what} holds a number that is not finite")


def check_lanes(what: str, scores: Scores, num_lanes: int) -> None:
    """Raise ValueError unless the scores can be those of `num_lanes` KV heads in all layers."""
    layers, heads = len(scores), len(scores[0])
    if num_lanes % layers or heads % (num_lanes // layers):
        raise ValueError(
            f"{what} is for {layers} layers of {heads} heads, and there are {num_lanes} KV heads: "
            "take that of this model"
        )


def check_heads(
    what: str, scores: Scores, num_layers: int, num_kv_heads: int, num_heads: int | None
) -> None:
    """Raise ValueError unless the scores fit a model; `num_heads` None: any multiple."""
    layers, heads = len(scores), len(scores[0])
    fits = heads in (num_kv_heads, num_heads) if num_heads else not heads % num_kv_heads
    if layers != num_layers or not fits:
        raise ValueError(
            f"{what} is for {layers} layers of {heads} heads, and this model has {num_layers} of "
            f"{num_kv_heads} KV heads"
            + (f" and {num_heads} query heads" if num_heads else "")
            + ": take that of this model"
        )


def _query_heads(path: Path) -> Scores:
    """Read HeadKV's file, `[L][H]`: the mean of each head's numbers."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the scores of heads in {path}: {error}") from error
    found: dict[tuple[int, int], float] = {}
    for name, numbers in data.items() if isinstance(data, dict) else ():
        layer, dash, head = name.partition("-")
        if not (dash and layer.isdecimal() and head.isdecimal()):
            raise ValueError(f"{path}: {name!r} is no layer and head, such as '0-31'")
        values = numbers if isinstance(numbers, list) else [numbers]
        is_number = [isinstance(x, int | float) and not isinstance(x, bool) for x in values]
        if not values or not all(is_number) or not np.isfinite(values).all():
            raise ValueError(f"{path}: head {name} must have finite numbers, not {numbers!r:.60}")
        found[int(layer), int(head)] = float(np.mean(values))
    layers = 1 + max((layer for layer, _ in found), default=-1)
    heads = 1 + max((head for _, head in found), default=-1)
    if not found or len(found) != layers * heads:
        raise ValueError(
            f"{path} has numbers of {len(found)} heads, which are not all heads of {layers} layers "
            f"of {heads}"
        )
    return tuple(tuple(found[layer, head] for head in range(heads)) for layer in range(layers))


def _read_folder(folder: Path) -> ScoreFiles:
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
