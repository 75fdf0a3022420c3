# SPDX-License-Identifier: Apache-2.0
"""What carries states, and the choice of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm_pyramid.transfer.folder import FolderTransport
from vllm_pyramid.transfer.settings import TransferSettings
from vllm_pyramid.transfer.tcp import TcpTransport


class Transport(Protocol):
    """Carries heads and parts of states by their names. All methods may be called by any thread."""

    def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Let other engines get something, until it is dropped or its time is over.

        OSError: there is no room for it, or as the system says.
        """

    def get(self, name: str, peer: str, largest: int) -> memoryview | None:
        """Return what an engine has put under a name, as own memory; None if there is nothing.

        Args:
            peer: the engine, one of `peers`; empty for a folder. largest: the most bytes.

        Raises:
            OSError: the engine cannot be reached, or as the system says.
            DamagedFileError: it has more bytes, or ends too early.
        """

    def drop(self, name: str, peer: str) -> None:
        """Let an engine drop what it has put under a name, if it can be reached."""

    def close(self) -> None:
        """Serve nothing any more."""


def make_transport(settings: TransferSettings, place: int) -> Transport:
    """Return the transport of one process; `place` is 0 for a scheduler, a worker's rank plus 1.

    Raises:
        OSError: the folder cannot be made, or the port is taken.
        ValueError: NIXL is asked for and not installed.
    """
    if settings.folder is not None:
        return FolderTransport(settings.folder, settings.ttl_s, settings.limit_bytes)
    if settings.nixl:
        from vllm_pyramid.transfer.nixl import NixlTransport

        return NixlTransport(settings, place)
    return TcpTransport(settings, place)
