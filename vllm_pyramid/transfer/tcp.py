# SPDX-License-Identifier: Apache-2.0
"""States over TCP: the engine that prefills serves them from its memory.

    GET NAME, DROP NAME    a line
    answer to GET          8 bytes: the length, or all ones if there is nothing; then the bytes

The scheduler serves heads at the engine's port, and each worker its parts at a port of its own
behind it. There is no encryption: the network is the engines' own, as with NCCL.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EHOSTUNREACH, ENOSPC
from io import BufferedReader
from struct import Struct
from typing import Any, NamedTuple

from vllm_pyramid.kv_cache.bundle_file import DamagedFileError
from vllm_pyramid.transfer.settings import Address, TransferSettings

_LENGTH = Struct("<Q")
_NOTHING = (1 << 64) - 1
_LINE = re.compile(rb"(GET|DROP) ([0-9a-f]{32}\.(?:head|\d{1,5}))\n")
_CONNECT_S, _ASK_S, _IDLE_S = 3.0, 10.0, 30.0
_AVOID_S = 10.0  # a port that has not answered: tickets of clients would keep all threads waiting
_SLICE = 1 << 20  # a socket's timeout counts for a whole `sendall`
_MOST_CONNECTIONS = 64


class _Served(NamedTuple):
    """What is served under a name until `end`; `release` is called when it has been dropped."""

    end: float
    pieces: Sequence[memoryview]
    num_bytes: int
    release: Callable[[], object]


def is_head(name: str) -> bool:
    """Return whether a name is that of a state's head, not of a rank's part."""
    return name.endswith(".head")


class _Server(socketserver.ThreadingTCPServer):
    """Serves what is in `states`, by name, and drops what no engine fetches.

    A connection has `_ASK_S` seconds to send its whole line. Where all places are taken, a new
    connection closes the oldest one that has not. One that has asked is never closed for another.
    """

    allow_reuse_address, daemon_threads, block_on_close = True, True, False
    request_queue_size = _MOST_CONNECTIONS  # what does not fit is lost for a second

    def __init__(self, address: Address) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.states: dict[str, _Served] = {}
        self.lock = threading.Lock()
        self._silent: dict[Any, float] = {}  # connections without a whole line, since when
        self._asked: set[Any] = set()
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise OSError(error.errno, f"no states can be served at {where}: {error}") from None

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self.lock:
            if len(self._silent) + len(self._asked) >= _MOST_CONNECTIONS:
                if not self._silent:
                    return False
                self._hang_up(next(iter(self._silent)))
            self._silent[request] = time.monotonic()
        return True

    def has_asked(self, request: Any) -> bool:
        """Keep a connection until it has its answer; False if it is closed by now."""
        with self.lock:
            if self._silent.pop(request, None) is None:
                return False
            self._asked.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self._silent.pop(request, None)
            self._asked.discard(request)
        super().shutdown_request(request)

    def _hang_up(self, request: Any) -> None:
        """Let the thread of a silent connection end. The caller has the lock."""
        del self._silent[request]
        with suppress(OSError):  # the other side has gone
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the other side has gone, and its own log says so."""

    def service_actions(self) -> None:
        """Drop states and silent connections whose time is over; called every half second."""
        now = time.monotonic()
        with self.lock:
            for request in [of for of, since in self._silent.items() if since + _ASK_S < now]:
                self._hang_up(request)
            for name in [name for name, served in self.states.items() if served.end < now]:
                self.drop(name)

    def drop(self, name: str) -> None:
        """Serve something no more, if it is there. The caller has the lock."""
        if (served := self.states.pop(name, None)) is not None:
            served.release()


class _Handler(socketserver.StreamRequestHandler):
    timeout = _IDLE_S
    server: _Server

    def handle(self) -> None:
        found = _LINE.fullmatch(self.rfile.readline(128))
        if found is None or not self.server.has_asked(self.request):
            return
        name = found[2].decode()
        with self.server.lock:
            if found[1] == b"DROP":
                self.server.drop(name)
                return
            served = self.server.states.get(name)
        if served is None:
            self.request.sendall(_LENGTH.pack(_NOTHING))
            return
        self.request.sendall(_LENGTH.pack(sum(piece.nbytes for piece in served.pieces)))
        for piece in served.pieces:
            for start in range(0, piece.nbytes, _SLICE):
                self.request.sendall(piece[start : start + _SLICE])


class TcpTransport:
    """A `Transport` over TCP. OSError: the port is taken."""

    def __init__(self, settings: TransferSettings, place: int) -> None:
        self._peers, self._ttl_s = settings.peers, settings.ttl_s
        self._limit, self._wait_s = settings.limit_bytes, settings.wait_s
        self._avoided: dict[Address, float] = {}  # ports that did not answer, until when
        self._server: _Server | None = None
        if settings.sends and (listen := settings.listen) is not None:
            self._server = _Server(listen._replace(port=listen.port + place))
            serve = self._server.serve_forever
            threading.Thread(target=serve, daemon=True, name="kv-states").start()

    def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        self._serve(name, pieces, sum(piece.nbytes for piece in pieces), lambda: None)

    def _serve(
        self,
        name: str,
        pieces: Sequence[memoryview],
        num_bytes: int,
        release: Callable[[], object],
    ) -> None:
        """Serve pieces that take `num_bytes` of the limit; OSError: there is no room for them."""
        assert self._server is not None, "it sends nothing"
        with self._server.lock:
            states = self._server.states
            used = sum(served.num_bytes for served in states.values())
            if used + num_bytes > self._limit:
                raise OSError(ENOSPC, f"states of {used} bytes wait, of {self._limit} at most")
            self._server.drop(name)
            states[name] = _Served(time.monotonic() + self._ttl_s, pieces, num_bytes, release)

    def get(self, name: str, peer: str, largest: int) -> memoryview | None:
        with self._ask("GET", name, peer) as connection, connection.makefile("rb") as file:
            length = int.from_bytes(_read(file, _LENGTH.size), "little")
            if length == _NOTHING:
                return None
            if length > largest:
                raise DamagedFileError("it is too large")
            return _read(file, length)

    def drop(self, names: Sequence[str], peer: str) -> None:
        with suppress(OSError):  # behind it are more ports that may keep a thread waiting
            for name in names:
                with self._ask("DROP", name, peer):
                    pass

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @contextmanager
    def _ask(self, verb: str, name: str, peer: str) -> Iterator[socket.socket]:
        """Ask one of the configured engines, and no other host.

        OSError: it cannot be reached, or has not answered just now.
        """
        host, port = self._peers[peer]
        part = name.rpartition(".")[2]
        address = Address(host, port if part == "head" else port + 1 + int(part))
        if time.monotonic() < self._avoided.get(address, 0.0):
            raise OSError(EHOSTUNREACH, f"{host}:{address.port} has not answered just now")
        try:
            with socket.create_connection(address, _CONNECT_S) as connection:
                connection.settimeout(self._wait_s)
                connection.sendall(f"{verb} {name}\n".encode())
                yield connection
        except TimeoutError:
            self._avoided[address] = time.monotonic() + _AVOID_S
            raise


def _read(file: BufferedReader, count: int) -> memoryview:
    data = memoryview(bytearray(count))
    if (end := file.readinto(data)) < count:
        raise DamagedFileError(f"it ends after {end} of {count} bytes")
    return data
