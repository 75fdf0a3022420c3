# SPDX-License-Identifier: Apache-2.0
"""Generated tokens are thinned in groups, as they leave a sliding window.

                |<- tokens ->|<-        window        ->|
        ........[  leaving   ]...........[   newest     ]end

The attention that generated tokens are given is gathered (`accumulated/gather.py`). When a group
leaves the window, its best tokens are marked to stay and the others to go, once and for all; when
the others go is up to the selection, by whole blocks. The newest group begins with nothing, so that
when it leaves it will have been given something by the queries of the window behind it alone.

    --kv-policy pyramidinfer --kv-policy-args '{"schedule": "thin_generated"}'

A token's score is the mean attention of the window's queries to it, over all query heads. The best
of a group stay, one set for all heads of a layer, of equal ones the older. With the defaults the
lowest layer keeps 90 % and the highest 9 %, half on average, so the cache still grows with the
answer. With `fill_blocks` the others stay visible until they fill a block. The queries of the
window weigh alike; the paper says only that later ones weigh more. It costs one more pass over the
keys in each decode step, and 4 bytes a token, layer and KV head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_pyramid.methods.accumulated.gather import KeyMass
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import WorkerContext
from vllm_pyramid.step.step import Step
from vllm_pyramid.step.upload import upload

if TYPE_CHECKING:
    from vllm_pyramid.methods.thinning import RecentEnsembleScorer, ThinGeneratedSchedule
    from vllm_pyramid.policy.policy import Policy

# Marked keys have this mass, or minus it: whatever is added later is too small to
# change it, and the sum over all heads is still finite.
MARK = 2.0**100


class GeneratedMass(KeyMass):
    """Gathers for generated tokens, of which one set stays for all heads of all ranks."""

    asks_ranks: ClassVar[bool] = True

    def __init__(
        self,
        policy: Policy,
        scorer: RecentEnsembleScorer,
        schedule: ThinGeneratedSchedule,
        context: WorkerContext,
    ) -> None:
        super().__init__(policy, scorer, context)
        self.schedule, self.ranks = schedule, context.ranks

    def counts(self, step: Step) -> npt.NDArray[np.bool_]:
        return step.eviction_numbers > 0

    def shared(self, mass: torch.Tensor) -> torch.Tensor:
        """Return the sum over all heads of all ranks, in each head: `[S, G, T]`."""
        total = self.ranks.broadcast(self.ranks.all_reduce(mass.sum(dim=1, keepdim=True)))
        return total.repeat(1, mass.shape[1], 1)

    def after_attention(self, inputs: AttentionInputs) -> None:
        super().after_attention(inputs)
        evictions = self.context.step().evictions
        if evictions is None:
            return
        numbers = evictions.eviction_numbers
        past = np.flatnonzero(numbers > 1)
        if not past.size:
            return
        schedule = self.schedule
        groups = numbers[past] - 1 - schedule.gen_window // schedule.every
        winners = [
            schedule.kept_of_group(group, self.context.num_layers)[inputs.layer]
            if group > 0
            else -1
            for group in groups.tolist()
        ]
        batch = evictions.batch(inputs, self.policy, past)
        self.mark_group(batch, np.array(winners, np.int32))

    def mark_group(self, batch: EvictionBatch, winners: npt.NDArray[np.int32]) -> None:
        """Mark the group of tokens that leaves the window of each request.

        `winners`, `[S]`, says how many of the group stay; negative where none leaves.
        """
        tokens, ends = self.schedule.every, batch.lens
        columns = torch.arange(tokens, device=ends.device)
        heads = torch.arange(self.pages.shape[1], device=ends.device)[:, None]

        def slots(back: int, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            places = (ends[rows] - back)[:, None] + columns
            blocks = batch.tables[rows].gather(1, places // self.pages.shape[2]).long()
            return blocks[:, None], heads, (places % self.pages.shape[2])[:, None]

        leaving = np.flatnonzero(winners >= 0)
        if leaving.size:
            stay = upload(winners[leaving], ends.device)
            group = slots(self.schedule.gen_window + tokens, upload(leaving, ends.device))
            best_first = self.shared(self.pages[group]).argsort(stable=True, dim=2, descending=True)
            mark = torch.where(columns < stay[:, None], MARK, -MARK)
            marks = torch.empty(best_first.shape, device=ends.device)
            marks.scatter_(2, best_first, mark[:, None].expand_as(best_first))
            self.pages[group] = marks
        self.pages[slots(tokens, torch.arange(len(ends), device=ends.device))] = self._nothing
