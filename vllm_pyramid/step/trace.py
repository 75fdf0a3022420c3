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
from vllm.logger import init_logger

from vllm_pyramid.step.step import StepEvictions

logger = init_logger(f"vllm.{__name__}")


def _file_name(request_id: str) -> str:
    """The request's name where it can be one; clients choose it, so it may be anything."""
    name = re.sub(r"^\.|[^A-Za-z0-9_.-]", "_", request_id)[:128]
    if name != request_id:
        name += f"-{zlib.crc32(request_id.encode()):08x}"  # two odd names stay two files
    return name


class TraceWriter:
    """Writes one `.npz` an eviction into a folder, at the end of its step.

    The file of a prompt's end has the request's name and holds `request_id`, `prompt_len`, `budget`
    (mean tokens a layer asked for), `layers` (`[L]` int32, the model's own numbers of the layers
    that evict, which are counted from 0 here), `held` (`[L]` int32, tokens kept per KV head),
    `kept_<layer>`
    (`[G, held[layer]]` int32, ascending positions; layers and requests that kept everything too)
    and `recall_<layer>` (`[G]` float32, the share of the attention of the prompt's last queries to
    the tokens before them that the kept ones hold: `ops.recall.kept_mass`; 1 where everything was
    kept, NaN for a prompt that is not longer than the window, and for one that was thinned between
    layers, whose full attention nobody computed). With tensor parallelism each rank
    writes its own KV heads into `<request>-rank<r>.npz`, and with pipeline parallelism each stage
    its own layers into `<request>-stage<s>.npz`. A name that is too long for a file, or
    has characters that a file's cannot have, is shortened and gets a checksum. A request that is
    preempted and evicts again replaces its files.

    A policy that evicts inside the prompt or during generation too adds a file for each of these
    evictions, named `<request>@<computed tokens>`: `kept_<layer>` are still positions of the whole
    sequence, `computed` takes the place of `prompt_len`, and `recall_<layer>` is NaN (also at the
    end of a prompt that was evicted from before: nobody has its full attention).

    Args:
        folder: made if need be. num_kv_heads: of each of this worker's layers, on this rank.
        rank: of this worker. world_size: ranks that share the KV heads. layers: see above.
        first_layer: of this worker's. stage: of the pipeline; None where there is one.
    """

    def __init__(
        self,
        folder: str,
        num_kv_heads: Sequence[int],
        rank: int,
        world_size: int,
        layers: Sequence[int] | None = None,
        first_layer: int = 0,
        stage: int | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.num_kv_heads = dict(enumerate(num_kv_heads, first_layer))
        self.layers = np.array(range(len(num_kv_heads)) if layers is None else layers, np.int32)
        self.suffix = "" if stage is None else f"-stage{stage}"
        self.suffix += f"-rank{rank}" if world_size > 1 else ""
        self._placed: dict[str, list[torch.Tensor]] = {}
        self._open: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        # The tokens computed at a request's latest eviction, and what each layer has held since,
        # `[G, held]`; only of requests that will evict again.
        self._holds: dict[str, tuple[int, dict[int, np.ndarray]]] = {}
        # Requests that hold what nobody knows the positions of.
        self._untraceable: set[str] = set()

    def record(
        self,
        evictions: StepEvictions,
        index: int,
        layer: int,
        positions: torch.Tensor,
        recall: torch.Tensor,
    ) -> None:
        """Take what request `index` keeps in `layer`, and its recall.

        Args:
            positions: `[G, held]`, places among the tokens that the layer held until now; at a
                prompt's end these are the prompt's positions.
        """
        request_id = evictions.request_ids[index]
        if request_id in self._untraceable and evictions.numbers[index] > 1:
            return
        layers = self._open.setdefault(request_id, {})
        places = positions.cpu().numpy()
        held = self._held_before(evictions, index, layer)
        kept = np.take_along_axis(held, places.astype(np.int64), axis=1)
        layers[layer] = (kept, recall.cpu().numpy().copy())

    def place(self, request_id: str, layers: list[torch.Tensor]) -> None:
        """A method that evicts by itself says what a request holds at its prompt's end.

        Args:
            layers: of each layer the positions, `[held]` int32, ascending: all heads hold the same.
        """
        self._placed[request_id] = layers

    def _held_before(self, evictions: StepEvictions, index: int, layer: int) -> np.ndarray:
        """The positions that the layer held before this eviction: `[G, prompt_len - before]`."""
        end, heads = int(evictions.prompt_lens[index]), self.num_kv_heads[layer]
        if evictions.numbers[index] == 1:
            return np.tile(np.arange(end, dtype=np.int32), (heads, 1))
        start, older = self._holds[evictions.request_ids[index]]
        newer = np.tile(np.arange(start, end, dtype=np.int32), (heads, 1))
        return np.concatenate([older[layer], newer], axis=1)

    def resume(self, request_id: str, origin: str, point: int) -> None:
        """A request begins with what another one left: its file says which positions these are.

        Args:
            origin: the other one. point: tokens computed at its eviction.
        """
        layers = self._kept_at(origin, point)
        if layers is None:
            logger.warning(
                "no trace of request %s: it goes on from request %s, whose own is no longer in %s",
                *(request_id, origin, self.folder),
            )
            self._untraceable.add(request_id)
            return
        self._untraceable.discard(request_id)
        self._holds[request_id] = point, layers

    def _kept_at(self, origin: str, point: int) -> dict[int, np.ndarray] | None:
        """What each layer of a request kept at an eviction, by its file; None if there is none."""
        for end, name in ((f"@{point}", "computed"), ("", "prompt_len")):
            path = self.folder / f"{_file_name(origin)}{end}{self.suffix}.npz"
            if not path.exists():
                continue
            with np.load(path) as file:
                if int(file[name]) == point:
                    kept = {layer: file[f"kept_{layer}"] for layer in self.num_kv_heads}
                    return {
                        layer: kept[layer][kept[layer] < point].reshape(heads, -1)
                        for layer, heads in self.num_kv_heads.items()
                    }
        return None

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        self._untraceable.discard(request_id)
        self._holds.pop(request_id, None)
        self._placed.pop(request_id, None)

    def finish_step(self, evictions: StepEvictions) -> None:
        """Write the requests that came to an eviction, once all layers of the step are done."""
        for index, request_id in enumerate(evictions.request_ids):
            if evictions.numbers[index] == 1:
                self._untraceable.discard(request_id)  # it was preempted, and holds its own now
            elif request_id in self._untraceable:
                continue
            layers = self._open.pop(request_id, {})
            end, number = int(evictions.prompt_lens[index]), evictions.numbers[index]
            of_prompt = evictions.from_end[index] == 0
            arrays: dict[str, Any] = {"prompt_len" if of_prompt else "computed": end}
            placed = self._placed.pop(request_id, None)
            for layer, heads in self.num_kv_heads.items():
                if placed is not None:
                    kept = np.tile(placed[layer].numpy(), (heads, 1))
                    layers[layer] = (kept, np.full(heads, np.nan, np.float32))
                elif layer not in layers:
                    layers[layer] = (
                        self._held_before(evictions, index, layer),
                        np.full(heads, 1.0 if of_prompt and number == 1 else np.nan, np.float32),
                    )
                arrays[f"kept_{layer}"], arrays[f"recall_{layer}"] = layers[layer]
            if not of_prompt or evictions.every[index]:
                self._holds[request_id] = end, {layer: kept for layer, (kept, _) in layers.items()}
            name = _file_name(request_id) + ("" if of_prompt else f"@{end}") + self.suffix
            partial = self.folder / f".{name}.part"
            with partial.open("wb") as file:
                np.savez_compressed(
                    file,
                    request_id=request_id,
                    budget=int(evictions.budgets[index]),
                    layers=self.layers,
                    held=evictions.kept_lens[:, index],
                    **arrays,
                )
            partial.rename(self.folder / f"{name}.npz")
