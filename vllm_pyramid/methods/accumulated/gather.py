# SPDX-License-Identifier: Apache-2.0
"""A pool of what the queries so far gave each key, for scorers that accumulate it.

    every step    tokens are written   their sums begin at zero          `after_write`
                  a layer attends      what its queries give is added    `after_attention`
    an eviction   scores               are what was gathered             `score`
                  keys move            the sums move along               `after_compact`
                                       or begin again at zero            `after_eviction`

The pool, `[P, G, N]` float32, serves all layers: a block belongs to one layer at a time. A block
that is given to another request needs no cleaning, since the sum of every token that is written is
set to zero. Where prompts stay (`schedule.prompt: keep`), the sums of their keys are not read:
several requests may share these blocks, and write to their sums at once.

Shape legend: P blocks, G KV heads, N tokens of a block, S requests that evict, M table entries, L
layers, R requests of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.methods.accumulated.kernels import mass_ops
from vllm_pyramid.methods.next_evictions import next_evictions
from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite
from vllm_pyramid.step.eviction_batch import EvictionBatch, check_scores
from vllm_pyramid.step.hooks import (
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    StepHooks,
    StepNeeds,
    WorkerContext,
)
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.step_evictions import StepEvictions
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.methods.accumulated import AccumulatingScorer
    from vllm_pyramid.policy.policy import Policy

# A position that no query reaches: the mass of such a request is not needed.
NO_QUERY = np.iinfo(np.int32).max


class KeyMass(CacheHooks, StepHooks, LayerHooks, EvictionHooks):
    """The gathered mass of all layers, `pages` `[P, G, N]` float32; one object a worker.

    ValueError: layers have different numbers of KV heads.
    """

    name = "accumulated"

    def __init__(self, policy: Policy, scorer: AccumulatingScorer, context: WorkerContext) -> None:
        self.policy, self.scorer, self.context = policy, scorer, context
        self.inside = context.inside
        heads = {spec.num_kv_heads for spec in context.specs}
        if len(heads) > 1:
            raise ValueError(
                f"policy {policy.name!r} keeps a number for every row of a page, and the layers of "
                f"this model have pages of {sorted(heads)} KV heads: choose a policy whose scorer "
                "does not accumulate"
            )
        self._shape = heads.pop(), context.block_size
        self.pages = torch.empty(0)
        # A number of Python's would be copied to the device at each assignment, which waits for it.
        self._nothing = torch.zeros((), device=context.device)
        self.first_queries: npt.NDArray[np.int32] | None = None
        self._uploaded: torch.Tensor | None = None

    def bytes_per_block(self) -> int:
        return 4 * self._shape[0] * self._shape[1]

    def allocate(self, num_blocks: int) -> None:
        self.pages = torch.empty(0)  # two generations never exist together
        with torch.inference_mode(False):
            self.pages = torch.zeros(num_blocks, *self._shape, device=self.context.device)

    def compile_kernels(self, inputs: AttentionInputs) -> None:
        if self.scorer.mass_kind is not None:
            self.first_queries, self._uploaded = np.zeros(1, np.int32), None
            self.after_attention(inputs)
            self.first_queries = None

    def begin_step(self, step: Step) -> StepNeeds:
        """Find the first query to which the next eviction of each request looks back."""
        point, looks = next_evictions(step, self.policy, self.scorer, inside=self.inside)
        first = np.zeros_like(point)
        if self.scorer.history is not None:
            first = np.maximum(point - self.scorer.history, 0)
        if self.policy.schedule.keeps_prompts:
            first = np.maximum(first, step.prompt_lens)  # others give nothing to what may go
        looks &= self.counts(step)
        self.first_queries = np.where(looks, first, NO_QUERY).astype(np.int32)
        self._uploaded = None
        return StepNeeds(wants_log_sum_exp=True)  # saves the pass over K that would find it

    def counts(self, step: Step) -> npt.NDArray[np.bool_]:
        return np.ones(len(step.eviction_numbers), bool)

    def after_write(self, write: CacheWrite) -> None:
        """Set the sums of the written keys to zero: no query has seen them yet."""
        block_size = self.pages.shape[2]
        slots = write.slots.clamp(min=0)  # block 0 is vLLM's null block: no request reads it
        self.pages[slots // block_size, :, slots % block_size] = self._nothing

    def after_attention(self, inputs: AttentionInputs) -> None:
        if self.first_queries is None:
            return
        if self.scorer.mass_kind is None:
            self._observe(inputs)
            return
        if self._uploaded is None:
            self._uploaded = upload(self.first_queries, inputs.query.device)
        first_queries = self._uploaded
        if inputs.offsets is not None:
            requests = first_queries.shape[0]
            first_queries = inputs.seq_lens.new_zeros(inputs.seq_lens.shape[0])
            first_queries[:requests] = self._uploaded - inputs.offsets[:requests]
        mass_ops(inputs.ops).add_key_mass(
            self.pages,
            inputs.batch,
            inputs.softmax,
            kind=self.scorer.mass_kind,
            first_queries=first_queries,
            log_sum_exp=inputs.log_sum_exp,
        )

    def _observe(self, inputs: AttentionInputs) -> None:
        """Add what the scorer's own `observe` returns, one request after the other.

        NaN that is added is found when the request comes to an eviction.
        """
        assert self.first_queries is not None
        step, block_size = self.context.step(), self.pages.shape[2]
        for row, first_query in enumerate(self.first_queries.tolist()):
            view = step.scorer_inputs(inputs, self.policy, row, first_query)
            if view is None:
                continue
            try:
                parts = view.parts() if self.scorer.in_parts else [view]
                given = torch.cat([self.scorer.observe(part) for part in parts])
                check_scores(
                    self.scorer.kind, given, view.num_kv_heads, view.num_tokens, self.scorer.asked
                )
            except Exception as error:
                names = [step.requests[row].request_id]
                step.failures.add_error(names, f"the scorer {self.scorer.kind!r}", error)
                continue
            places = view.start + view.places
            blocks = view.block_row[places // block_size].long()
            self.pages[blocks, :, places % block_size] += given.T

    def end_step(self, step: Step) -> None:
        """Gather nothing in steps without requests, which do not begin."""
        self.first_queries = None

    def score(self, batch: EvictionBatch) -> torch.Tensor | None:
        if batch.policy.scorer != self.scorer:
            return None  # another scorer has evictions inside the prompt, or at its end
        entries = -(-batch.longest // self.pages.shape[2])
        mass = self.gathered(batch.tables[:, :entries])
        if self.policy.schedule.keeps_prompts:
            # Others may have written there, a request with NaN among them.
            starts = batch.evictions.prompt_lens[batch.shortened] + batch.host_dead_prefixes
            columns = torch.arange(mass.shape[2], device=mass.device)
            mass.masked_fill_((columns < upload(starts, mass.device)[:, None])[:, None], 0.0)
        return self.shared(mass) * self.scorer.sign

    def shared(self, mass: torch.Tensor) -> torch.Tensor:
        """Return what the heads of a layer choose by, `[S, G, T]` to the same: each its own."""
        return mass

    def gathered(self, tables: torch.Tensor) -> torch.Tensor:
        """Return the mass of the tokens behind `tables`, `[S, M]`: `[S, G, M * N]`, a copy."""
        blocks = tables.long().clamp(0, self.pages.shape[0] - 1)  # stale behind the last token
        return self.pages[blocks].transpose(1, 2).flatten(2)

    def after_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        """Move the mass of the kept keys to where these have moved; of those in place it stays."""
        kept, keeps, _ = batch.moving(kept)
        tables, lens = batch.tables, batch.lens
        block_size = self.pages.shape[2]
        # Behind `keeps[r]` the last survivor is repeated: written twice, with the same number.
        # Where nothing survives, a row of block 0 is written: no request reads it.
        index = torch.arange(kept.shape[2], device=kept.device)
        index = index.minimum((keeps - 1)[:, None]).clamp_(min=0)
        target = ((lens - keeps)[:, None] + index).minimum((lens - 1)[:, None])
        source = kept.gather(2, index[:, None].expand_as(kept)).long().clamp_(min=0)
        heads = torch.arange(kept.shape[1], device=kept.device)[:, None]
        survives = (keeps > 0)[:, None, None]
        blocks = torch.where(survives, tables.gather(1, target // block_size)[:, None], 0).long()
        rows = (target % block_size)[:, None]
        old = tables.gather(1, (source // block_size).flatten(1)).long().view_as(source)
        self.pages[blocks, heads, rows] = self.pages[old, heads, source % block_size]

    def after_eviction(self, inputs: AttentionInputs, evictions: StepEvictions) -> None:
        """Set the sums of requests that have come to an eviction to zero, if the scorer says so."""
        if not self.scorer.starts_over:
            return
        batch = evictions.batch(inputs, self.policy, np.arange(len(evictions.request_ids)))
        columns = torch.arange(batch.tables.shape[1], device=batch.tables.device)
        own = columns * self.pages.shape[2] < batch.lens[:, None]
        # No request reads block 0.
        self.pages[torch.where(own, batch.tables, 0).long()] = self._nothing
