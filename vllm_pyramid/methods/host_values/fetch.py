# SPDX-License-Identifier: Apache-2.0
"""V of a device with a memory of its own: written to the host and fetched on a stream for copies.

    step    ... layer l: K, V of new tokens   attention of layer l      ... layer l + 1 ...
    copies                            V of l to the host | V of prompts of l + 1 to a buffer

Every query that chooses its keys, and a single one that uses all, reads V on the host. Several
queries of a request that use all keys (a chunk of a prompt) would read each row many times, so V of
what was computed before the step is fetched to a buffer, one layer ahead, and V of the new tokens
is written there by the step itself.

The host does not wait. The step waits for copies in three places: before it reads what they have
fetched, before it reads or moves V on the host, and at its end, so that no copy is under way when
tables, slots and blocks get another meaning.

Shape legend as in `kernels/records.py`; N are the tokens of a block of K alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.methods.host_values.kernels import Choosers, value_ops
from vllm_pyramid.methods.host_values.reads import Numbers, ReadLayout, StepRows
from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite
from vllm_pyramid.step.hooks import CopyStream, WorkerContext
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload

# Scratch of the queries that choose, in float32: of 128 MiB, more only where one query needs it.
WORKSPACE_CELLS = 32 << 20


class FetchedValues:
    """Keeps the buffers and the copies under way, and attends."""

    def __init__(self, context: WorkerContext, first_layer: int, renormalize: bool) -> None:
        assert context.copies is not None and context.table is not None
        self.context, self.renormalize = context, renormalize
        self._copies: CopyStream = context.copies
        self._table = context.table
        spec = context.specs[first_layer]
        self.first_layer, self.block_size = first_layer, spec.block_size
        config = context.config
        longest = config.model_config.max_model_len
        self._pages = -(-longest // self.block_size)
        self._page_bytes = spec.page_size_bytes
        self._new_tokens = config.scheduler_config.max_num_batched_tokens
        self._new_shape = (self._new_tokens, spec.num_kv_heads, spec.head_size)
        dtype = config.model_config.dtype
        assert isinstance(dtype, torch.dtype), "vLLM replaces names such as 'auto'"
        self._dtype = dtype
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        one = 3 * heads * (longest + 1) + 256  # `workspace_cells` where one query takes all keys
        self._cells = max(WORKSPACE_CELLS, one)
        self._caches: dict[int, torch.Tensor] = {}
        self._new: list[torch.Tensor] = []
        self._step: Step | None = None

    # Memory ---------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        new = int(np.prod(self._new_shape)) * self._dtype.itemsize
        return 2 * (self._pages * self._page_bytes + new) + 4 * self._cells

    def allocate(self) -> None:
        """Allocate the buffers, once: they do not depend on the cache."""
        self._caches = {}
        if self._new:
            return
        device = self.context.device
        with torch.inference_mode(False):
            self._new = [
                torch.empty(self._new_shape, dtype=self._dtype, device=device) for _ in range(2)
            ]
            size = self._pages * self._page_bytes
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
            self._workspace = torch.empty(self._cells, dtype=torch.float32, device=device)
            self._columns = torch.arange(self._pages, dtype=torch.int32, device=device)
        self._forget_copies()

    def add(self, layer: int, cache: torch.Tensor) -> None:
        self._caches[layer] = cache

    def _buffer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer as pages like those of `like`: `[S, G, N, D]`."""
        return self._buffers[index].view(like.dtype).view(self._pages, *like.shape[1:])

    # A step ---------------------------------------------------------------------------------------

    def begin_step(self, step: Step, top_ns: npt.NDArray[np.int32]) -> None:
        """Begin a step. `top_ns` is `[R]`, 0 where all keys are used."""
        self._step, self._top_ns = step, top_ns
        self._layouts: dict[bytes, ReadLayout] = {}

    def end_step(self) -> None:
        """Let all that is launched behind this call wait for the step's copies."""
        if self._last is not None:
            self._copies.wait(self._last)
        self._step = None
        self._forget_copies()

    def _forget_copies(self) -> None:
        self._last: Any = None  # mark of the latest copy
        self._written: list[Any] = [None, None]  # marks of the writes of the two newest layers
        # What the two buffers hold, layer and part of its layout; when it is there; used last.
        self._held: list[tuple[int, int] | None] = [None, None]
        self._there: list[Any] = [None, None]
        self._used_last = 0

    def write(self, write: CacheWrite) -> None:
        """Copy V of new tokens to the host, while the layers that follow run.

        It goes through a buffer of ours: graphs reuse their memory between two layers.
        """
        place, count = write.layer % 2, len(write.slots)
        if count > self._new_tokens:
            raise RuntimeError(
                f"a step has {count} tokens and the buffer for their V has {self._new_tokens}; "
                "report this"
            )
        if self._written[place] is not None:  # of two layers below
            self._copies.wait(self._written[place])
        new = self._new[place][:count]
        new.copy_(write.values[:count])
        self._last = self._written[place] = self._copies.launch(
            write.ops.write_rows, new, write.value_cache, write.slots, scale=write.value_scale
        )

    def attend(self, call: AttentionInputs, out: torch.Tensor) -> tuple[Numbers, Numbers] | None:
        """Attend in a layer whose V is on the host; return `ReadLayout.whole` and `chosen`.

        None in a step without real requests, which has zeros.
        """
        if self._step is None:
            out.zero_()
            return None
        layout, ops, layer = self._layout(call.layer), call.ops, call.layer
        for index, rows in enumerate(layout.fetched):
            place = self._fetch(ops, layer, index)
            if self._there[place] is not None:
                self._copies.wait(self._there[place])
            self._used_last = place
            self._fetch_next(ops, layer, index)
            values = self._buffer(place, call.value_cache)
            assert rows.slots is not None and rows.tokens is not None
            ops.write_rows(
                self._new[layer % 2][rows.tokens], values, rows.slots, scale=call.batch.value_scale
            )
            batch = rows.of(call, value_cache=values, value_table=rows.table)
            ops.paged_attention(out, batch, call.softmax)
        if layout.direct or self._step.evictions is not None:
            self._copies.wait(self._written[layer % 2])
        for rows in layout.direct:
            if rows.choosers is None:
                ops.paged_attention(out, rows.of(call), call.softmax)
                continue
            assert rows.top_ns is not None
            value_ops(ops).topn_attention(
                out,
                rows.of(call),
                call.softmax,
                rows.top_ns,
                renormalize=self.renormalize,
                choosers=rows.choosers,
            )
        return layout.whole, layout.chosen

    def prefetch(self, ops: Ops, layer: int) -> None:
        """Fetch, from a layer with V on the device, what the first one with V on the host needs."""
        if self._step is not None and layer < self.first_layer:
            self._fetch_next(ops, self.first_layer - 1, 0)

    def _fetch_next(self, ops: Ops, layer: int, index: int) -> None:
        """Fetch the part that comes behind part `index` of a layer."""
        if layer >= self.first_layer and index + 1 < len(self._layout(layer).fetched):
            self._fetch(ops, layer, index + 1)
        elif layer + 1 in self._caches and self._layout(layer + 1).fetched:
            self._fetch(ops, layer + 1, 0)

    def _fetch(self, ops: Ops, layer: int, index: int) -> int:
        """Return the buffer that holds, or will hold, a part of a layer."""
        if (layer, index) in self._held:
            return self._held.index((layer, index))
        place = 1 - self._used_last
        places = self._layout(layer).fetched[index].places
        if places is not None:
            cache = self._caches[layer]
            self._last = self._there[place] = self._copies.launch(
                value_ops(ops).copy_pages,
                self._buffer(place, cache),
                cache,
                self._table(layer),
                places,
            )
        self._held[place] = (layer, index)
        return place

    # How V is read --------------------------------------------------------------------------------

    def _layout(self, layer: int) -> ReadLayout:
        assert self._step is not None
        skips = self._step.skips[layer]
        if (found := self._layouts.get(key := skips.tobytes())) is None:
            found = self._layouts[key] = self._make_layout(skips)
        return found

    def _make_layout(self, skips: npt.NDArray[np.int32]) -> ReadLayout:
        step = self._step
        assert step is not None
        queries = step.scheduled.astype(np.int64)
        before = step.computed.astype(np.int64) - skips
        visible, top_ns = before + queries, self._top_ns.astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(queries)])
        chooses = (top_ns > 0) & (top_ns < visible) & (queries > 0)
        # A request that chooses takes at most `top_ns` keys; its first queries may see fewer.
        fewer = np.clip(top_ns - before - 1, 0, queries)
        chosen = queries * top_ns - fewer * (top_ns - before) + fewer * (fewer + 1) // 2
        fetches = ~chooses & (queries > 1)
        fetched, direct = [], []
        first = 0
        while first < len(queries):
            last, pages = first, 0
            while last < len(queries) and fetches[last] == fetches[first]:
                pages += -(-int(visible[last]) // self.block_size) if fetches[first] else 0
                if pages > self._pages and last > first:
                    break
                last += 1
            rows = slice(first, last)
            most = int(queries[rows].max()), int(visible[rows].max())
            if fetches[first]:
                tokens = slice(int(starts[first]), int(starts[last]))
                fetched.append(self._fetched(rows, most, before[rows], queries[rows], tokens))
            else:
                direct.append(self._direct(rows, most, chooses[rows], queries[rows]))
            first = last
        return ReadLayout(
            fetched,
            direct,
            np.where(chooses | (queries == 0), 0, visible),
            np.where(chooses, chosen, 0),
        )

    def _fetched(
        self, rows: slice, most: tuple[int, int], before: Numbers, queries: Numbers, tokens: slice
    ) -> StepRows:
        """Give requests whose V is fetched pages of the buffer, one behind the other."""
        size, device = self.block_size, self.context.device
        bases = np.concatenate([[0], np.cumsum(-(-(before + queries) // size))])[:-1]
        # Pages that hold something already: in the buffer, row and entry of the table.
        held = -(-before // size)
        of = np.repeat(np.arange(len(held)), held)
        entries = np.arange(len(of)) - np.repeat(np.cumsum(held) - held, held)
        places = np.stack([bases[of] + entries, rows.start + of, entries], axis=1)
        # Where the new tokens go.
        of = np.repeat(np.arange(len(queries)), queries)
        new = before[of] + np.arange(len(of)) - np.repeat(np.cumsum(queries) - queries, queries)
        slots = bases[of] * size + new
        return StepRows(
            *(rows.start, rows.stop, *most),
            table=self._columns + upload(bases.astype(np.int32), device)[:, None],
            places=upload(places.astype(np.int32), device) if len(places) else None,
            slots=upload(slots, device),
            tokens=tokens,
        )

    def _direct(
        self, rows: slice, most: tuple[int, int], chooses: npt.NDArray[np.bool_], queries: Numbers
    ) -> StepRows:
        """Return requests that read V where it lies."""
        device, top_ns = self.context.device, self._top_ns[rows]
        choosers = None
        if chooses.any():
            counts = np.where(chooses, queries, 0)
            of = np.repeat(np.arange(len(counts)), counts)
            index = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
            choosers = Choosers(
                upload(np.stack([of, index], axis=1).astype(np.int32), device),
                int(top_ns[chooses].max()),
                alone=bool(chooses.all()),
                workspace=self._workspace,
            )
        own = upload(np.ascontiguousarray(top_ns), device)
        return StepRows(*(rows.start, rows.stop, *most), top_ns=own, choosers=choosers)

    # Warm-up --------------------------------------------------------------------------------------

    def compile_kernels(self, call: AttentionInputs) -> None:
        """Launch all variants that a step may launch, on a made-up call (`CacheHooks`)."""
        batch, ops, device = call.batch, call.ops, call.query.device
        out = torch.empty_like(call.query)
        cache = self._caches[call.layer]
        values = self._buffer(0, call.value_cache)
        none = torch.full((1,), -1, dtype=torch.int64, device=device)
        new = self._new[0][:1]
        for target, scale in (
            (call.key_cache, batch.key_scale),
            (call.value_cache, batch.value_scale),
            (values, batch.value_scale),
        ):
            ops.write_rows(new, target, none, scale=scale)
        zeros = torch.zeros(1, 3, dtype=torch.int32, device=device)
        value_ops(ops).copy_pages(self._buffer(0, cache), cache, batch.block_table, zeros)
        table = self._columns[None]
        one = torch.ones(1, dtype=torch.int32, device=device)
        for most in (1, 2):  # with two there are kernels of prompts, too
            own = replace(batch, max_query_len=most)
            ops.paged_attention(out, own, call.softmax)
            apart = replace(own, value_cache=values, value_table=table)
            ops.paged_attention(out, apart, call.softmax)
            choosers = Choosers(zeros[:, :2].contiguous(), 1, workspace=self._workspace)
            value_ops(ops).topn_attention(
                out, own, call.softmax, one, renormalize=self.renormalize, choosers=choosers
            )
