# SPDX-License-Identifier: Apache-2.0
"""A subscriber to the KV events of an engine, over ZMQ as a router is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch


class Subscriber:
    """What an engine publishes from its start on.

    Attributes:
        config: of the engine.
    """

    def __init__(self, endpoint: str) -> None:
        self.config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv@one@model"
        )
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, self.config.topic)
        self._next = 0

    def batch(self, seconds: float = 20.0) -> KVEventBatch:
        """Return the next batch; batches are numbered without a gap."""
        assert self._socket.poll(1000 * seconds), "no event came"
        topic, number, payload = self._socket.recv_multipart()
        assert topic.decode() == self.config.topic
        assert int.from_bytes(number, "big") == self._next
        self._next += 1
        return self._decoder.decode(payload)

    def until_cleared(self) -> list[Any]:
        """Return all events before the next `AllBlocksCleared`."""
        found: list[Any] = []
        while not any(isinstance(event, AllBlocksCleared) for event in found):
            found += self.batch().events
        end = next(i for i, event in enumerate(found) if isinstance(event, AllBlocksCleared))
        assert end == len(found) - 1 or not isinstance(found[end + 1], AllBlocksCleared)
        return found[:end]

    def close(self) -> None:
        """Unsubscribe."""
        self._socket.close(linger=0)


@contextmanager
def subscribed() -> Iterator[Subscriber]:
    """A subscriber that waits for an engine on this machine."""
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket has a hundred letters
        subscriber = Subscriber(f"ipc://{Path(folder) / 'events'}")
        yield subscriber
        subscriber.close()


def blocks(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Return all that is told of each block that is stored, one by one, in their order."""
    found = []
    for event in events:
        if not isinstance(event, BlockStored):
            continue
        told, size = msgspec.structs.asdict(event), event.block_size
        hashes, keys = told.pop("block_hashes"), told.pop("extra_keys")
        parent, tokens = told.pop("parent_block_hash"), told.pop("token_ids")
        for index, name in enumerate(hashes):
            own = {"hash": name, "parent": parent, "extra_keys": keys[index]}
            of_block = tokens[index * size : (index + 1) * size]
            found.append({**told, **own, "token_ids": of_block})
            parent = name
    return found
