# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half of the connector orders from the workers' half in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_pyramid.transfer.wire import StateId


class BlockOrder(NamedTuple):
    """Blocks that are sent, or that are filled.

    Attributes:
        request_id: of this engine. state: what they are.
        blocks: ids of the tails of all layers, from the bottom; the same in every rank.
        peer: the engine that has the state; empty for a folder, and for what is sent.
    """

    request_id: str
    state: StateId
    blocks: list[int]
    peer: str = ""


@dataclass
class TransferOrders(KVConnectorMetadata):
    """The orders of one step.

    Attributes:
        sent: of requests that have ended; no step writes to their blocks until they are reported.
        fetched: of requests that wait for them.
    """

    sent: list[BlockOrder] = field(default_factory=list)
    fetched: list[BlockOrder] = field(default_factory=list)
