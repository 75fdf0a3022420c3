# SPDX-License-Identifier: Apache-2.0
"""Remember, by name, where the turns of a conversation ended (`kv_session`).

A turn is known by a hash of the prompt up to its end, so that a prompt which branches off or was
edited resumes the longest turn that it still begins with. No token is kept.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from vllm_pyramid.frontend.last_turn import LastTurn
from vllm_pyramid.policy.limits import (
    MAX_SESSION_TURNS,
    MAX_SESSIONS,
    MAX_SESSIONS_TURNS,
    MAX_TURNS,
)
from vllm_pyramid.policy.resumed import DIFFERS, UNKNOWN

NO_TENANT = "none"


class Prompt(NamedTuple):
    """What a turn is known by.

    Attributes:
        tokens: ids. inputs: where images and the like begin, in order, and what names them.
        adapter: the name of the LoRA adapter, or empty.
    """

    tokens: Sequence[int]
    inputs: tuple[tuple[int, str], ...] = ()
    adapter: str = ""

    def digests(self, ends: Iterable[int]) -> dict[int, bytes]:
        """Return a hash of the prompt up to each end, in one pass over the tokens."""
        known = sha256(f"{len(self.adapter)} {self.adapter}".encode("utf-8", "surrogatepass"))
        found: dict[int, bytes] = {}
        for start, end in pairwise((0, *sorted(set(ends)))):
            known.update(array("q", self.tokens[start:end]).tobytes())
            own = known.copy()
            for position, name in self.inputs:
                if position < end:
                    own.update(f"{position} {len(name)} {name}".encode("utf-8", "surrogatepass"))
            found[end] = own.digest()
        return found

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return a number for each token, in which images and the adapter have changed theirs."""
        numbers = np.array(self.tokens, np.int64)
        for position, name in self.inputs:
            numbers[position : position + 1] ^= _number(name)
        if self.adapter:
            numbers[:1] ^= _number(self.adapter)
        return numbers


def _number(name: str) -> int:
    return crc32(name.encode("utf-8", "surrogatepass")) << 20


class Key(NamedTuple):
    """The name of a session, or of an application, among those of one tenant."""

    tenant: str
    name: str

    def replica(self, count: int) -> int:
        """Return which of `count` replicas serves the session: always the same one."""
        return crc32(f"{self.tenant} {self.name}".encode()) % count


class Tenants:
    """Names tenants, those who share a salt and an API key, so that no name leads to these."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)  # a salt may be a word that could be tried out

    def name(self, salt: str | None, client: str = "") -> str:
        """Return the name of the tenant with this salt, another one in each process.

        Args:
            client: which of several API keys the request has; empty where there is only one.
        """
        if not salt and not client:
            return NO_TENANT
        text = f"{client} {salt or ''}".encode("utf-8", "surrogatepass")
        return blake2b(text, key=self._secret, digest_size=8).hexdigest()


class Found(NamedTuple):
    """What a session knows of a prompt.

    Attributes:
        turns: where the prompt's earlier turns ended, in order. digest: of the whole prompt.
        before: the digest of the latest of these turns; None if there are none.
        why: why it does not continue the session's last turn, as `policy.resumed.WHY_KEY` carries
            it; empty if it does, or continues another branch to its end.
        terms: of the session's last turn (`LastTurn`), if it continues that.
    """

    turns: tuple[int, ...]
    digest: bytes
    before: bytes | None
    why: tuple[str | int, ...] = ()
    terms: bytes | None = None


class _Turn(NamedTuple):
    end: int
    before: bytes | None  # the turn that it continues


@dataclass
class _Session:
    """The turns of one session, as a tree.

    Attributes:
        turns: by the hash of the prompt. Whenever a turn is used, so are those before it, after it;
            the least recently used one is therefore never one that another continues.
        used: when it was used last, in seconds. last: its latest prompt.
    """

    used: float
    last: LastTurn | None = None
    turns: OrderedDict[bytes, _Turn] = field(default_factory=OrderedDict)

    def chain(self, last: bytes | None) -> list[bytes]:
        """Return a turn and those before it, the latest first."""
        found = []
        while last is not None:
            found.append(last)
            last = self.turns[last].before
        return found

    def find(self, prompt: Prompt) -> Found:
        """Return the longest chain of turns that the prompt continues."""
        length = len(prompt.tokens)
        ends = {turn.end for turn in self.turns.values() if turn.end < length}
        digests = prompt.digests((*ends, length))
        own = digests.pop(length)
        if own in self.turns:  # sent again: its turns are what they were
            last = self.turns[own].before
        else:
            known = [end for end, digest in digests.items() if digest in self.turns]
            last = digests[max(known)] if known else None
        turns = tuple(self.turns[digest].end for digest in reversed(self.chain(last)))
        latest = self.last
        if latest is None:
            return Found(turns, own, last, (UNKNOWN,))
        if latest.digest in (own, last):
            return Found(turns, own, last, terms=latest.terms)
        if last is not None and all(turn.before != last for turn in self.turns.values()):
            return Found(turns, own, last)  # the end of another branch
        start, stop = latest.difference(prompt.numbers())
        return Found(turns, own, last, (DIFFERS, start, stop, latest.length))


class Sessions:
    """The sessions of one front end.

    At most `MAX_SESSIONS` with `MAX_SESSIONS_TURNS` turns in all; when there are more, the tenant
    that has most of them forgets the session that it used least recently.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._lock = threading.Lock()  # prompts of Python programs are read in threads
        self._tenants = Tenants()
        self._sessions: OrderedDict[Key, _Session] = OrderedDict()  # least recently used first
        self._num_sessions: Counter[str] = Counter()
        self._num_turns: Counter[str] = Counter()

    def key(self, name: str, salt: str | None, client: str = "") -> Key:
        """Return the key of a session: another salt or client is another tenant."""
        return Key(self._tenants.name(salt, client), name)

    def find(self, key: Key, prompt: Prompt) -> Found:
        """Return the turns that a prompt of the session continues; none in an unknown session.

        Behind as many turns as a request can have, a prompt is a first turn again.
        """
        with self._lock:
            self._expire()
            found = self._sessions.get(key, _Session(0.0)).find(prompt)
        return found if len(found.turns) < MAX_TURNS else Found((), found.digest, None, (UNKNOWN,))

    def record(self, key: Key, prompt: Prompt, found: Found, terms: bytes = b"") -> None:
        """Remember a prompt as a turn of the session; `found` is what `find` returned for it."""
        last = LastTurn.of(prompt.numbers(), found.digest, terms)
        with self._lock:
            self._record(key, last, found)

    def _record(self, key: Key, latest: LastTurn, found: Found) -> None:
        session = self._sessions.setdefault(key, _Session(0.0))
        if not session.turns:
            self._num_sessions[key.tenant] += 1
        before = len(session.turns)
        # Another request may have dropped the turns before: then they are known no longer.
        last = found.before if found.before in session.turns else None
        session.turns.setdefault(found.digest, _Turn(latest.length, last))
        session.last = latest
        for digest in session.chain(found.digest):
            session.turns.move_to_end(digest)
        if len(session.turns) > MAX_SESSION_TURNS:
            session.turns.popitem(last=False)
        self._num_turns[key.tenant] += len(session.turns) - before
        session.used = self._clock()
        self._sessions.move_to_end(key)
        while len(self._sessions) > MAX_SESSIONS:
            self._drop_one_of(self._num_sessions, key)
        while self._num_turns.total() > MAX_SESSIONS_TURNS:
            self._drop_one_of(self._num_turns, key)

    def listing(self) -> list[dict[str, Any]]:
        """Return what is remembered, for the operator: the session used most recently first."""
        with self._lock:
            self._expire()
            now = self._clock()
            return [
                {
                    "session": key.name,
                    "tenant": key.tenant,
                    "turns": len(session.turns),
                    "tokens": max(turn.end for turn in session.turns.values()),
                    "idle_s": round(now - session.used, 1),
                    "expires_in_s": round(session.used + self._ttl_s - now, 1),
                }
                for key, session in reversed(self._sessions.items())
            ]

    def forget(self, name: str | None = None, tenant: str | None = None) -> int:
        """Forget the sessions of a name, a tenant or both, by default all; return how many."""
        with self._lock:
            self._expire()
            gone = [
                key
                for key in self._sessions
                if name in (None, key.name) and tenant in (None, key.tenant)
            ]
            for key in gone:
                self._drop(key)
            return len(gone)

    def _expire(self) -> None:
        """Forget the sessions that were not used for as long as they live."""
        oldest = self._clock() - self._ttl_s
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if session.used > oldest:
                return
            self._drop(key)

    def _drop_one_of(self, counts: Counter[str], current: Key) -> None:
        """Forget a session of the tenant with the highest count, and not the current one."""
        most = max(counts.values())
        others = (key for key in self._sessions if key != current)
        first = next(others)
        if counts[first.tenant] != most:
            first = next((key for key in others if counts[key.tenant] == most), first)
        self._drop(first)

    def _drop(self, key: Key) -> None:
        session = self._sessions.pop(key)
        for counts, number in ((self._num_sessions, 1), (self._num_turns, len(session.turns))):
            counts[key.tenant] -= number
            if not counts[key.tenant]:
                del counts[key.tenant]
