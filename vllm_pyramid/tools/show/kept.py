# SPDX-License-Identifier: Apache-2.0
"""Read from traces (`step/trace.py`) how many KV heads of each layer kept each token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint16]
_PART = re.compile(r"(?:-stage\d+)?(?:-rank\d+)?$")


@dataclass(frozen=True)
class Kept:
    """What one request kept at its prompt's end.

    Attributes:
        request_id: as the engine called it.
        layers: `[L]`, the model's own numbers of the layers that evict.
        heads: KV heads of each of them, over all ranks.
        counts: `[L, tokens]`, how many of a layer's KV heads kept each token of the prompt.
    """

    request_id: str
    layers: list[int]
    heads: list[int]
    counts: Counts

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.counts.shape[1]


def read_kept(folder: Path) -> list[Kept]:
    """Return what each traced request of a folder kept at its prompt's end, by file name.

    Files of ranks and pipeline stages are put together. Files of other evictions are left out.

    Raises:
        ValueError: a part of a request's layers or heads is missing, so that parts disagree.
    """
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        parts.setdefault(_PART.sub("", path.stem), []).append(path)
    found = (_read(paths) for paths in parts.values())
    return [kept for kept in found if kept is not None]


def _read(paths: list[Path]) -> Kept | None:
    counts: dict[int, Counts] = {}
    heads: dict[int, int] = {}
    name, layers, held = "", [], np.zeros(0, np.int64)
    for path in paths:
        with np.load(path) as trace:
            if "prompt_len" not in trace:
                return None
            tokens = int(trace["prompt_len"])
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
    return Kept(name, layers, [heads[layer] for layer in order], stacked)


def pieces(text: str, offsets: list[tuple[int, int]], tokens: list[str]) -> list[str]:
    """Return the part of the text that each token stands for; joined, they are the text.

    A token that the tokenizer added has none, and stands as itself in angle brackets. Of tokens
    that share one character (bytes of it), the first has it.

    Args:
        offsets: begin and end of each token in the text. tokens: their names.
    """
    found, reached = [], 0
    for (start, end), token in zip(offsets, tokens, strict=True):
        if start == end:
            found.append(f"⟨{token.strip('<>|')}⟩")
            continue
        found.append(text[reached:end])
        reached = max(reached, end)
    return found
