# SPDX-License-Identifier: Apache-2.0
"""A folder and TCP: the same contract, and what each of them refuses."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed import nixl_utils

from tests.plumbing.server import free_ports
from vllm_pyramid.kv_cache.bundle_file import DamagedFileError
from vllm_pyramid.transfer import tcp
from vllm_pyramid.transfer.settings import TransferSettings
from vllm_pyramid.transfer.states import Ticket
from vllm_pyramid.transfer.tcp import TcpTransport
from vllm_pyramid.transfer.transport import Transport, make_transport

STATE = "0123456789abcdef" * 2
HEAD, PART = f"{STATE}.head", f"{STATE}.0"
PIECES = [memoryview(b"one"), memoryview(bytes(100_000)), memoryview(b"two")]
CONTENT = b"".join(PIECES)


def make(role: str = "kv_both", place: int = 0, **extra: Any) -> Transport:
    config = KVTransferConfig(
        kv_connector="PyramidConnector", kv_role=role, kv_connector_extra_config=extra
    )
    return make_transport(TransferSettings.of(config), place)


class Agent:
    """Stands in for NIXL's: reads what is registered, in this process."""

    registered: ClassVar[set[tuple[str, int, int]]] = set()
    ends_as: ClassVar[str] = "DONE"

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.handles = name, 0

    def register_memory(self, ranges: Any, kind: str) -> Any:
        ((address, size, device, _),) = ranges
        assert (kind, device) == ("DRAM", 0)
        self.registered.add((self.name, address, size))
        return address, size

    def deregister_memory(self, found: Any) -> None:
        self.registered.remove((self.name, *found))

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_xfer_descs(self, ranges: Any, kind: str) -> Any:
        (found,) = ranges  # a part is one range, and one list
        return found

    def initialize_xfer(self, verb: str, mine: Any, theirs: Any, remote: str) -> Any:
        assert verb == "READ" and mine[1] == theirs[1]
        for name, (address, size, _) in ((self.name, mine), (remote, theirs)):
            if not any(
                of == name and start <= address and address + size <= start + length
                for of, start, length in self.registered
            ):
                raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.handles += 1
        return mine, theirs

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        (target, size, _), (source, _, _) = handle
        registered = {(start, length) for of, start, length in self.registered if of == self.name}
        assert (target, size) in registered, "it writes to memory that is no longer its"
        if self.ends_as == "DONE":
            ctypes.memmove(target, source, size)
        return self.ends_as

    def release_xfer_handle(self, handle: Any) -> None:
        self.handles -= 1


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    monkeypatch.setattr(Agent, "registered", set())
    monkeypatch.setattr(Agent, "ends_as", "DONE")
    monkeypatch.setattr(nixl_utils, "is_nixl_available", lambda: True)
    monkeypatch.setattr(nixl_utils, "NixlWrapper", Agent, raising=False)
    monkeypatch.setattr(nixl_utils, "nixl_agent_config", lambda **_: None, raising=False)
    return Agent


@pytest.fixture(params=["folder", "tcp", "nixl", "nixl itself"])
def pair(request, tmp_path) -> Iterator[Callable[..., tuple[Transport, Transport, str]]]:
    """`pair(**settings)`: a sender of parts of rank 0, a fetcher, and the sender's name."""
    made: list[Transport] = []
    nixl = request.param.startswith("nixl")
    if request.param == "nixl":
        request.getfixturevalue("agents")
    elif nixl and not nixl_utils.is_nixl_available():
        pytest.skip("the package nixl is not installed")

    def get(**own: Any) -> tuple[Transport, Transport, str]:
        if request.param == "folder":
            where: dict[str, Any] = {"folder": str(tmp_path / "states"), **own}
            found = make("kv_producer", 1, **where), make("kv_consumer", **where)
            made.extend(found)
            return *found, ""
        name = f"127.0.0.1:{free_ports(2)}"
        own = {"nixl": nixl, "limit_gib": 2**-10, **own}
        sender = make("kv_producer", 1, listen=name, **own)
        fetcher = make("kv_consumer", int(nixl), peers=[name], **own)
        made.extend((sender, fetcher))
        return sender, fetcher, name

    yield get
    for one in made:
        one.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def test_what_is_put_is_got_until_it_is_dropped(pair: Any) -> None:
    sender, fetcher, name = pair()
    assert fetcher.get(PART, name, 1 << 20) is None
    sender.put(PART, PIECES)
    for _ in range(2):
        found = fetcher.get(PART, name, 1 << 20)
        assert bytes(found) == CONTENT
        assert not found.readonly, "tensors are made of it"
    fetcher.drop([PART], name)
    until(lambda: fetcher.get(PART, name, 1 << 20) is None)
    fetcher.drop([PART], name)  # it is gone


def test_what_is_too_large_is_not_read(pair: Any) -> None:
    sender, fetcher, name = pair()
    sender.put(PART, PIECES)
    with pytest.raises(DamagedFileError, match="too large"):
        fetcher.get(PART, name, len(CONTENT) - 1)


def test_what_nobody_fetches_is_dropped(pair: Any) -> None:
    sender, fetcher, name = pair(ttl_s=0.3)
    sender.put(PART, PIECES)
    assert fetcher.get(PART, name, 1 << 20) is not None
    until(lambda: fetcher.get(PART, name, 1 << 20) is None)


def test_there_is_a_limit(pair: Any) -> None:
    sender, fetcher, name = pair(limit_gib=150_000 / 2**30)
    sender.put(PART, PIECES)
    with pytest.raises(OSError, match=r"of (the )?150000( bytes)? at most"):
        sender.put(f"{STATE}.1", PIECES)
    fetcher.drop([PART], name)
    until(lambda: fetcher.get(PART, name, 1 << 20) is None)
    sender.put(PART, PIECES)


# The folder -------------------------------------------------------------------------------------


def test_a_folder_keeps_to_its_own_files(tmp_path: Path) -> None:
    """Links are not followed, and files of other names stay."""
    folder = tmp_path / "states"
    transport = make(folder=str(folder), ttl_s=0.2)
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    (folder / PART).symlink_to(secret)
    with pytest.raises(OSError, match=r"symbolic links|Too many levels"):
        transport.get(PART, "", 1 << 20)
    own = folder / "notes.txt"
    own.write_text("mine")
    old = time.time() - 1000
    os.utime(own, (old, old))
    transport.put(HEAD, PIECES)
    assert (folder / HEAD).stat().st_mode & 0o777 == 0o600
    until(lambda: not (folder / HEAD).exists())
    assert own.read_text() == "mine"
    assert secret.read_text() == "a secret"
    transport.close()


def test_a_file_that_cannot_be_removed_keeps_no_other(tmp_path, monkeypatch) -> None:
    tried: list[str] = []
    unlink = os.unlink

    def first_fails(path: str) -> None:
        tried.append(path)
        if path == tried[0]:
            raise PermissionError("not yours")
        unlink(path)

    for name in (HEAD, PART):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(os, "unlink", first_fails)
    transport = make(folder=str(tmp_path), ttl_s=0.2)
    until(lambda: len(list(tmp_path.iterdir())) == 1)
    assert [str(path) for path in tmp_path.iterdir()] == tried[:1]
    transport.close()


# TCP --------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[Transport, int]]:
    """A sender and its port."""
    port = free_ports(1)
    sender = make("kv_producer", listen=f"127.0.0.1:{port}")
    sender.put(HEAD, PIECES)
    yield sender, port
    sender.close()


def ask(port: int, line: bytes) -> bytes:
    """What a server answers to a line, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        found = b""
        while data := connection.recv(1 << 16):
            found += data
        return found


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\n", b"GET", b"GET /etc/passwd\n", f"GET ../{STATE}.head\n".encode()),
        *(f"get {HEAD}\n".encode(), f"GET {HEAD}".encode(), f"PUT {HEAD}\n".encode()),
        *(b"GET " + b"a" * 1000 + b"\n", b"\0" * 64, b"\xff\xfe\n"),
    ],
)
def test_strangers_get_nothing(server: tuple[Transport, int], line: bytes) -> None:
    _, port = server
    assert ask(port, line) == b""
    assert ask(port, f"GET {HEAD}\n".encode())[8:] == CONTENT


def test_a_slow_reader_gets_the_whole_part(server, monkeypatch) -> None:
    """The limit of idle time counts for each slice, not for the whole part."""
    monkeypatch.setattr(tcp._Handler, "timeout", 0.5)
    monkeypatch.setattr(tcp, "_SLICE", 1 << 16)
    sender, port = server
    size, taken, started = 1 << 24, 0, time.monotonic()
    sender.put(PART, [memoryview(bytes(size))])
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        connection.settimeout(5)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"GET {PART}\n".encode())
        while data := connection.recv(1 << 17):
            taken += len(data)
            time.sleep(0.01)
    assert taken == 8 + size
    assert time.monotonic() - started > 1, "it was faster than the limit"


def open_idle(port: int, stack: ExitStack, number: int) -> list[socket.socket]:
    """Connections that say nothing."""
    address = "127.0.0.1", port
    made = [socket.create_connection(address, 5) for _ in range(number)]
    for connection in made:
        stack.enter_context(connection)
    return made


def test_connections_that_say_nothing_give_way(server: tuple[Transport, int]) -> None:
    """To those that ask, the oldest first; one that waits for its answer does not."""
    sender, port = server
    size = 1 << 24
    sender.put(PART, [memoryview(bytes(size))])
    with ExitStack() as stack:
        (slow,) = open_idle(port, stack, 1)
        slow.sendall(f"GET {PART}\n".encode())
        assert slow.recv(8, socket.MSG_WAITALL) == size.to_bytes(8, "little")
        idle = open_idle(port, stack, tcp._MOST_CONNECTIONS)
        for _ in range(3):
            assert ask(port, f"GET {HEAD}\n".encode())[8:] == CONTENT
        assert idle[0].recv(1) == b""
        idle[-1].sendall(f"GET {HEAD}\n".encode())
        assert idle[-1].recv(8, socket.MSG_WAITALL) == len(CONTENT).to_bytes(8, "little")
        taken = 0
        while data := slow.recv(1 << 20):
            taken += len(data)
        assert taken == size


def test_a_line_has_to_come_in_time(server, monkeypatch) -> None:
    """As a whole: single bytes buy no more time."""
    monkeypatch.setattr(tcp, "_ASK_S", 0.2)
    _, port = server
    with ExitStack() as stack:
        (slow,) = open_idle(port, stack, 1)
        slow.settimeout(0.1)
        end = time.monotonic() + 5
        while True:
            assert time.monotonic() < end, "it was not closed"
            try:
                slow.sendall(b"G")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_an_engine_asks_its_peers_alone(server: tuple[Transport, int]) -> None:
    """Tickets name peers; a name that is not configured is a mistake of the caller."""
    _, port = server
    fetcher = make("kv_consumer", peers=["127.0.0.1:1"])
    with pytest.raises(KeyError):
        fetcher.get(HEAD, f"127.0.0.1:{port}", 1 << 20)
    with pytest.raises(OSError, match=r"refused|Connection"):
        fetcher.get(HEAD, "127.0.0.1:1", 1 << 20)
    fetcher.drop([HEAD], "127.0.0.1:1")  # no server listens there


def test_a_client_cannot_have_many_ports_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket says how many ranks there are; each unanswered port keeps a thread waiting."""
    port, tried = free_ports(3), []
    sender = make("kv_producer", listen=f"127.0.0.1:{port}")
    sender.put(HEAD, PIECES)
    connect = socket.create_connection

    def noted(address: Any, *more: Any) -> socket.socket:
        tried.append(address[1] - port)
        return connect(address, *more)

    monkeypatch.setattr(socket, "create_connection", noted)
    fetcher = make("kv_consumer", peers=[f"127.0.0.1:{port}"])
    fetcher.drop(Ticket(STATE, f"127.0.0.1:{port}", 256).names, f"127.0.0.1:{port}")
    assert tried == [0, 1]
    until(lambda: fetcher.get(HEAD, f"127.0.0.1:{port}", 1 << 20) is None)
    sender.close()


def test_a_port_that_does_not_answer_is_tried_once_in_a_while(monkeypatch) -> None:
    """Each try holds a thread that other requests need, and clients choose how many there are."""
    tried = []

    def silent(address: Any, *_: Any) -> socket.socket:
        tried.append(address)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(tcp, "_AVOID_S", 0.3)
    fetcher = make("kv_consumer", peers=["127.0.0.1:7001", "127.0.0.1:7100"])
    for _ in range(3):
        with pytest.raises(OSError, match=r"timed out|not answered"):
            fetcher.get(HEAD, "127.0.0.1:7001", 1 << 20)
        fetcher.drop([HEAD, PART], "127.0.0.1:7001")
    with pytest.raises(TimeoutError):
        fetcher.get(HEAD, "127.0.0.1:7100", 1 << 20)
    assert tried == [("127.0.0.1", 7001), ("127.0.0.1", 7100)]
    time.sleep(0.3)
    with pytest.raises(TimeoutError):
        fetcher.get(HEAD, "127.0.0.1:7001", 1 << 20)


@pytest.mark.parametrize("sent", [0, 3, 8, 1000])
def test_an_engine_that_ends_meanwhile(sent: int) -> None:
    """The connection closes in the middle of a state."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(((5000).to_bytes(8, "little") + bytes(5000))[:sent])

    thread = threading.Thread(target=serve)
    thread.start()
    fetcher = make("kv_consumer", peers=[f"127.0.0.1:{port}"])
    with pytest.raises(DamagedFileError, match="ends after"):
        fetcher.get(HEAD, f"127.0.0.1:{port}", 1 << 20)
    thread.join()
    listener.close()


def test_an_engine_that_says_nothing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    name = f"127.0.0.1:{listener.getsockname()[1]}"
    fetcher = make("kv_consumer", peers=[name], wait_s=0.2)
    with pytest.raises(TimeoutError):
        fetcher.get(HEAD, name, 1 << 20)
    with pytest.raises(OSError, match="has not answered just now"):
        fetcher.get(HEAD, name, 1 << 20)
    listener.close()


def test_each_rank_has_a_port(server: tuple[Transport, int]) -> None:
    first = free_ports(3)
    name = f"127.0.0.1:{first}"
    senders = [make("kv_producer", place, listen=name) for place in range(3)]
    for place, part in enumerate(("head", "0", "1")):
        senders[place].put(f"{STATE}.{part}", [memoryview(part.encode())])
    fetcher = make("kv_consumer", peers=[name])
    for part in ("head", "0", "1"):
        found = fetcher.get(f"{STATE}.{part}", name, 100)
        assert found is not None
        assert bytes(found) == part.encode()
    for sender in senders:
        sender.close()
    with pytest.raises(OSError, match=r"refused|Connection"):
        fetcher.get(HEAD, name, 100)


def test_a_port_that_is_taken_is_named(server: tuple[Transport, int]) -> None:
    _, port = server
    with pytest.raises(OSError, match=str(port)):
        make("kv_producer", listen=f"127.0.0.1:{port}")


# NIXL -------------------------------------------------------------------------------------------


@pytest.fixture
def nixl_pair(agents: type[Agent]) -> Iterator[tuple[Transport, Transport, str]]:
    """A sender of parts with room for three, and a fetcher, over stand-ins."""
    name = f"127.0.0.1:{free_ports(2)}"
    room = 3 * len(CONTENT) / 2**30
    sender = make("kv_producer", 1, listen=name, nixl=True, limit_gib=room)
    fetcher = make("kv_consumer", 1, peers=[name], nixl=True, wait_s=0.2)
    yield sender, fetcher, name
    sender.close()
    fetcher.close()


def test_an_empty_part_takes_no_memory(nixl_pair: Any) -> None:
    sender, fetcher, name = nixl_pair
    empty = f"{STATE[:-1]}a.0"
    sender.put(PART, PIECES)
    sender.put(empty, [])
    assert bytes(fetcher.get(PART, name, 1 << 20)) == CONTENT
    with pytest.raises(DamagedFileError):
        fetcher.get(empty, name, 1 << 20)
    fetcher.drop([empty], name)
    until(lambda: fetcher.get(empty, name, 1 << 20) is None)
    assert list(sender._memory._ends) == [0]


def test_ranges_of_memory_are_used_again(nixl_pair: Any) -> None:
    """What is dropped in the middle makes room for another part, and nothing else moves."""
    sender, fetcher, name = nixl_pair
    parts = [f"{STATE[:-1]}{number}.0" for number in range(4)]
    for number, part in enumerate(parts[:3]):
        sender.put(part, [memoryview(bytes([number]) * len(CONTENT))])
    with pytest.raises(OSError, match="at most"):
        sender.put(parts[3], PIECES)
    fetcher.drop([parts[1]], name)
    until(lambda: fetcher.get(parts[1], name, 1 << 20) is None)
    sender.put(parts[3], PIECES)
    found = [bytes(fetcher.get(part, name, 1 << 20)) for part in (parts[0], parts[2], parts[3])]
    assert found == [bytes(len(CONTENT)), bytes([2]) * len(CONTENT), CONTENT]
    mine = [one for one in Agent.registered if one[0] == sender._agent.name]
    assert len(mine) == 1, "memory is registered once, whatever is sent"


def test_a_transfer_that_fails(nixl_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory stays registered."""
    sender, fetcher, name = nixl_pair
    sender.put(PART, PIECES)
    before = set(Agent.registered)
    monkeypatch.setattr(Agent, "ends_as", "ERR")
    with pytest.raises(OSError, match="ended as ERR"):
        fetcher.get(PART, name, 1 << 20)
    assert Agent.registered == before and fetcher._agent.handles == 0


def test_a_transfer_that_does_not_end_in_time(nixl_pair, monkeypatch) -> None:
    """It may still write, so its memory stays until it has ended."""
    sender, fetcher, name = nixl_pair
    sender.put(PART, PIECES)
    before = set(Agent.registered)
    monkeypatch.setattr(Agent, "ends_as", "PROC")
    with pytest.raises(OSError, match=r"read nothing in 0.2 s"):
        fetcher.get(PART, name, 1 << 20)
    (late,) = fetcher._late
    address = late.data.ctypes.data, len(CONTENT)
    assert Agent.registered - before == {(fetcher._agent.name, *address)}
    monkeypatch.setattr(Agent, "ends_as", "DONE")
    assert bytes(fetcher.get(PART, name, 1 << 20)) == CONTENT
    assert bytes(late.data) == CONTENT and not fetcher._late
    assert Agent.registered == before and fetcher._agent.handles == 0


def test_an_agent_that_knows_no_such_memory(nixl_pair: Any) -> None:
    sender, fetcher, name = nixl_pair
    sender.put(PART, PIECES)
    sender._agent.deregister_memory((sender._memory.data.ctypes.data, 3 * len(CONTENT)))
    with pytest.raises(OSError, match="could not read"):
        fetcher.get(PART, name, 1 << 20)


@pytest.mark.parametrize("told", [b"", b"1", bytes(16), bytes(20)])
def test_an_engine_that_does_not_say_where(nixl_pair: Any, told: bytes) -> None:
    sender, fetcher, name = nixl_pair
    TcpTransport.put(sender, PART, [memoryview(told)])
    with pytest.raises(DamagedFileError, match=r"does not say where|too large"):
        fetcher.get(PART, name, 1 << 20)


def test_without_nixl_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_utils, "is_nixl_available", lambda: False)
    with pytest.raises(ValueError, match=r"install vllm-pyramid\[nixl\]"):
        make("kv_consumer", 1, peers=["127.0.0.1:1"], nixl=True)
    with pytest.raises(ValueError, match="needs addresses, no folder"):
        make(folder="/tmp/x", nixl=True)
