# SPDX-License-Identifier: Apache-2.0
"""The wire format of a state: a head, and a part from each rank.

Each of them is a file of `kv_cache/bundle_file.py`, whether or not it is on a disk:

    STATE.head     first bytes | JSON: tokens, first token            | SHA-256
    STATE.RANK     first bytes | blocks of all layers, from the bottom | SHA-256

The first bytes have the format, the namespace (model, weights, versions, layout and type of the
cache) and, as `order`, a hash of all that the state depends on apart from that: the tokens of the
prompt, policy, budget, spans, and the lengths of all layers. The engine that fetches a state
computes the same from its own request, so nothing of a state is believed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from vllm_pyramid.kv_cache.bundle_file import BundleFile, DamagedFileError, parse_file, sealed
from vllm_pyramid.kv_cache.evicted_names import evicted_key
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy.request import ServedRequest

# The most bytes that a head may have.
LARGEST_HEAD = 1 << 16
_HEAD_PART = -1


class StateId(NamedTuple):
    """What names a state, and what it depends on.

    Attributes:
        state: its name.
        namespace: of the engines that can read it.
        key: of the request, see `request_key`.
    """

    state: str
    namespace: str
    key: str

    @property
    def head_name(self) -> str:
        """The name of the head."""
        return f"{self.state}.head"

    def part_name(self, rank: int) -> str:
        """Return the name of a rank's part."""
        return f"{self.state}.{rank}"

    def begin(self, part: int, num_blocks: int) -> bytes:
        """Return the first bytes of the head or of a part."""
        name = bytes.fromhex(self.state)
        return BundleFile(self.namespace, name, num_blocks, None, part, self.key).begin()


class StateHead(NamedTuple):
    """What a head holds.

    Attributes:
        tokens: of the prompt. first_token: of the answer.
    """

    tokens: int
    first_token: int


class MismatchError(Exception):
    """A state of another engine, or of another request."""


def request_key(served: ServedRequest, plan: RetentionPlan, prompt: Sequence[int]) -> str:
    """Return a hash of all of a request that the state behind its prompt depends on."""
    tokens = sha256(np.array(prompt, np.int64).tobytes()).digest()
    return sha256(evicted_key(served, plan) + tokens).hexdigest()


def pack_head(state: StateId, head: StateHead) -> list[memoryview]:
    """Return the bytes of a head, in pieces."""
    return sealed(state.begin(_HEAD_PART, 0), json.dumps(head._asdict()).encode())


def unpack_head(state: StateId, data: memoryview) -> StateHead:
    """Read a head.

    Raises:
        DamagedFileError: it was not written by `pack_head`. MismatchError: it is of another state.
    """
    content = _unpack(state, _HEAD_PART, 0, data)
    try:
        head = StateHead(**json.loads(bytes(content)))
    except (ValueError, TypeError):
        raise DamagedFileError("its content cannot be read") from None
    if not all(type(number) is int and number >= 0 for number in head):
        raise DamagedFileError("its content cannot be read")
    return head


def pack_part(state: StateId, rank: int, num_blocks: int, content: Any) -> list[memoryview]:
    """Return the bytes of a rank's part, in pieces.

    Args:
        content: the bytes of its blocks, a buffer.
    """
    return sealed(state.begin(rank, num_blocks), content)


def unpack_part(
    state: StateId, rank: int, num_blocks: int, num_bytes: int, data: memoryview
) -> memoryview:
    """Return the blocks of a rank's part.

    Args:
        num_bytes: of all blocks.

    Raises:
        DamagedFileError: it was not written by `pack_part`, or has another length.
        MismatchError: it is of another state.
    """
    content = _unpack(state, rank, num_blocks, data)
    if len(content) != num_bytes:
        raise DamagedFileError(f"it has {len(content)} bytes of blocks, not {num_bytes}")
    return content


def _unpack(state: StateId, part: int, num_blocks: int, data: memoryview) -> memoryview:
    found, content = parse_file(data)
    expected = BundleFile(
        state.namespace, bytes.fromhex(state.state), num_blocks, None, part, state.key
    )
    if found.namespace != expected.namespace:
        raise MismatchError("another model, version or kind of cache")
    if found != expected:
        raise MismatchError("another prompt, policy or budget")
    return content
