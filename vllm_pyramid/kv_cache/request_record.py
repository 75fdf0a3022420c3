# SPDX-License-Identifier: Apache-2.0
"""The scheduler's record of a request: its terms, which stay, and what a preemption resets."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_pyramid.kv_cache.cache_store import Found
from vllm_pyramid.kv_cache.evicted_names import EvictedNames
from vllm_pyramid.plan import Plan, RetentionPlan
from vllm_pyramid.policy.request import ServedRequest


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What a request came with. A preemption does not change it.

    Attributes:
        plan: what every layer keeps; None for a request that keeps everything.
        shareable: leading tokens whose blocks the request may share; None: all.
        reusable: leading tokens that other requests may have computed; None: all.
        evicted: what names its KV behind its evictions; None: no other request finds that.
    """

    plan: Plan | None = None
    served: ServedRequest | None = None
    shareable: int | None = 0
    reusable: int | None = 0
    evicted: EvictedNames | None = None

    def suffix(self, end: int) -> bytes | None:
        """Return what the KV of the first `end` tokens depends on, apart from these tokens.

        It is empty if it is the full cache's KV; None if no other request may find it.
        """
        if self.reusable is None or end <= self.reusable:
            return b""
        return None if self.evicted is None else self.evicted.suffix(end)


@dataclass(slots=True)
class SchedulerRequest:
    """The record of a request: its terms, and its progress since it started or was preempted.

    Attributes:
        terms: what the request came with.
        plan: its plan now: that of `terms`, or what it has been ordered to keep since it started.
        found: what it could begin with, as last looked up, until it begins.
        query: tokens that it looked for in the tier below the pool, and found, until it begins.
        began: tokens that it began with, which were not computed.
        num_blocks: entries of its longest tables, null blocks included.
        tables: `[layers]` its tables in the layers' managers, once they have grown: looking all of
            them up again would cost more than a block for each.
        resolved: the plan by which the worker moved its survivors, once the worker has reported.
        confirmed: number of the latest eviction that the worker has reported.
        released: number of the latest eviction whose head has been given back.
        next_release_at: processed tokens at which its next head may go; None if none will.
    """

    terms: RequestTerms = RequestTerms()
    plan: Plan | None = None
    found: Found | None = None
    query: tuple[int, int] = (0, 0)
    began: int = 0
    num_blocks: int = 0
    tables: list[list[KVCacheBlock]] = field(default_factory=list)
    resolved: RetentionPlan | None = None
    confirmed: int = 0
    released: int = 0
    next_release_at: int | None = None

    @classmethod
    def at_start(cls, terms: RequestTerms) -> SchedulerRequest:
        """Make the record of a request that holds nothing: a new or a preempted one."""
        plan = terms.plan
        evicts = plan is not None and plan.evicts and not plan.waits_for_orders
        return cls(
            terms, plan, next_release_at=plan.exact_tokens if plan is not None and evicts else None
        )

    def begin_evicted(self, plan: RetentionPlan, tokens: int, num_blocks: int) -> None:
        """Begin as if the request had computed `tokens` tokens, and had evicted by then."""
        self.num_blocks, self.resolved = num_blocks, plan
        self.confirmed = self.released = plan.evictions_by(tokens)
        self.next_release_at = plan.next_eviction(tokens)

    @property
    def is_ordered(self) -> bool:
        """Whether it has been ordered to evict: what it computes since is not the full cache's."""
        return self.plan is not self.terms.plan
