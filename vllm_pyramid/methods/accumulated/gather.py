# SPDX-License-Identifier: Apache-2.0
"""What the queries so far gave each key, beside the cache, for scorers that accumulate it.

    every step    tokens written   their slots begin with nothing      `forget_slots`
                  attention        what its queries give is added      `add`
    an eviction   kept keys        scores from what was gathered       `scores`
                                   it moves along                      `moved`
                  or begins again                                      `after_eviction`

One number a block row and KV head, `[P, G, N]` float32 for the whole pool: a block belongs to one
layer at a time, so one tensor serves all layers. A block that changes hands needs no cleaning,
since the slot of every token that is written is set to zero.

Shape legend: P blocks, G KV heads, N tokens of a block, S requests that evict, M table entries,
L layers, R requests of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch, check_scores
from vllm_pyramid.step.hooks import WorkerHooks, WorkerSide
from vllm_pyramid.step.step import Step, StepEvictions
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.methods.accumulated import AccumulatingScorer
    from vllm_pyramid.policy.policy import Policy

# A position that no query reaches: the mass of such a request is not needed.
NO_QUERY = np.iinfo(np.int32).max


class KeyMass(WorkerHooks):
    """The gathered mass of all layers; one object a model runner.

    Attributes:
        pages: `[P, G, N]` float32.

    Raises:
        ValueError: layers have different numbers of KV heads; pages of equal size then hold
            different numbers of rows.
    """

    name = "accumulated"

    def __init__(self, policy: Policy, scorer: AccumulatingScorer, side: WorkerSide) -> None:
        self.policy, self.scorer, self.side = policy, scorer, side
        heads = {spec.num_kv_heads for spec in side.specs}
        if len(heads) > 1:
            raise ValueError(
                f"policy {policy.name!r} keeps a number for every row of a page, and the layers of "
                f"this model have pages of {sorted(heads)} KV heads: choose a policy whose scorer "
                "does not accumulate"
            )
        self._shape = heads.pop(), side.block_size
        self.pages = torch.empty(0)
        # A number of Python's would be copied to the device at each assignment, which waits for it.
        self._nothing = torch.zeros((), device=side.device)
        self.first_queries: npt.NDArray[np.int32] | None = None
        self._uploaded: torch.Tensor | None = None

    def bytes_beside_block(self) -> int:
        """See the base."""
        return 4 * self._shape[0] * self._shape[1]

    def allocate(self, num_blocks: int) -> None:
        """See the base."""
        self.pages = torch.empty(0)  # two generations never exist together
        with torch.inference_mode(False):
            self.pages = torch.zeros(num_blocks, *self._shape, device=self.side.device)

    def compile_kernels(self, call: AttentionInputs) -> None:
        """See the base."""
        if self.scorer.mass_kind is not None:
            self.first_queries, self._uploaded = np.zeros(1, np.int32), None
            self.after_attention(call)
            self.first_queries = None

    # Every step -----------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Work out from which query on the next eviction of each request looks."""
        inner = step.next_inner()
        past = np.maximum(step.numbers - step.inner, 0)  # evictions at the end and behind it
        point = step.prompt_lens + past * step.every
        looks = (past == 0) | (step.every > 0)
        if self.inside:
            point, looks = inner, inner >= 0
        elif (
            self.policy.inner_policy is not None and self.policy.inner_policy.scorer == self.scorer
        ):
            point = np.where(inner >= 0, inner, point)
        first = np.zeros_like(point)
        if self.scorer.history is not None:
            first = np.maximum(point - self.scorer.history, 0)
        looks = step.may_evict & looks & self.counts(step)
        self.first_queries = np.where(looks, first, NO_QUERY).astype(np.int32)
        self._uploaded = None
        step.wants_log_sum_exp = True  # saves the pass over K that would find it

    def counts(self, step: Step) -> npt.NDArray[np.bool_]:
        """Which requests of the step are gathered for: `[R]`."""
        return np.ones(len(step.numbers), bool)

    def after_write(self, layer: int, slots: torch.Tensor) -> None:
        """See the base: nothing has been given yet to the keys that are written."""
        block_size = self.pages.shape[2]
        slots = slots.clamp(min=0)  # block 0 is vLLM's null block: it is nobody's
        self.pages[slots // block_size, :, slots % block_size] = self._nothing

    def after_attention(self, call: AttentionInputs) -> None:
        """Add what the step's queries give."""
        if self.first_queries is None:
            return
        if self.scorer.mass_kind is None:
            self._observe(call)
            return
        if self._uploaded is None:
            self._uploaded = upload(self.first_queries, call.query.device)
        first_queries = self._uploaded
        if call.offsets is not None:
            requests = first_queries.shape[0]
            first_queries = call.seq_lens.new_zeros(call.seq_lens.shape[0])
            first_queries[:requests] = self._uploaded - call.offsets[:requests]
        call.ops.add_key_mass(
            self.pages,
            call.batch,
            call.softmax,
            kind=self.scorer.mass_kind,
            first_queries=first_queries,
            log_sum_exp=call.log_sum_exp,
        )

    def _observe(self, call: AttentionInputs) -> None:
        """The same without a kernel, one request after the other."""
        assert self.first_queries is not None
        step, block_size = self.side.step(), self.pages.shape[2]
        for row, first_query in enumerate(self.first_queries.tolist()):
            view = step.view(call, self.policy, row, first_query)
            if view is None:
                continue
            given = self.scorer.observe(view)
            check_scores(
                self.scorer.kind, given, view.num_kv_heads, view.num_tokens, self.scorer.asked
            )
            places = view.start + view.places
            blocks = view.block_row[places // block_size].long()
            self.pages[blocks, :, places % block_size] += given.T

    def end_step(self, step: Step) -> None:
        """Steps without requests gather nothing."""
        self.first_queries = None

    # An eviction ----------------------------------------------------------------------------------

    def scores(self, batch: EvictionBatch) -> torch.Tensor | None:
        """See the base."""
        if batch.policy.scorer != self.scorer:
            return None  # another one scores inside the prompt, or at its end
        entries = -(-batch.longest // self.pages.shape[2])
        return self.shared(self.gathered(batch.tables[:, :entries])) * self.scorer.sign

    def shared(self, mass: torch.Tensor) -> torch.Tensor:
        """What the heads of a layer choose by: `[S, G, T]` to the same; here each its own."""
        return mass

    def gathered(self, tables: torch.Tensor) -> torch.Tensor:
        """The mass of the tokens behind `tables`, `[S, M]`: `[S, G, M * N]`, a copy."""
        blocks = tables.long().clamp(0, self.pages.shape[0] - 1)  # stale behind the last token
        return self.pages[blocks].transpose(1, 2).flatten(2)

    def moved(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        """The kept rows have been compacted: their mass follows."""
        tables, lens, keeps = batch.tables, batch.lens, batch.keeps
        block_size = self.pages.shape[2]
        # Behind `keeps[r]` the last survivor is repeated: written twice, with the same number.
        # Where nothing survives, a row of block 0 is: it is nobody's.
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

    def after_eviction(self, call: AttentionInputs, evictions: StepEvictions) -> None:
        """Where sums begin again, nothing that was gathered of these requests counts any more."""
        if not self.scorer.starts_over:
            return
        batch = evictions.batch(call, self.policy, np.arange(len(evictions.request_ids)))
        columns = torch.arange(batch.tables.shape[1], device=batch.tables.device)
        own = columns * self.pages.shape[2] < batch.lens[:, None]
        # Block 0 is nobody's.
        self.pages[torch.where(own, batch.tables, 0).long()] = self._nothing
