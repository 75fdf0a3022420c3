# SPDX-License-Identifier: Apache-2.0
"""RazorAttention's compensation token: what a streaming head has dropped, as one key and one value.

    out of a lane    (Z out + N exp(q.k scale) v) / (Z + N exp(q.k scale))

Z and out are the softmax's sum and the attention over what the lane holds, k and v the means of the
N keys and values that it has dropped, as they stood in the cache (arXiv:2407.15891, section 3). No
row of a cache can say so, since the logarithm of N has to be added to one logit. So the token is
kept next to the cache, and merged into what the kernels return, out and the logarithm of Z.

A lane drops tokens at its evictions, which add them to its means. As many as it has dropped is its
skip, which is compared in every step. A request that comes again after a preemption has no skip and
no compensation tokens: its evictions make new ones.

Shape legend: R requests of the step, C of these that have dropped tokens, T tokens of the step, B
tokens that are merged at once, L layers of this worker, G KV heads, H query heads, D head size, E
places for requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.failures import METHOD, Failure
from vllm_pyramid.step.hooks import (
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    StepHooks,
    StepNeeds,
    WorkerContext,
)
from vllm_pyramid.step.step import Step

NAME = "compensation"
# Tokens of the step that are merged at once, and dropped tokens that are added at once: both take
# memory in addition to the cache.
MERGED_AT_ONCE, ADDED_AT_ONCE = 1024, 4096


class DroppedTokens:
    """The means of what the lanes of requests have dropped.

    Args:
        places: for requests, made when the first one drops tokens; as many again where requests
            that wait behind a preemption hold theirs still.

    Attributes:
        means: `[E, L, G, 2, D]` float32, mean key and mean value; zeros of a request's lanes that
            have dropped nothing.
        counts: `[E, L, G]` int64, the tokens that these are of.
    """

    def __init__(self, num_layers: int, kv_heads: int, head_size: int, places: int = 8) -> None:
        self._shape, self._more = (num_layers, kv_heads, 2, head_size), places
        self.means = torch.zeros(0, *self._shape)
        self.counts = np.zeros((0, num_layers, kv_heads), np.int64)
        self._places: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return the number of requests that have a place."""
        return len(self._places)

    def bytes_of(self, requests: int) -> int:
        """Return the bytes that a number of running requests take."""
        return requests * (4 * int(np.prod(self._shape)) + 8 * int(np.prod(self._shape[:2])))

    def place_of(self, request_id: str) -> int:
        """Return a request's place; -1: it has dropped nothing."""
        return self._places.get(request_id, -1)

    def forget(self, request_id: str) -> None:
        """Forget what a request has dropped."""
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place)

    def add(
        self, request_id: str, layer: int, head: int, sums: torch.Tensor, num_tokens: int
    ) -> None:
        """Add tokens that a lane drops.

        Args:
            sums: `[2, D]` float64, of their keys and of their values.
        """
        if (place := self.place_of(request_id)) < 0:
            place = self._new_place(request_id)
        before = int(self.counts[place, layer, head])
        lane = self.means[place, layer, head]
        lane.copy_((lane.double() * before + sums) / (before + num_tokens))
        self.counts[place, layer, head] = before + num_tokens

    def _new_place(self, request_id: str) -> int:
        if not self._free:
            count, more = len(self.means), self._more
            self.means = torch.cat([self.means, torch.zeros(more, *self._shape)])
            self.counts = np.concatenate(
                [self.counts, np.zeros((more, *self.counts.shape[1:]), np.int64)]
            )
            self._free = list(range(count, count + more))
        place = self._free.pop()
        self.means[place] = 0
        self.counts[place] = 0
        self._places[request_id] = place
        return place


@dataclass
class _StepTokens:
    """Which tokens of a step belong to requests that have dropped something.

    Attributes:
        log_counts: `[C, L, G]` float32, logarithms of the dropped tokens' numbers, -inf of none.
        drops: `[L]` bool, whether any lane of a layer has dropped tokens.
        parts: rows of the step, rows among the C, and places of the tokens, `[B]` int64 each.
    """

    log_counts: torch.Tensor
    drops: npt.NDArray[np.bool_]
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @classmethod
    def of(
        cls, step: Step, rows: list[int], places: list[int], counts: npt.NDArray[np.int64]
    ) -> _StepTokens:
        """Find the tokens of the requests `rows`, `[C]`, with their places and counts."""
        scheduled = step.scheduled.astype(np.int64)
        ends = scheduled.cumsum()
        lens = scheduled[rows]
        owners = np.repeat(np.arange(len(rows)), lens)
        within = np.arange(len(owners)) - np.repeat(lens.cumsum() - lens, lens)
        tokens = torch.from_numpy((ends[rows] - lens)[owners] + within)
        of_rows = torch.from_numpy(owners)
        of_places = torch.tensor(places)[of_rows]
        with np.errstate(divide="ignore"):
            log_counts = torch.from_numpy(np.log(counts).astype(np.float32))
        size = MERGED_AT_ONCE
        parts = zip(tokens.split(size), of_rows.split(size), of_places.split(size), strict=True)
        return cls(log_counts, np.asarray((counts > 0).any(axis=(0, 2))), list(parts))


class Compensation(CacheHooks, StepHooks, LayerHooks, EvictionHooks):
    """Keeps the compensation tokens of all requests and lanes; one object a worker.

    Attributes:
        dropped: what they stand for.
    """

    name = NAME

    def __init__(self, context: WorkerContext) -> None:
        # Specs of lanes are of a single head: the model says how many there are.
        spec, config = context.specs[0], context.config
        self._kv_heads = config.model_config.get_num_kv_heads(config.parallel_config)
        self._requests = config.scheduler_config.max_num_seqs
        self.dropped = DroppedTokens(
            len(context.specs), self._kv_heads, spec.head_size, self._requests
        )
        self._tokens: _StepTokens | None = None

    def bytes_of_buffers(self) -> int:
        return self.dropped.bytes_of(self._requests)

    # Every step -----------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> StepNeeds | None:
        """Find the tokens that see a compensation token; requests without an eviction have none.

        A request whose lanes have not dropped what its plan says has failed.
        """
        self._tokens = None
        rows: list[int] = []
        places: list[int] = []
        for row, request in enumerate(step.requests):
            name = request.request_id
            if step.eviction_numbers[row] == 0:
                self.dropped.forget(name)  # preempted, and computed again
                continue
            skips, place = step.skips[:, row], self.dropped.place_of(name)
            if not skips.any() or name in step.failures.of:
                continue
            if place < 0 or (self.dropped.counts[place].ravel() != skips).any():
                found = 0 if place < 0 else self.dropped.counts[place].sum()
                reason = f"compensation tokens stand for {found} dropped tokens of {skips.sum()}"
                step.failures.add([name], Failure(METHOD, f"{reason}; report this"))
                continue
            rows.append(row)
            places.append(place)
        if not rows:
            return None
        self._tokens = _StepTokens.of(step, rows, places, self.dropped.counts[places])
        return StepNeeds(wants_log_sum_exp=True)

    def correct_attention(self, inputs: AttentionInputs, out: torch.Tensor) -> None:
        """Merge the compensation tokens into the attention of the requests that have one."""
        found, layer = self._tokens, inputs.layer
        if found is None or not found.drops[layer]:
            return
        log_sum_exp, softmax = inputs.log_sum_exp, inputs.softmax
        assert log_sum_exp is not None, "begin_step asks for it"
        log_counts = found.log_counts[:, layer]
        for tokens, rows, places in found.parts:
            means = self.dropped.means[places, layer]
            out[tokens] = merged(
                out[tokens],
                log_sum_exp[tokens],
                inputs.query[tokens],
                means[:, :, 0],
                means[:, :, 1],
                log_counts[rows],
                softmax.scale * inputs.key_scale,
                softmax.soft_cap,
            )

    def end_step(self, step: Step) -> None:
        """Merge nothing in steps without requests, which do not begin."""
        self._tokens = None

    def forget(self, request_id: str) -> None:
        self.dropped.forget(request_id)

    # An eviction ----------------------------------------------------------------------------------

    def before_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        """Add what a lane is about to drop to the means of its requests."""
        layer, head = divmod(batch.call.layer, self._kv_heads)
        for row, name in enumerate(batch.request_ids):
            start, end = int(batch.host_dead_prefixes[row]), int(batch.host_lens[row])
            is_dropped = torch.ones(end, dtype=torch.bool)
            is_dropped[:start] = False
            is_dropped[kept[row, 0, : int(batch.host_keeps[row])].long()] = False
            places = is_dropped.nonzero()[:, 0]
            sums = _sums(batch, batch.tables[row], places)
            self.dropped.add(name, layer, head, sums, len(places))


def _sums(batch: EvictionBatch, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sums of some tokens' keys and values, `[2, D]` float64.

    Args:
        table: `[M]`, of one lane. places: `[n]` int64, of the tokens in it.
    """
    caches = batch.call.key_cache, batch.call.value_cache
    size = caches[0].shape[2]
    sums = torch.zeros(2, caches[0].shape[3], dtype=torch.float64)
    for part in places.split(ADDED_AT_ONCE):
        blocks, rows = table[part // size].long(), part % size
        for index, cache in enumerate(caches):
            sums[index] += cache[blocks, 0, rows].sum(dim=0, dtype=torch.float64)
    return sums


def merged(
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_counts: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Return attention to what it was and to one more key, which counts several times.

    Args:
        out: `[B, H, D]`, the attention to the others. log_sum_exp: `[B, H]` float32, of them.
        query: `[B, H, D]`. key, value: `[B, G, D]` float32, the further key and its value.
        log_counts: `[B, G]` float32, how often it counts; with -inf `out` stays as it is.
        scale: of the logits. soft_cap: as of `Softmax`.

    Returns:
        `[B, H, D]` in the type of `out`.
    """
    heads = key.shape[1]
    of_heads = query.float().unflatten(1, (heads, -1))
    logits = (of_heads @ key[..., None]).squeeze(-1) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    share = torch.sigmoid(logits + log_counts[..., None] - log_sum_exp.unflatten(1, (heads, -1)))
    before = out.float().unflatten(1, (heads, -1))
    return torch.lerp(before, value[:, :, None], share[..., None]).flatten(1, 2).to(out.dtype)
