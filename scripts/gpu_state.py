# SPDX-License-Identifier: Apache-2.0
"""A run of scripts/gpu_lease.py on disk, and its processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "VLLM_PYRAMID_GPU_LEASE"  # an environment variable of all processes of a run
LARGEST_FILE = 2 << 20  # bytes of a log or result that comes home
KEPT = {".csv", ".json", ".log", ".md", ".out", ".txt", ".xml"}
UNDER_WAY, AT_DEADLINE = "under way", "ended at its deadline"
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
DONE = ("passed", "failed", AT_DEADLINE)


class State:
    """What is known of a run, in RUN/state.json."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "state.json"
        self.data: dict[str, Any] = {}

    def read(self) -> State:
        """Read it again."""
        self.data = json.loads(self.path.read_text())
        return self

    def write(self) -> None:
        """Write it; a reader finds the old one or the new one."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        new.replace(self.path)

    @property
    def phases(self) -> dict[str, dict[str, Any]]:
        """The phases that have begun, in that order."""
        found: dict[str, dict[str, Any]] = self.data["phases"]
        return found

    def ended(self) -> list[str]:
        """Return the names of the phases that have ended, in whatever way."""
        return [name for name, entry in self.phases.items() if entry["status"] != UNDER_WAY]

    def done(self) -> list[str]:
        """Return the names of those that do not begin again by themselves."""
        return [name for name, entry in self.phases.items() if entry["status"] in DONE]

    def bring_home(self) -> None:
        """Write RUN/home: the state, the check's results, the logs; each file appears whole."""
        home, new = self.folder / "home", self.folder / "home.new"
        home.mkdir(exist_ok=True)
        new.mkdir(exist_ok=True)
        with tarfile.open(new / "logs.tar.gz", "w:gz") as archive:
            for path in sorted(self.folder.rglob("*")):
                inside = path.relative_to(self.folder)
                folders = inside.parts[:-1]
                if {"home", "home.new"} & {*folders} or any(
                    name.endswith(".cache") for name in folders
                ):
                    continue
                with contextlib.suppress(OSError):  # of a process that still ends
                    if path.suffix in KEPT and path.stat().st_size <= LARGEST_FILE:
                        archive.add(path, str(inside))
        (new / "state.json").write_text(json.dumps(self.data, indent=1) + "\n")
        if (self.folder / "check.json").exists():
            shutil.copyfile(self.folder / "check.json", new / "check.json")
        for path in new.iterdir():
            path.replace(home / path.name)


@contextlib.contextmanager
def only_one(folder: Path, seconds: float = 0) -> Iterator[None]:
    """Hold the run's lock; raise BlockingIOError if another process does for so long."""
    until = time.monotonic() + seconds
    with (folder / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # `is_driven` holds it for a moment
                if time.monotonic() >= until:
                    raise
                time.sleep(0.01)
        yield


def is_driven(folder: Path) -> bool:
    """Return whether a run's driver is alive."""
    try:
        with only_one(folder):
            return False
    except BlockingIOError:
        return True


def adopt_orphans() -> None:
    """Become the parent of processes of this one's family whose parents end."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl: orphans cannot be adopted")


def family(roots: set[int]) -> set[int]:
    """Return processes and all that they have started, as far as their parents are alive."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found, new = set(roots), list(roots)
    while new:
        more = [child for child in children.get(new.pop(), ()) if child not in found]
        found.update(more)
        new += more
    return found


class Marked:
    """The processes of one kind of a run, and all that they have started, in whatever session.

    They are known by an environment variable, and where they have written over it (as those do that
    give themselves a title) by their parents.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.value = f"{folder.resolve()}:{kind}"
        self._entry = f"{MARK}={self.value}".encode()

    def ids(self) -> set[int]:
        """Return those that are alive."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # another user's, or it has ended
                if self._entry in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
        return family(found)

    def signal(self, sign: signal.Signals) -> None:
        """Send all a signal, until there are no others."""
        _signal(self.ids, sign)

    def kill(self) -> None:
        """Kill all, those too whose parents die meanwhile."""
        self.signal(signal.SIGSTOP)  # none starts others then, and parents stay
        self.signal(signal.SIGKILL)

    def start(self, line: list[str] | str, log: Path) -> subprocess.Popen[bytes]:
        """Start one that leads a session; raise OSError if there is no such program."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("ab") as stream:
            return subprocess.Popen(
                line,
                shell=isinstance(line, str),
                cwd=ROOT,
                env=os.environ | {MARK: self.value, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def kill_orphans(but: Marked) -> None:
    """Kill all that this process has started or adopted, and that is not `but`."""

    def others() -> set[int]:
        return family({os.getpid()}) - {os.getpid()} - but.ids()

    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for process_id in _signal(others, sign):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process_id, os.WNOHANG)


def _signal(ids: Callable[[], set[int]], sign: signal.Signals) -> set[int]:
    """Send a signal to processes, until there are no others; return to which."""
    before: set[int] = set()
    while new := ids() - before:
        for process_id in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, sign)
        before |= new
    return before
