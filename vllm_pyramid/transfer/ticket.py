# SPDX-License-Identifier: Apache-2.0
"""Tickets: what a client carries from the prefilling engine to the decoding one.

A ticket is a client's input. It names a state by a number that no client can guess, and an engine
by one of the texts in the decoding engine's own list: it holds no path, and no address to connect
to.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

# vLLM's own keys of `kv_transfer_params`, which its routers set and pass on.
SEND, FETCH = "do_remote_decode", "do_remote_prefill"
_STATE, _PEER = "pyramid_state", "pyramid_peer"
_NAME = re.compile(r"[0-9a-f]{32}")


class Ticket(NamedTuple):
    """A ticket.

    Attributes:
        state: the name of a state.
        peer: the engine that serves it, by the text of its `listen`; empty for a folder.
    """

    state: str
    peer: str = ""

    @classmethod
    def new(cls, peer: str) -> Ticket:
        """Return a ticket for a new state."""
        return cls(secrets.token_hex(16), peer)

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Ticket | None:
        """Return the ticket in a client's `kv_transfer_params`; None if it is not one of ours."""
        state, peer = params.get(_STATE), params.get(_PEER, "")
        if not isinstance(state, str) or _NAME.fullmatch(state) is None:
            return None
        return cls(state, peer) if isinstance(peer, str) else None

    def as_params(self) -> dict[str, Any]:
        """Return the ticket as `kv_transfer_params` of the decoding engine's request."""
        return {FETCH: True, SEND: False, _STATE: self.state, _PEER: self.peer}


def asks(params: object, key: str) -> bool:
    """Return whether a request's `kv_transfer_params` ask to send a state, or to fetch one."""
    return isinstance(params, Mapping) and params.get(key) is True


def check_params(params: Any) -> None:
    """Raise ValueError for a request that one state does not suffice for.

    Args:
        params: the request's sampling parameters.
    """
    given = (params.extra_args or {}).get("kv_transfer_params")
    if params.n > 1 and (asks(given, SEND) or asks(given, FETCH)):
        raise ValueError(
            f"kv_transfer_params of a request with n = {params.n}: its answers would share the "
            "first token, which the state holds; send n requests"
        )
