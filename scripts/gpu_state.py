# SPDX-License-Identifier: Apache-2.0
"""A run of scripts/gpu_lease.py on disk, and its processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "VLLM_PYRAMID_GPU_LEASE"  # an environment variable of all processes of a run
LARGEST_FILE = 2 << 20  # bytes of a log or result that comes home
KEPT = {".csv", ".json", ".log", ".md", ".out", ".xml"}
UNDER_WAY, AT_DEADLINE = "under way", "ended at its deadline"
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
        """Write RUN/home: the state, the check's results, the logs."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        packed = home / "logs.tar.gz.new"
        with tarfile.open(packed, "w:gz") as archive:
            for path in sorted(self.folder.rglob("*")):
                inside = path.relative_to(self.folder)
                folders = inside.parts[:-1]
                if "home" in folders or any(name.endswith(".cache") for name in folders):
                    continue
                with contextlib.suppress(OSError):  # of a process that still ends
                    if path.suffix in KEPT and path.stat().st_size <= LARGEST_FILE:
                        archive.add(path, str(inside))
        packed.replace(home / "logs.tar.gz")
        for name in ("check.json", "state.json"):
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, home / name)


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


class Marked:
    """The processes of one kind of a run, and all that they have started, in whatever session."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.value = f"{folder.resolve()}:{kind}"
        self._entry = f"{MARK}={self.value}".encode()

    def ids(self) -> list[int]:
        """Return those that are alive."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # another user's, or it has ended
                if self._entry in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def signal(self, sign: signal.Signals) -> None:
        """Send all a signal, until there are no others."""
        before: set[int] = set()
        while new := set(self.ids()) - before:
            for process_id in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, sign)
            before |= new

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
