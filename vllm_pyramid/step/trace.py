# SPDX-License-Identifier: Apache-2.0
"""`--kv-trace DIR`: files with the positions that every request kept, and the pages it read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_pyramid.step.limited_log import LimitedLog
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.trace_files import file_name

logger = init_logger(f"vllm.{__name__}")


class TraceWriter:
    """Writes one `.npz` file for each eviction into a folder, at the end of its step.

    The file of the eviction at a prompt's end is named after the request and holds

        request_id, prompt_len
        budget          mean tokens per layer that the request asked for
        layers          `[L]` int32, the model's own numbers of the layers that evict, which are
                        counted from 0 here
        held            `[L]` int32, tokens kept per KV head
        kept_<layer>    `[G, held[layer]]` int32, ascending positions; also of layers and requests
                        that kept everything
        recall_<layer>  `[G]` float32, the kept tokens' share of the attention that the prompt's
                        last queries pay to the tokens before them (`kernels.recall.kept_mass`); 1
                        where everything was kept; NaN for a prompt that is not longer than the
                        window, and where full attention was not computed: of a prompt that was
                        thinned between layers, or evicted from before its end

    With tensor parallelism each rank writes its own KV heads into `<request>-rank<r>.npz`, and with
    pipeline parallelism each stage its own layers into `<request>-stage<s>.npz`. An id that is too
    long for a file name, or has other characters, is shortened and gets a checksum. A request that
    is preempted and evicts again replaces its files.

    A file that cannot be written (a full disk, a missing permission) is left out, which is logged
    and counted; the request goes on. Failed requests have no files.

    An eviction inside the prompt or during generation has a file of its own, named
    `<request>@<computed tokens>`: `kept_<layer>` are still positions of the whole sequence,
    `computed` takes the place of `prompt_len`, and `recall_<layer>` is NaN.

    Where a policy selects pages, a request's end writes `<request>~pages.npz`: `layers` as above,
    `pages_read` and `pages_visible`, `[L]` int64, summed over the tokens behind the prompt, and
    how many `tokens` these were.

    Where KV heads have lengths of their own, each counts as a layer of one KV head: there are
    numbers and arrays for each KV head of each layer in turn, `layers` repeats a layer's number,
    and `kv_heads` says how many follow one another.

    Args:
        folder: created if it is missing.
        num_kv_heads: KV heads of each of this worker's layers, on this rank.
        rank: this worker's rank. world_size: ranks that share the KV heads. layers: see above.
        first_layer: number of this worker's first layer.
        stage: this worker's pipeline stage; None where there is one.
        tables_per_layer: KV heads of a layer that have lengths of their own and are layers here,
            or 1.
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
        tables_per_layer: int = 1,
    ) -> None:
        self._tables_per_layer = tables_per_layer
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.num_kv_heads = dict(enumerate(num_kv_heads, first_layer))
        self.layers = np.array(range(len(num_kv_heads)) if layers is None else layers, np.int32)
        self.suffix = "" if stage is None else f"-stage{stage}"
        self.suffix += f"-rank{rank}" if world_size > 1 else ""
        self._placed: dict[str, list[torch.Tensor]] = {}
        self._open: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        # The tokens computed at a request's latest eviction, and the positions that each layer kept
        # there, `[G, held]`; only of requests that may evict again.
        self._holds: dict[str, tuple[int, dict[int, np.ndarray]]] = {}
        # Requests that hold tokens whose positions are not known.
        self._untraceable: set[str] = set()
        # Of requests that read pages: tokens, and `[2, L]` pages read and visible.
        self._reads: dict[str, tuple[int, np.ndarray]] = {}
        self._log = LimitedLog(logger.error)

    def record(
        self,
        evictions: StepEvictions,
        index: int,
        layer: int,
        positions: torch.Tensor,
        recall: torch.Tensor,
    ) -> None:
        """Record what request `index` keeps in `layer`, and its recall.

        `positions`, `[G, held]`, are places among the tokens that the layer held until now; at a
        prompt's end these are the prompt's positions.
        """
        request_id = evictions.request_ids[index]
        if request_id in self._untraceable and evictions.eviction_numbers[index] > 1:
            return
        layers = self._open.setdefault(request_id, {})
        places = positions.cpu().numpy()
        held = self._held_before(evictions, index, layer)
        kept = np.take_along_axis(held, places.astype(np.int64), axis=1)
        layers[layer] = (kept, recall.cpu().numpy().copy())

    def place(self, request_id: str, layers: list[torch.Tensor]) -> None:
        """Record what a request holds at its prompt's end, for a method that evicts by itself.

        `layers` has the positions of each, `[held]` int32, ascending, the same in all heads.
        """
        self._placed[request_id] = layers

    def _held_before(self, evictions: StepEvictions, index: int, layer: int) -> np.ndarray:
        """Return the positions that the layer held before this eviction: `[G, tokens]`."""
        end, heads = int(evictions.points[index]), self.num_kv_heads[layer]
        if evictions.eviction_numbers[index] == 1:
            return np.tile(np.arange(end, dtype=np.int32), (heads, 1))
        start, older = self._holds[evictions.request_ids[index]]
        newer = np.tile(np.arange(start, end, dtype=np.int32), (heads, 1))
        return np.concatenate([older[layer], newer], axis=1)

    def resume(self, request_id: str, origin: str, point: int) -> None:
        """Read which positions a request holds that begins with the cache of request `origin`.

        `point` counts the tokens computed at that one's eviction.
        """
        layers = self._kept_at(origin, point)
        if layers is None:
            logger.warning(
                "No trace of request %s: it resumes request %s, whose trace is no longer in %s",
                *(request_id, origin, self.folder),
            )
            self._untraceable.add(request_id)
            return
        self._untraceable.discard(request_id)
        self._holds[request_id] = point, layers

    def _kept_at(self, origin: str, point: int) -> dict[int, np.ndarray] | None:
        """Return what each layer of a request kept at an eviction; None if it has no file."""
        for end, name in ((f"@{point}", "computed"), ("", "prompt_len")):
            path = self.folder / f"{file_name(origin)}{end}{self.suffix}.npz"
            # A file may be of another eviction of the request, unreadable, or cut off.
            with suppress(OSError, KeyError, ValueError, BadZipFile), np.load(path) as file:
                if int(file[name]) == point:
                    kept = {layer: file[f"kept_{layer}"] for layer in self.num_kv_heads}
                    return {
                        layer: kept[layer][kept[layer] < point].reshape(heads, -1)
                        for layer, heads in self.num_kv_heads.items()
                    }
        return None

    def add_reads(
        self,
        request_ids: Sequence[str],
        requests: np.ndarray,
        read: np.ndarray,
        visible: np.ndarray,
    ) -> None:
        """Add how many pages, `[L, T]`, tokens of a step have read of the visible ones.

        `requests`, `[T]`, has each token's request, an index of `request_ids`.
        """
        for row in np.unique(requests).tolist():
            own = requests == row
            sums = np.stack([read[:, own].sum(axis=1), visible[:, own].sum(axis=1)])
            tokens, before = self._reads.get(request_ids[row], (0, np.zeros_like(sums)))
            self._reads[request_ids[row]] = tokens + int(own.sum()), before + sums

    def _write_reads(self, request_id: str) -> None:
        if (found := self._reads.pop(request_id, None)) is None:
            return
        tokens, (read, visible) = found
        arrays = {"request_id": request_id, "layers": self.layers, "tokens": tokens}
        arrays |= {"pages_read": read, "pages_visible": visible}
        self._write(file_name(request_id) + "~pages" + self.suffix, arrays)

    def forget(self, request_id: str) -> None:
        """Forget a request, which has finished."""
        self._write_reads(request_id)
        self._untraceable.discard(request_id)
        self._holds.pop(request_id, None)
        self._placed.pop(request_id, None)

    def finish_step(self, evictions: StepEvictions) -> int:
        """Write the files of a step's evictions when all layers have run; return the failures."""
        dropped = 0
        for index, request_id in enumerate(evictions.request_ids):
            if request_id in evictions.failures.of:
                self._open.pop(request_id, None)
                self.forget(request_id)
                self._untraceable.add(request_id)
                continue
            if evictions.eviction_numbers[index] == 1:
                self._untraceable.discard(request_id)  # preempted, and computed again
            elif request_id in self._untraceable:
                continue
            layers = self._open.pop(request_id, {})
            end, at_prompt_end = int(evictions.points[index]), evictions.at_prompt_end[index]
            is_whole = at_prompt_end and evictions.eviction_numbers[index] == 1
            arrays: dict[str, Any] = {"prompt_len" if at_prompt_end else "computed": end}
            placed = self._placed.pop(request_id, None)
            for layer, heads in self.num_kv_heads.items():
                if placed is not None:
                    kept = np.tile(placed[layer].numpy(), (heads, 1))
                    layers[layer] = (kept, np.full(heads, np.nan, np.float32))
                elif layer not in layers:
                    layers[layer] = (
                        self._held_before(evictions, index, layer),
                        np.full(heads, 1.0 if is_whole else np.nan, np.float32),
                    )
                arrays[f"kept_{layer}"], arrays[f"recall_{layer}"] = layers[layer]
            if not at_prompt_end or evictions.intervals[index]:
                self._holds[request_id] = end, {layer: kept for layer, (kept, _) in layers.items()}
            arrays |= {"request_id": request_id, "budget": int(evictions.budgets[index])}
            arrays |= {"layers": self.layers, "held": evictions.kept_lens[:, index]}
            if self._tables_per_layer > 1:
                arrays["kv_heads"] = self._tables_per_layer
            name = file_name(request_id) + ("" if at_prompt_end else f"@{end}") + self.suffix
            dropped += not self._write(name, arrays)
        return dropped

    def _write(self, name: str, arrays: dict[str, Any]) -> bool:
        """Write a file, and return whether that was possible."""
        partial = self.folder / f".{name}.part"
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, **arrays)
            partial.rename(self.folder / f"{name}.npz")
        except OSError as error:
            self._log("write", "no trace %s.npz in %s: %s", name, self.folder, error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        return True
