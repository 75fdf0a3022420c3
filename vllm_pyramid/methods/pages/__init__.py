# SPDX-License-Identifier: Apache-2.0
"""Select instead of evict: keep every token, and read the pages that a query asks for.

    a page is written    its summary is made from its keys                 `after_write`
    a prompt attends     to everything
    a token behind it    scores the summaries, and each KV head reads      `before_attention`
                         its best pages, the first, and the latest
    an eviction          moves keys; their new pages are summarised        `after_compact`
    blocks are copied    summaries are copied with them                    `copy_blocks`

It saves time, not memory; with a policy that evicts it saves both. `worker.py` does this.

Settings, page scorers, costs and what was measured: docs/select.md.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PlainSerializer, PlainValidator, SerializeAsAny

from vllm_pyramid.plan import Budget, IntArray
from vllm_pyramid.plan.cache import cached_by_bytes
from vllm_pyramid.policy.allocator import Allocator, CurveAllocator
from vllm_pyramid.policy.attend import ALL_PAGES, ATTEND_KEY, Attend
from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.component import BlockExtras
from vllm_pyramid.policy.kinds import parse_component, parsed_by
from vllm_pyramid.policy.limits import CACHE_BYTES
from vllm_pyramid.policy.page_scorer import PageScorer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import LayerSpec, SchedulerHooks, WorkerContext, WorkerHooks


class SpreadScorer(PageScorer):
    """Read the pages whose keys lie towards the query on average, or spread that way.

    The summary is the mean and the standard deviation of the page's keys in each channel; the
    product is q . mean + |q| . deviation. It finds single tokens that a mean hides, and is not
    misled by channels whose extremes come from different keys, as a box is.
    """

    kind: Literal["spread"] = "spread"
    rows: ClassVar[int] = 2
    summary_kind: ClassVar[str | None] = "spread"
    score_kind: ClassVar[str] = "spread"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([keys.mean(dim=2), keys.std(dim=2, correction=0)], dim=-1)

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([query, query.abs()], dim=-1)


class BoxScorer(PageScorer):
    """Quest: read the pages whose keys may have the largest product with the query.

    The summary is the greatest and the least number of the page's keys in each channel; their
    product with the query's positive and negative part is never below that of any key of the page
    (arXiv:2406.10774, section 3.3 and algorithm 1; ArkVale has the same bound, in host memory).
    """

    kind: Literal["box"] = "box"
    rows: ClassVar[int] = 2
    summary_kind: ClassVar[str | None] = "box"
    score_kind: ClassVar[str] = "box"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([keys.amax(dim=2), keys.amin(dim=2)], dim=-1)

    def extend(self, query: torch.Tensor) -> torch.Tensor:
        from torch import cat

        return cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)


_LAST = 2**31


class SelectPages(Attend):
    """Attend to the best pages of the cache, behind the prompt.

    Attributes:
        budget: mean tokens that a query reads in a layer that selects, sinks and recent tokens
            included: a number, or a share of the prompt; `100%` reads everything. In whole pages,
            rounded up, and the same while an answer grows.
        min_tokens: the least that a share comes to.
        scorer: chooses the pages, see `PageScorer`.
        allocator: divides the budget between the layers that select.
        dense_layers: number of the lowest layers, which attend to everything.
        sinks: first tokens of what is held that are always read, in whole pages.
        recent: tokens before a query's own page that are always read, in whole pages.
        min_context: queries at earlier positions attend to everything: short contexts gain nothing.
        combine: how the weights of the query heads of a KV head are combined.
    """

    kind: Literal["pages"] = "pages"
    budget: Annotated[
        Budget, PlainValidator(Budget.parse), PlainSerializer(lambda budget: budget.value)
    ] = Budget.parse("12%")
    min_tokens: int = Field(default=256, ge=0, lt=_LAST)
    scorer: Annotated[SerializeAsAny[PageScorer], parsed_by(PageScorer)] = Field(
        default_factory=SpreadScorer
    )
    allocator: Annotated[SerializeAsAny[Allocator], parsed_by(Allocator)] = Field(
        default_factory=partial(parse_component, Allocator, "uniform")
    )
    dense_layers: int = Field(default=2, ge=0, lt=_LAST)
    sinks: int = Field(default=16, ge=0, lt=_LAST)
    recent: int = Field(default=64, ge=0, lt=_LAST)
    min_context: int = Field(default=0, ge=0, lt=_LAST)
    combine: Literal["mean", "max"] = "mean"

    selects: ClassVar[bool] = True
    attends: ClassVar[bool] = True
    max_recomputed: ClassVar[int] = 256

    # What is read -------------------------------------------------------------------------------

    @property
    def min_budget(self) -> int:
        """The smallest budget in tokens: sinks, recent tokens and one to choose."""
        return self.sinks + self.recent + 1

    def sink_pages(self, block_size: int) -> int:
        return -(-self.sinks // block_size)

    def recent_pages(self, block_size: int) -> int:
        """Return how many last pages are always read, the query's own included."""
        return 1 + -(-self.recent // block_size)

    def pages(self, prompt_len: int, num_layers: int, block_size: int) -> IntArray:
        return _pages_of(self, prompt_len, num_layers, block_size)

    @cached_property
    def num_bytes(self) -> int:
        return 10 * len(self.model_dump_json())

    # Answers of a part --------------------------------------------------------------------------

    @property
    def attends_in_graphs(self) -> bool:
        return self.scorer.has_kernels

    @property
    def approximates_answers(self) -> bool:
        return True

    @property
    def unsupported(self) -> Unsupported:
        return {
            Feature.KV_TURNS: (
                "its answers attend to selected pages, so a resumed answer would not be the one "
                "that is computed again"
            ),
            Feature.SCALED_CACHE: "summaries of pages know one scale a layer",
            (Feature.DRAFTS, Feature.CUDA): (
                "pages are chosen by the host's word of each token's position, which drafts make "
                "wrong there"
            ),
        }

    def check(self, policy: Policy) -> None:
        if not isinstance(self.allocator, CurveAllocator):
            raise ValueError(
                f"policy {policy.name!r}: attend.allocator {self.allocator.kind!r} does not divide "
                "a number of tokens; choose uniform, arithmetic or shares"
            )
        self.check_own_budget(self.budget)
        reason = None
        if any(part.works_in_every_step for part in policy.parts):
            reason = (
                "gathers scores or evicts in every step, and a key that is not read gets no "
                "score: choose a policy that evicts at the prompt's end"
            )
        elif policy.allocator.thins_prompts or policy.allocator.defers:
            reason = (
                f"has the allocator {policy.allocator.kind!r}, with which selecting was not tried: "
                "choose uniform or arithmetic"
            )
        elif policy.evicts and not policy.fill_blocks:
            reason = (
                "has fill_blocks false, and the first page of a layer would be summarised with "
                "keys that were evicted: leave it out"
            )
        elif not policy.copies_blocks:
            reason = "keeps V in host memory (values: host), which is read by the key, not the page"
        if reason is not None:
            raise ValueError(
                f"policy {policy.name!r} selects pages (attend: pages), and {reason}; or leave "
                "the section attend out"
            )

    def check_own_budget(self, budget: Budget) -> None:
        if budget.tokens is not None and budget.tokens < self.min_budget:
            raise ValueError(
                f"an attention budget of {budget.tokens} tokens is too small: {self.sinks} sinks "
                f"and {self.recent} recent tokens are always read, and at least one is chosen; "
                f"give at least {self.min_budget}"
            )

    def check_layers(self, num_layers: int) -> None:
        if self.dense_layers >= num_layers:
            raise ValueError(
                f"attend: {self.dense_layers} layers attend to everything (dense_layers), and the "
                f"model has {num_layers}: nothing would be selected; lower `dense_layers`"
            )
        self.allocator.check_layers(num_layers - self.dense_layers)

    def check_config(self, policy: Policy, config: VllmConfig) -> None:
        if ":" not in self.scorer.kind:
            return
        from vllm_pyramid.methods.pages.summaries import try_scorer

        model, parallel = config.model_config, config.parallel_config
        try_scorer(
            self.scorer,
            model.get_num_attention_heads(parallel),
            model.get_num_kv_heads(parallel),
            model.get_head_size(),
            config.cache_config.block_size,
        )

    def for_request(self, keys: dict[str, Any]) -> SelectPages:
        budget = keys.pop(ATTEND_KEY, None)
        if budget is None:
            return self
        self.check_own_budget(budget)
        return self.model_copy(update={"budget": budget})

    def block_extras(self, layer: LayerSpec) -> BlockExtras:
        """Return the size of a summary; numbers of one byte are summarised in two."""
        number = max(layer.dtype.itemsize, 2)
        num_bytes = self.scorer.rows * layer.num_kv_heads * layer.head_size * number
        made_by = self.model_dump(mode="json", include={"scorer", "dense_layers"})
        return BlockExtras(num_bytes, made_by)

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.pages.worker import PageSelector

        return PageSelector(policy, self, context)

    def scheduler_hooks(self, policy: Policy, num_layers: int) -> SchedulerHooks | None:
        from vllm_pyramid.methods.pages.reads import PageReads

        return PageReads()


@cached_by_bytes(CACHE_BYTES)
def _pages_of(
    selection: SelectPages, prompt_len: int, num_layers: int, block_size: int
) -> IntArray:
    """Return `SelectPages.pages`; cached, not to be written to."""
    pages = np.full(num_layers, ALL_PAGES, np.int32)
    budget, first = selection.budget, selection.dense_layers
    if budget.percent == 100 or first >= num_layers:
        return pages
    mean = budget.tokens
    if mean is None:
        share = budget.tokens_for(prompt_len, 0)
        mean = max(share, selection.min_tokens, selection.min_budget)
    fixed = selection.sinks + selection.recent
    assert isinstance(selection.allocator, CurveAllocator)
    capacity = max(prompt_len, mean)
    chosen = selection.allocator.allocate(mean - fixed, num_layers - first, capacity - fixed)
    least = selection.sink_pages(block_size) + selection.recent_pages(block_size) + 1
    pages[first:] = np.maximum(-(-(chosen + fixed) // block_size), least)
    pages.flags.writeable = False
    return pages
