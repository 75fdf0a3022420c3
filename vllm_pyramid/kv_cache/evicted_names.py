# SPDX-License-Identifier: Apache-2.0
"""What names KV that a request computes behind its evictions, so that its next turn finds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from operator import itemgetter

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from vllm_pyramid.plan import Plan, RetentionPlan
from vllm_pyramid.policy.request import ServedRequest


@dataclass(frozen=True)
class EvictedNames:
    """The names of what a request with turns computes behind its evictions.

    `keys` has what the KV behind an eviction depends on apart from the tokens, for each eviction
    that gives blocks back, by its number; `points` the same in order, with the computed tokens.
    """

    plan: RetentionPlan
    keys: dict[int, bytes]
    points: tuple[tuple[int, bytes], ...]

    def suffix(self, end: int) -> bytes | None:
        """Return what the KV of the first `end` tokens depends on, apart from these tokens.

        An eviction at `end` comes after the attention of the last of them, so it changes nothing.
        None before the first eviction.
        """
        count = bisect_left(self.points, end, key=itemgetter(0))
        return _suffix(self.points[count - 1][1]) if count else None

    @classmethod
    def of(cls, served: ServedRequest, plan: Plan) -> EvictedNames | None:
        """Return the names of a request; None if it leaves nothing for a later turn."""
        if served.resumed_turns is None:
            return None
        assert isinstance(plan, RetentionPlan), "policies that defer lengths are refused"
        keys: dict[int, bytes] = {}
        points: list[tuple[int, bytes]] = []
        for number, key in _keys(served, plan):
            if number:
                keys[number] = key
                points.append((plan.computed_at(number), key))
        return cls(plan, keys, tuple(points)) if keys else None


def evicted_key(served: ServedRequest, plan: RetentionPlan) -> bytes:
    """Return what the KV behind a request's prompt depends on, apart from the tokens."""
    *_, (_, key) = _keys(served, plan)
    return key


def _keys(served: ServedRequest, plan: RetentionPlan) -> Iterator[tuple[int, bytes]]:
    """Yield the key before any eviction, under 0, and behind each that gives blocks back."""
    policy = served.policy
    budget = (served.budget or policy.budget).with_floor(policy.min_tokens)
    text = f"{policy.model_dump_json()} {budget.value} {budget.min_tokens} {served.keep}"
    text += "".join(part.source for part in policy.parts)
    key = sha256(text.encode())
    yield 0, key.digest()
    for number in plan.giving:
        # An allocator of one's own may give other lengths under the same name.
        key.update(f" {plan.computed_at(number)} ".encode() + plan.skip_after(number).tobytes())
        yield number, key.digest()


def session_name(block_hash: BlockHash, key: bytes) -> BlockHash:
    """Return the name of a session's bundle; a bare hash names a bundle of the full cache."""
    return BlockHash(block_hash + _suffix(key))


def turn_name(
    request: Request, hashes: Sequence[BlockHash], size: int, point: int, key: bytes
) -> BlockHash | None:
    """Return the name of a session's base for what follows a turn that ends inside a block.

    None if the turn ends at a block's edge, where `session_name` names its base; in the first
    block, which has no hash before it; or among what tokens do not tell: images, embeddings.

    `hashes` are of bundles of `size` tokens. `point` tokens, where the turn ends, are all the
    request's. For `key` see `EvictedNames`.
    """
    whole, tail = divmod(point, size)
    if not tail or not whole or request.prompt_embeds is not None:
        return None
    start = whole * size
    for feature in request.mm_features:
        at = feature.mm_position
        if at.offset < point and start < at.offset + at.length:
            return None
    tokens = np.array(request.all_token_ids[start:point], np.int64)
    return session_name(BlockHash(sha256(hashes[whole - 1] + tokens.tobytes()).digest()), key)


def _suffix(key: bytes) -> bytes:
    return b"@" + key
