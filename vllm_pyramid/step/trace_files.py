# SPDX-License-Identifier: Apache-2.0
"""The files of traces (`trace.py`): their names, and how many KV heads kept each token."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint16]
_PART = re.compile(r"(?:-stage\d+)?(?:-rank\d+)?$")


@dataclass(frozen=True)
class Kept:
    """What one request kept at its prompt's end.

    `layers`, `[L]`, are the model's own numbers, with `heads` KV heads each over all ranks.
    `counts`, `[L, tokens]`, say how many of a layer's KV heads kept each token of the prompt.
    """

    request_id: str
    layers: list[int]
    heads: list[int]
    counts: Counts

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.counts.shape[1]


def file_name(request_id: str) -> str:
    """Return the request's id as a file name; clients choose ids, which may hold any characters."""
    name = re.sub(r"^\.|[^A-Za-z0-9_.-]", "_", request_id)[:128]
    if name != request_id:
        name += f"-{zlib.crc32(request_id.encode()):08x}"  # so that two ids stay two files
    return name


def read_kept(folder: Path) -> list[Kept]:
    """Return what each traced request of a folder kept at its prompt's end, by file name.

    Files of ranks and pipeline stages are put together; files of other evictions are left out.
    ValueError: a part of a request's layers or heads is missing, so that parts disagree.
    """
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        parts.setdefault(_PART.sub("", path.stem), []).append(path)
    found = (_read(paths) for paths in parts.values())
    return [kept for kept in found if kept is not None]


def rows_per_layer(trace: Mapping[str, Any]) -> int:
    """Return how many rows of a file's arrays belong to one layer: its KV heads with lengths."""
    return int(trace["kv_heads"]) if "kv_heads" in trace else 1


def _read(paths: list[Path]) -> Kept | None:
    counts: dict[int, Counts] = {}
    heads: dict[int, int] = {}
    name, layers, held, per_layer = "", [], np.zeros(0, np.int64), 1
    for path in paths:
        with np.load(path) as trace:
            if "prompt_len" not in trace:
                return None
            tokens, per_layer = int(trace["prompt_len"]), rows_per_layer(trace)
            name, layers, held = str(trace["request_id"]), trace["layers"].tolist(), trace["held"]
            for key in trace.files:
                if not key.startswith("kept_"):
                    continue
                layer, kept = int(key.removeprefix("kept_")), trace[key]
                row = np.bincount(kept.ravel(), minlength=tokens).astype(np.uint16)
                counts[layer] = counts.get(layer, np.zeros(tokens, np.uint16)) + row
                heads[layer] = heads.get(layer, 0) + len(kept)
    order = sorted(counts)
    if order != list(range(len(layers))):
        raise ValueError(f"the trace of {name} has layers {order} of {len(layers)}: a stage lacks")
    stacked = np.stack([counts[layer] for layer in order])
    sums, wanted = stacked.sum(axis=1), held * np.array([heads[layer] for layer in order])
    if not np.array_equal(sums, wanted):
        raise ValueError(f"the trace of {name} holds {sums.tolist()} tokens, not {wanted.tolist()}")
    of_layers = stacked.reshape(-1, per_layer, stacked.shape[1]).sum(axis=1, dtype=np.uint16)
    found = np.array([heads[layer] for layer in order]).reshape(-1, per_layer).sum(axis=1)
    return Kept(name, layers[::per_layer], found.tolist(), of_layers)
