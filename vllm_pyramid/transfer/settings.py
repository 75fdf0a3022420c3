# SPDX-License-Identifier: Apache-2.0
"""The settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

NAME = "PyramidConnector"
_KEYS = ("folder", "listen", "peers", "nixl", "ttl_s", "wait_s", "limit_gib")


class Address(NamedTuple):
    """Where an engine serves its states.

    `port` is the scheduler's; the workers have those that follow, in the order of their ranks.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: Any, what: str) -> Address:
        """Parse `host:port`; ValueError: it is not that, or an address that no other host can
        name.
        """
        host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        is_number = port.isascii() and port.isdecimal()
        is_address = host and is_number and 0 < int(port) < 1 << 16
        _check(is_address, f"{what} must be HOST:PORT, not {text!r}")
        _check(
            host not in ("0.0.0.0", "::", "[::]"),
            f"{what} {text!r} names no host: give the address by which the decoding engines reach "
            "this one",
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
        """Read vLLM's `KVTransferConfig`; a ValueError names the wrong key."""
        given, role = config.kv_connector_extra_config or {}, config.kv_role
        sends, fetches = bool(config.is_kv_producer), bool(config.is_kv_consumer)
        unknown = sorted(given.keys() - {*_KEYS})
        _check(not unknown, f"there is no key {unknown[:1]}: use {', '.join(_KEYS)}")
        folder, listen, peers = given.get("folder"), given.get("listen"), given.get("peers", [])
        nixl, is_path = given.get("nixl", False), isinstance(folder, str) and folder
        _check(folder is None or is_path, f"folder must be a path, not {folder!r}")
        _check(isinstance(peers, list), f"peers must be a list of HOST:PORT, not {peers!r}")
        has_address = listen is not None or peers
        _check(
            not (is_path and has_address), "folder and an address are given: leave one of them out"
        )
        is_right = isinstance(nixl, bool) and not (nixl and is_path)
        _check(is_right, "nixl must be true or false, and needs addresses, no folder")
        what, found = ("listen", listen is not None) if sends else ("peers", peers)
        _check(is_path or found, f"an engine with kv_role {role} needs folder or {what}")
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _check(is_number and 0 < value < 1e9, f"{key} must be a positive number, not {value!r}")
    return float(value)


def _check(is_right: Any, problem: str) -> None:
    if not is_right:
        raise ValueError(f"kv_connector_extra_config of {NAME}: {problem}")
