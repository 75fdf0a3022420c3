# SPDX-License-Identifier: Apache-2.0
"""The scheduler's record of a request: its terms, which stay, and what a preemption resets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.kv_cache.session_cache import Conversation, SessionSnapshot
from vllm_pyramid.plan import Plan, RetentionPlan
from vllm_pyramid.policy.attend import Attend
from vllm_pyramid.policy.kept_spans import Spans


class PendingPrefixCopy(NamedTuple):
    """Reserved blocks to which the workers copy what an eviction is about to overwrite.

    Attributes:
        first: number of the first bundle that is copied.
        hashes: the hashes of the bundles from there to the prompt's end.
        reserved: the reserved blocks.
    """

    first: int
    hashes: list[BlockHash]
    reserved: BlockBundle


class SessionToSave(NamedTuple):
    """A session that is saved when the request's blocks are freed.

    Attributes:
        request: the request.
        conversation: its conversation.
        plan: its plan.
        number: the eviction behind which the session is.
        tokens: computed tokens.
    """

    request: Request
    conversation: Conversation
    plan: RetentionPlan
    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What a request came with. A preemption does not change it.

    Attributes:
        plan: what every layer keeps; None for a request that keeps everything.
        policy: the policy's name.
        min_tokens: the floor of a percentage budget; None without a percentage or a floor.
        shareable: leading tokens whose blocks the request may share; None: all.
        reusable: leading tokens that other requests may have computed; None: all.
        conversation: the conversation that the request belongs to; None without one.
        keep: spans of the prompt that stay in every layer.
        attend: which pages generated tokens read; None: all that are held.
        sparse_tokens: leading tokens that are computed in tiles (`Prefill.sparse_tokens`).
        cache_key: what names its cached KV in addition to the tokens.
    """

    plan: Plan | None = None
    policy: str = ""
    min_tokens: int | None = None
    shareable: int | None = 0
    reusable: int | None = 0
    conversation: Conversation | None = None
    keep: Spans = ()
    attend: Attend | None = None
    sparse_tokens: int = 0
    cache_key: bytes = b""

    def suffix(self, end: int) -> bytes | None:
        """Return what the KV of the first `end` tokens depends on, apart from these tokens.

        Returns:
            `cache_key`, empty if it is the full cache's KV; None if no other request may find it.
        """
        if self.reusable is None or end <= self.reusable:
            return self.cache_key
        return None if self.conversation is None else self.conversation.suffix(end)


@dataclass(slots=True)
class SchedulerRequest:
    """The record of a request: its terms, and its progress since it started or was preempted.

    Attributes:
        terms: what the request came with.
        bundles: the bundles with which its tables begin, until an eviction gives its head back.
        lasting: those of KV heads that never evict, where others do (`PrefixSharing.lasting`).
        prefix_hit: hashes of the bundles that it could begin with, as last looked up.
        host_hit: hashes of the bundles of the host cache that come behind these.
        host_query: tokens that were looked for in the host cache, until the request begins.
        from_host: first and last token, exclusive, that it began with out of the host cache.
        session_hit: the session that it could begin with, as last looked up.
        resumed: the session that it began with.
        session_to_save: the session that is saved when its blocks are freed.
        pending_copy: the blocks reserved for what its eviction overwrites.
        num_blocks: entries of its longest tables, null blocks included.
        tables: `[layers]` its tables in the layers' managers, once they have grown: looking all of
            them up again would cost more than a block for each.
        resolved: the plan by which the worker moved its survivors, once the worker has reported.
        confirmed: number of the latest eviction that the worker has reported.
        released: number of the latest eviction whose head has been given back.
        due: processed tokens at which its next head may go; None if none will.
    """

    terms: RequestTerms = RequestTerms()
    bundles: list[BlockBundle] = field(default_factory=list)
    lasting: list[BlockBundle] = field(default_factory=list)
    prefix_hit: list[BlockHash] = field(default_factory=list)
    host_hit: list[BlockHash] = field(default_factory=list)
    host_query: int = 0
    from_host: tuple[int, int] = (0, 0)
    session_hit: SessionSnapshot | None = None
    resumed: SessionSnapshot | None = None
    session_to_save: SessionToSave | None = None
    pending_copy: PendingPrefixCopy | None = None
    num_blocks: int = 0
    tables: list[list[KVCacheBlock]] = field(default_factory=list)
    resolved: RetentionPlan | None = None
    confirmed: int = 0
    released: int = 0
    due: int | None = None

    @classmethod
    def at_start(cls, terms: RequestTerms) -> SchedulerRequest:
        """Make the record of a request that holds nothing: a new or a preempted one."""
        plan = terms.plan
        return cls(terms, due=plan.exact_tokens if plan is not None and plan.evicts else None)
