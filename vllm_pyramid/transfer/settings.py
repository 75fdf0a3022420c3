# SPDX-License-Identifier: Apache-2.0
"""The settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

NAME = "PyramidConnector"
_KEYS = ("folder", "listen", "peers", "nixl", "ttl_s", "wait_s", "limit_gib")
_WHERE = f"kv_connector_extra_config of {NAME}"


class Address(NamedTuple):
    """Where an engine serves its states.

    Attributes:
        host: its name or address.
        port: of the scheduler; the workers have those that follow, in the order of their ranks.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: Any, what: str) -> Address:
        """Parse `host:port`.

        Raises:
            ValueError: it is something else, or an address that no other host can name.
        """
        host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        is_number = port.isascii() and port.isdecimal()
        if not host or not is_number or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{_WHERE}: {what} must be HOST:PORT, not {text!r}")
        if host in ("0.0.0.0", "::", "[::]"):
            raise ValueError(
                f"{_WHERE}: {what} {text!r} names no host: give the address by which the decoding "
                "engines reach this one"
            )
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True)
class TransferSettings:
    """How states travel.

    Attributes:
        folder: that all engines share; None: over TCP.
        listen: where this engine serves its states; None if it sends none over TCP.
        name: this engine's in tickets: the text of `listen`; empty without.
        peers: from which engines it fetches, by the text of their `listen`.
        nixl: whether parts are read by NIXL, where other engines say over TCP where they are.
        ttl_s: seconds after which a state that no engine has fetched is dropped.
        wait_s: seconds for which a decoding engine waits for a state's blocks.
        limit_bytes: of the states of one worker that are not fetched yet, at most.
        sends, fetches: what the engine's `kv_role` says.
    """

    folder: str | None
    listen: Address | None
    name: str
    peers: Mapping[str, Address]
    nixl: bool
    ttl_s: float
    wait_s: float
    limit_bytes: int
    sends: bool
    fetches: bool

    @classmethod
    def of(cls, config: Any) -> TransferSettings:
        """Read vLLM's `KVTransferConfig`.

        Raises:
            ValueError: naming the wrong key.
        """
        given, sends = config.kv_connector_extra_config or {}, bool(config.is_kv_producer)
        fetches = bool(config.is_kv_consumer)
        if unknown := sorted(given.keys() - {*_KEYS}):
            raise ValueError(f"{_WHERE} has no key {unknown[0]!r}: use {', '.join(_KEYS)}")
        folder, listen, peers = given.get("folder"), given.get("listen"), given.get("peers", [])
        if folder is not None and (not isinstance(folder, str) or not folder):
            raise ValueError(f"{_WHERE}: folder must be a path, not {folder!r}")
        if not isinstance(peers, list):
            raise ValueError(f"{_WHERE}: peers must be a list of HOST:PORT, not {peers!r}")
        if folder is not None and (listen is not None or peers):
            raise ValueError(f"{_WHERE} has folder and an address: leave one of them out")
        if not isinstance(nixl := given.get("nixl", False), bool) or (nixl and folder is not None):
            raise ValueError(
                f"{_WHERE}: nixl must be true or false, and needs addresses, no folder"
            )
        if folder is None and sends and listen is None:
            raise ValueError(
                f"{_WHERE}: an engine that sends states ({config.kv_role}) needs folder or listen"
            )
        if folder is None and fetches and not sends and not peers:
            raise ValueError(
                f"{_WHERE}: an engine that fetches states ({config.kv_role}) needs folder or peers"
            )
        return cls(
            folder,
            None if listen is None else Address.parse(listen, "listen"),
            listen or "",
            {peer: Address.parse(peer, "a peer") for peer in peers},
            nixl,
            _positive(given, "ttl_s", 120.0),
            _positive(given, "wait_s", 10.0),
            int(_positive(given, "limit_gib", 4.0) * 2**30),
            sends,
            fetches,
        )


def _positive(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError(f"{_WHERE}: {key} must be a positive number, not {value!r}")
    return float(value)
