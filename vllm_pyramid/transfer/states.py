# SPDX-License-Identifier: Apache-2.0
"""States: what names them, their wire format, and what scheduler and workers say of them.

A state is a head, and a part from each rank that sends. Each of them is a file of
`kv_cache/bundle_file.py`, whether or not it is on a disk:

    STATE.head     first bytes | first token of the answer             | SHA-256
    STATE.RANK     first bytes | blocks of all layers, from the bottom | SHA-256

The first bytes have the format, the namespace (model, weights, versions, layout and type of the
cache) and, as `order`, a hash of all that the state depends on apart from that: the tokens of the
prompt, policy, budget, spans, and the lengths of all layers. The engine that fetches a state
computes the same from its own request, so nothing of a state is believed.

A part holds the KV heads of its rank. An engine with another number of ranks takes the heads of
each of its ranks out of the parts that hold them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_pyramid.kv_cache.bundle_file import (
    BundleFile,
    DamagedFileError,
    file_bytes,
    parse_file,
    sealed,
)
from vllm_pyramid.kv_cache.evicted_names import evicted_key
from vllm_pyramid.plan import RetentionPlan
from vllm_pyramid.policy.request import ServedRequest
from vllm_pyramid.transfer.transport import Transport

# vLLM's own keys of `kv_transfer_params`, which its routers set and pass on.
SEND, FETCH = "do_remote_decode", "do_remote_prefill"
_STATE, _PEER, _RANKS = "pyramid_state", "pyramid_peer", "pyramid_ranks"
_NAME = re.compile(r"[0-9a-f]{32}")
_MOST_RANKS = 256
_HEAD, _HEAD_PART, _TOKEN_BYTES = "head", -1, 8


class MismatchError(Exception):
    """A state of another engine, or of another request."""


class Ticket(NamedTuple):
    """What a client carries from the prefilling engine to the decoding one.

    It is a client's input: it holds no path, and no address to connect to. No client can guess
    `state`. `peer` is the text of the engine's `listen`, empty for a folder; each of its `ranks`
    sends a part.
    """

    state: str
    peer: str = ""
    ranks: int = 1

    @classmethod
    def new(cls, peer: str, ranks: int) -> Ticket:
        """Return a ticket for a new state."""
        return cls(secrets.token_hex(16), peer, ranks)

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Ticket | None:
        """Return the ticket in a client's `kv_transfer_params`; None if it is not one of ours."""
        state, peer, ranks = params.get(_STATE), params.get(_PEER, ""), params.get(_RANKS, 1)
        if not isinstance(state, str) or _NAME.fullmatch(state) is None:
            return None
        if not isinstance(peer, str) or type(ranks) is not int or not 0 < ranks <= _MOST_RANKS:
            return None
        return cls(state, peer, ranks)

    def as_params(self) -> dict[str, Any]:
        """Return the ticket as `kv_transfer_params` of the decoding engine's request."""
        named = {_STATE: self.state, _PEER: self.peer, _RANKS: self.ranks}
        return {FETCH: True, SEND: False, **named}

    @property
    def names(self) -> list[str]:
        """The names of the head and of each rank's part."""
        return [self.name(part) for part in (_HEAD, *range(self.ranks))]

    def name(self, part: str | int) -> str:
        """Return the name of the head, or of a rank's part."""
        return f"{self.state}.{part}"


def asks(params: object, key: str) -> bool:
    """Return whether a request's `kv_transfer_params` ask to send a state, or to fetch one."""
    return isinstance(params, Mapping) and params.get(key) is True


def check_params(params: Any) -> None:
    """Raise ValueError for sampling parameters that one state does not suffice for."""
    given = (params.extra_args or {}).get("kv_transfer_params")
    if params.n > 1 and (asks(given, SEND) or asks(given, FETCH)):
        raise ValueError(
            f"kv_transfer_params of a request with n = {params.n}: its answers would share the "
            "first token, which the state holds; send n requests"
        )


class State(NamedTuple):
    """What names a state, and what it depends on.

    Attributes:
        namespace: of the engines that can read it.
        key: of the request, see `request_key`.
    """

    ticket: Ticket
    namespace: str
    key: str

    def put_head(self, transport: Transport, first_token: int) -> None:
        """Let other engines get the head. OSError: see `Transport.put`."""
        content = first_token.to_bytes(_TOKEN_BYTES, "little")
        transport.put(self.ticket.name(_HEAD), sealed(self._head.begin(), content))

    def fetch_head(self, transport: Transport, vocabulary: int) -> int | None:
        """Return the first token, one of `vocabulary`; None if there is no such state.

        Errors as `fetch`.
        """
        content = self.fetch(transport, _HEAD, self._head, _TOKEN_BYTES)
        if content is None:
            return None
        if (token := int.from_bytes(content, "little")) >= vocabulary:
            raise DamagedFileError(f"its first token is {token}, and there are {vocabulary}")
        return token

    def is_there(self, transport: Transport) -> bool:
        """Return whether the head is there: it is put before all parts, and dropped before them."""
        return self.fetch(transport, _HEAD, self._head, _TOKEN_BYTES) is not None

    def part(self, first_head: int, num_blocks: int, layout: str) -> BundleFile:
        """Return what a part says of itself, from its first KV head and the layout of a block."""
        name = bytes.fromhex(self.ticket.state)
        return BundleFile(self.namespace, name, num_blocks, layout, first_head, self.key)

    def fetch(
        self, transport: Transport, part: str | int, expected: BundleFile, num_bytes: int
    ) -> memoryview | None:
        """Return `num_bytes` of the head or of a rank's part; None if there is nothing.

        Raises:
            DamagedFileError: it has been changed or cut, or has another length.
            MismatchError: it is of another state. OSError: see `Transport.get`.
        """
        largest = file_bytes(expected.begin(), num_bytes)
        data = transport.get(self.ticket.name(part), self.ticket.peer, largest)
        if data is None:
            return None
        found, content = parse_file(data)
        if found.namespace != expected.namespace:
            raise MismatchError("another model, version or kind of cache")
        if found != expected:
            raise MismatchError("another prompt, policy, budget or layout of blocks")
        if len(content) != num_bytes:
            raise DamagedFileError(f"it has {len(content)} bytes, not {num_bytes}")
        return content

    @property
    def _head(self) -> BundleFile:
        """What the head says of itself; for the number of blocks it has that of ranks."""
        return self.part(_HEAD_PART, self.ticket.ranks, "")


def request_key(served: ServedRequest, plan: RetentionPlan, prompt: Sequence[int]) -> str:
    """Return a hash of all of a request that the state behind its prompt depends on."""
    tokens = sha256(np.array(prompt, np.int64).tobytes()).digest()
    return sha256(evicted_key(served, plan) + tokens).hexdigest()


def given_back(plan: RetentionPlan, block_size: int) -> npt.NDArray[np.int64]:
    """Return the leading blocks of each table, `[tables]`, that a prompt has not any more."""
    skipped = plan.skip_after(plan.end_number).astype(np.int64)
    found: npt.NDArray[np.int64] = skipped // block_size
    return found


def heads_of(rank: int, ranks: int, total: int) -> range:
    """Return the KV heads of a rank, of `total`. With more ranks than heads, several have one."""
    first = rank * total // ranks
    return range(first, first + max(total // ranks, 1))


def sources(heads: range, ranks: int, total: int) -> Iterator[tuple[int, range]]:
    """Yield the ranks of another engine that together hold some heads, and the heads of each."""
    seen = set()
    for rank in range(ranks):
        theirs = heads_of(rank, ranks, total)
        if theirs.start < heads.stop and heads.start < theirs.stop and theirs not in seen:
            seen.add(theirs)
            yield rank, theirs


class BlockOrder(NamedTuple):
    """Blocks that are sent or filled: the tails of all layers, from the bottom, in every rank."""

    request_id: str
    state: State
    blocks: list[int]


@dataclass
class TransferOrders(KVConnectorMetadata):
    """What the scheduler's half of the connector orders from the workers' half in a step.

    No step writes to the blocks of `sent` until they are reported; requests wait for `fetched`.
    """

    sent: list[BlockOrder] = field(default_factory=list)
    fetched: list[BlockOrder] = field(default_factory=list)
