# SPDX-License-Identifier: Apache-2.0
"""What the queries so far gave each key, beside the cache, for policies that accumulate it.

    every step    tokens written   their slots begin with nothing      `forget`
                  attention        what its queries give is added      `add`
    an eviction   a group leaves   who of it stays is settled          `settle_group`
                  kept keys        scores from what was gathered       `select`
                                   it moves along                      `move`
                  or begins again                     `start_over`

One number a block row and KV head, `[P, G, N]` float32 for the whole pool: a block belongs to one
layer at a time, so one tensor serves all layers. A block that changes hands needs no cleaning,
since the slot of every token that is written is set to zero.

Shape legend: P blocks, G KV heads, N tokens of a block, S requests that evict, M table entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_pyramid.policy.plans import Plan, RetentionPlan
from vllm_pyramid.policy.scorers import AccumulatingScorer
from vllm_pyramid.worker.upload import upload

if TYPE_CHECKING:  # it imports what imports this
    from vllm_pyramid.worker.solve import Ranks


# Settled keys have this mass, or minus it: whatever is added later vanishes beside it, and the sum
# over all heads is still finite.
SETTLED = 2.0**100


class KeyMass:
    """The gathered mass of all layers; one object a model runner.

    Attributes:
        pages: `[P, G, N]` float32.

    Args:
        scorer: says what is gathered. num_blocks: P. num_kv_heads: G, of every layer on this rank.
        block_size: N. device: of the cache.
        ranks: that share the heads, where one set is chosen for all heads; None: each its own.
    """

    def __init__(
        self,
        scorer: AccumulatingScorer,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.scorer = scorer
        self.ranks = ranks
        with torch.inference_mode(False):
            self.pages = torch.zeros(num_blocks, num_kv_heads, block_size, device=device)

    @staticmethod
    def bytes_per_block(num_kv_heads: int, block_size: int) -> int:
        """Device memory beside each block of the cache."""
        return 4 * num_kv_heads * block_size

    def forget(self, slot_mapping: torch.Tensor) -> None:
        """Tokens are written to these slots, `[T]` int64; negative ones are padding."""
        block_size = self.pages.shape[2]
        slots = slot_mapping.clamp(min=0)  # block 0 is vLLM's null block: it is nobody's
        self.pages[slots // block_size, :, slots % block_size] = 0.0

    def add(self, ops: ModuleType, *inputs: torch.Tensor, **options: Any) -> None:
        """Add what the step's queries give; arguments as of `ops.add_key_mass`."""
        ops.add_key_mass(self.pages, *inputs, kind=self.scorer.mass_kind, **options)

    def select(
        self,
        ops: ModuleType,
        plans: Sequence[Plan],
        layer: int,
        tables: torch.Tensor,
        lens: torch.Tensor,
        deads: torch.Tensor,
        keeps: torch.Tensor,
        *,
        max_keep: int,
    ) -> torch.Tensor:
        """Which tokens each KV head keeps: the front, the most recent, and the best of the rest.

        Args:
            plans: S settled plans. layer: index in them.
            tables: `[S, M]` int32 from the layer's first block on, all of their tokens.
            lens: `[S]` int32, tokens there.
            deads: `[S]` int32, the first of them that are no more. keeps: `[S]` int32.

        Returns:
            `[S, G, max_keep]` int32 as `ops.select`.
        """
        scores = self._shared(self.gather(tables)) * self.scorer.sign
        device, columns = scores.device, torch.arange(scores.shape[2], device=scores.device)
        protected = np.empty((2, len(plans)), np.int32)
        for index, plan in enumerate(plans):
            assert isinstance(plan, RetentionPlan)
            protected[:, index] = plan.front[layer], plan.recent[layer]
        # More than there is to keep cannot be protected: the most recent go first.
        fronts, recents = upload(protected, device)
        recents = recents.minimum(keeps)
        fronts = fronts.minimum(keeps - recents)
        alive = columns >= deads[:, None]
        certain = (columns < (deads + fronts)[:, None]) | (columns >= (lens - recents)[:, None])
        scores.masked_fill_((alive & certain)[:, None], torch.inf)
        scores.masked_fill_(~alive[:, None], -torch.inf)
        kept: torch.Tensor = ops.select(scores, lens, keeps, window=0, max_keep=max_keep)
        return kept

    def start_over(self, tables: torch.Tensor, lens: torch.Tensor) -> None:
        """Nothing that was gathered of the requests with these tables counts any more.

        Args: as of `select`; of all requests that come to an eviction, shortened or not.
        """
        columns = torch.arange(tables.shape[1], device=tables.device)
        own = columns * self.pages.shape[2] < lens[:, None]
        self.pages[torch.where(own, tables, 0).long()] = 0.0  # block 0 is nobody's

    def settle_group(
        self,
        tables: torch.Tensor,
        ends: torch.Tensor,
        winners: torch.Tensor,
        *,
        tokens: int,
        window: int,
    ) -> None:
        """A group of tokens leaves the recent window: its best are to stay, the others to go.

                    |<- tokens ->|<-        window        ->|
            ........[  leaving   ]...........[   newest     ]end

        Both are marked once and for all; when the others go is up to `select`, by whole blocks.
        The newest group begins with nothing here, so that when it leaves it will have been given
        something by the queries of the window behind it alone, all of them.

        Args:
            tables: `[S, M]` int32. ends: `[S]` int32, one behind the last token in them.
            winners: `[S]` int32, how many of the leaving group stay; negative where none leaves.
            tokens: of a group. window: a multiple of it.
        """
        columns = torch.arange(tokens, device=ends.device)
        heads = torch.arange(self.pages.shape[1], device=ends.device)[:, None]

        def slots(back: int, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            places = (ends[rows] - back)[:, None] + columns
            blocks = tables[rows].gather(1, places // self.pages.shape[2]).long()
            return blocks[:, None], heads, (places % self.pages.shape[2])[:, None]

        leaving = torch.nonzero(winners >= 0)[:, 0]
        if leaving.numel():
            group = slots(window + tokens, leaving)
            best_first = self._shared(self.pages[group]).argsort(
                stable=True, dim=2, descending=True
            )
            mark = torch.where(columns < winners[leaving][:, None], SETTLED, -SETTLED)
            marks = torch.empty(best_first.shape, device=ends.device)
            marks.scatter_(2, best_first, mark[:, None].expand_as(best_first))
            self.pages[group] = marks
        self.pages[slots(tokens, torch.arange(len(ends), device=ends.device))] = 0.0

    def _shared(self, mass: torch.Tensor) -> torch.Tensor:
        """`[S, G, T]`: the sum over all heads of all ranks, where they keep one set."""
        if self.ranks is None:
            return mass
        total = self.ranks.of_the_first(self.ranks.add_up(mass.sum(dim=1, keepdim=True)))
        return total.repeat(1, mass.shape[1], 1)

    def gather(self, tables: torch.Tensor) -> torch.Tensor:
        """The mass of the tokens behind `tables`, `[S, M]`: `[S, G, M * N]`, a copy."""
        blocks = tables.long().clamp(0, self.pages.shape[0] - 1)  # stale behind the last token
        return self.pages[blocks].transpose(1, 2).flatten(2)

    def move(
        self,
        tables: torch.Tensor,
        kept: torch.Tensor,
        lens: torch.Tensor,
        keeps: torch.Tensor,
    ) -> None:
        """The kept rows have been compacted: their mass follows.

        Args: as of `ops.compact`.
        """
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
