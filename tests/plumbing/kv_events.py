# SPDX-License-Identifier: Apache-2.0
"""A subscriber to the KV events of an engine, over ZMQ as a router is."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)


class Subscriber:
    """What an engine publishes from its start on.

    What was sent before the engine had heard of the subscriber, it asks for again.

    Attributes:
        config: of the engine.
    """

    def __init__(self, endpoint: str, replay: str, topic: str = "kv@one@model") -> None:
        self.config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay,
            topic=topic,
        )
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        context = zmq.Context.instance()
        self._socket, self._again = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._socket.connect(endpoint.replace("*", "127.0.0.1"))
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._again.connect(replay.replace("*", "127.0.0.1"))
        self._next = 0
        self._waiting: deque[bytes] = deque()

    def batch(self, seconds: float = 20.0) -> KVEventBatch:
        """Return the next batch."""
        while not self._waiting:
            assert self._socket.poll(1000 * seconds), "no event came"
            topic, number, payload = self._socket.recv_multipart()
            assert topic.decode() == self.config.topic
            sent = int.from_bytes(number, "big")
            missing = [payload] if sent == self._next else []
            if sent > self._next:
                missing = self._ask_again()
            self._waiting += missing
            self._next += len(missing)
        return self._decoder.decode(self._waiting.popleft())

    def has_more(self, seconds: float) -> bool:
        """Return whether a batch comes within so many seconds."""
        return bool(self._waiting or self._socket.poll(1000 * seconds))

    def _ask_again(self) -> list[bytes]:
        """Return all batches that were sent since the last known one."""
        self._again.send_multipart([b"", self._next.to_bytes(8, "big")])
        found: list[bytes] = []
        while True:
            assert self._again.poll(20_000), "nothing is sent again"
            _, _, number, payload = self._again.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return found
            assert int.from_bytes(number, "big") == self._next + len(found)
            found.append(payload)

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
        self._again.close(linger=0)


@contextmanager
def subscribed() -> Iterator[Subscriber]:
    """A subscriber that waits for an engine on this machine."""
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket has a hundred letters
        sockets = (f"ipc://{Path(folder) / name}" for name in ("events", "again"))
        subscriber = Subscriber(*sockets)
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
