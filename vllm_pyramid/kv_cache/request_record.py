# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of a request, and what it gives one that needs no block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from vllm_pyramid.kv_cache.bundles import BlockBundle
from vllm_pyramid.kv_cache.session_cache import Conversation, SessionSnapshot
from vllm_pyramid.plan import Plan, RetentionPlan


class NoBlocks(KVCacheBlocks):
    """What a request is given that needs no block in a step: nearly every request, every step.

    vLLM's own would look into every layer's empty list to find that it is empty.
    """

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Any:
        """As vLLM's: None where that is allowed, else an empty list a layer."""
        return None if allow_none else super().get_block_ids(**kwargs)


@dataclass
class PendingPrefixCopy:
    """Blocks that were set aside for copies of what an eviction overwrites.

    Attributes:
        first: rows before it. hashes: of the rows from there on to the prompt's end.
        blocks: as set aside.
    """

    first: int
    hashes: list[BlockHash]
    blocks: BlockBundle


@dataclass
class SchedulerRequest:
    """What the scheduler's side knows of a request; one record from its arrival to its end.

    Attributes:
        plan: None of a request without one, which keeps everything. policy: its name.
        min_tokens: the least that its share comes to; None where it has no share or no floor.
        shareable: the first tokens whose blocks it may share; None: all of them.
        reusable: the first tokens that others may have computed; None: all of them.
        conversation: to which it belongs; None if to none.
        rows: of the pool with which its tables begin, until its head has been given back.
        hit: hashes of rows that it could begin with, as last looked up.
        found: the state that it could begin with, as last looked up. resumed: with which it began.
        leaves: itself, the number of the eviction behind which its state is, and the tokens
            computed: where that is to be kept when its blocks are freed.
        left: what it will leave behind when it evicts; None if nothing.
        num_blocks: table entries of the layers with the smallest blocks, null blocks included.
        settled: the plan with which its survivors were moved, once the worker has said so.
        confirmed: number of the latest eviction that the worker has reported.
        released: of the latest eviction whose head has been given back.
        due: processed tokens at which the next head may go; None if none will.
    """

    plan: Plan | None = None
    policy: str = ""
    min_tokens: int | None = None
    shareable: int | None = 0
    reusable: int | None = 0
    conversation: Conversation | None = None
    rows: list[BlockBundle] = field(default_factory=list)
    hit: list[BlockHash] = field(default_factory=list)
    found: SessionSnapshot | None = None
    resumed: SessionSnapshot | None = None
    leaves: tuple[Request, int, int] | None = None
    left: PendingPrefixCopy | None = None
    num_blocks: int = 0
    resolved: RetentionPlan | None = None
    confirmed: int = 0
    released: int = 0
    due: int | None = None

    def suffix(self, end: int) -> bytes | None:
        """What the KV of its first `end` tokens depends on beside these tokens.

        Returns:
            Nothing where it is the full cache's; None where no other request may find it.
        """
        if self.reusable is None or end <= self.reusable:
            return b""
        return None if self.conversation is None else self.conversation.suffix(end)
