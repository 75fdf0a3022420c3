# SPDX-License-Identifier: Apache-2.0
"""`--kv-trace DIR`: what every request kept, for whoever wants to check or plot it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_pyramid.worker.retention import StepEvictions


def _file_name(request_id: str) -> str:
    """The request's name where it can be one; clients choose it, so it may be anything."""
    name = re.sub(r"^\.|[^A-Za-z0-9_.-]", "_", request_id)[:128]
    if name != request_id:
        name += f"-{zlib.crc32(request_id.encode()):08x}"  # two odd names stay two files
    return name


class TraceWriter:
    """Writes one `.npz` a request into a folder, at the end of the step that ends its prompt.

    Each holds `request_id`, `prompt_len`, `budget` (mean tokens a layer asked for), `held`
    (`[L]` int32, tokens kept per KV head), `kept_<layer>` (`[G, held[layer]]` int32, ascending
    positions; layers and requests that kept everything too) and `recall_<layer>` (`[G]` float32,
    the share of the attention of the prompt's last queries to the tokens before them that the kept
    ones hold: `ops.recall.kept_mass`; 1 where everything was kept, NaN for a prompt that is not
    longer than the window). With tensor parallelism each rank
    writes its own KV heads into `<request>-rank<r>.npz`. A name that is too long for a file, or
    has characters that a file's cannot have, is shortened and gets a checksum. A request that is
    preempted and evicts again replaces its file.

    Args:
        folder: made if need be. num_kv_heads: of each layer, on this rank.
        rank: of this worker. world_size: ranks that share the KV heads.
    """

    def __init__(
        self, folder: str, num_kv_heads: Sequence[int], rank: int, world_size: int
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.num_kv_heads = list(num_kv_heads)
        self.suffix = f"-rank{rank}" if world_size > 1 else ""
        self._open: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}

    def record(
        self,
        evictions: StepEvictions,
        index: int,
        layer: int,
        positions: torch.Tensor,
        recall: torch.Tensor,
    ) -> None:
        """Take the positions `[G, held]` that request `index` keeps in `layer`, and its recall."""
        layers = self._open.setdefault(evictions.request_ids[index], {})
        layers[layer] = (positions.cpu().numpy().copy(), recall.cpu().numpy().copy())

    def finish_step(self, evictions: StepEvictions) -> None:
        """Write the requests whose prompt ended in the step, once all its layers are done."""
        for index, request_id in enumerate(evictions.request_ids):
            layers = self._open.pop(request_id, {})
            prompt_len = int(evictions.prompt_lens[index])
            everything = np.arange(prompt_len, dtype=np.int32)
            arrays: dict[str, Any] = {}
            for layer, heads in enumerate(self.num_kv_heads):
                whole = (np.tile(everything, (heads, 1)), np.ones(heads, np.float32))
                kept, recall = layers.get(layer, whole)
                arrays[f"kept_{layer}"], arrays[f"recall_{layer}"] = kept, recall
            name = _file_name(request_id) + self.suffix
            partial = self.folder / f".{name}.part"
            with partial.open("wb") as file:
                np.savez_compressed(
                    file,
                    request_id=request_id,
                    prompt_len=prompt_len,
                    budget=int(evictions.budgets[index]),
                    held=evictions.helds[:, index],
                    **arrays,
                )
            partial.rename(self.folder / f"{name}.npz")
