# SPDX-License-Identifier: Apache-2.0
"""The folder of a host cache: it belongs to one user, and one engine uses it."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO


def lock_folder(root: Path, patience: float) -> BinaryIO:
    """Make a folder that only its owner reads, and lock it until the returned file is closed.

    Waits `patience` seconds for another engine that has the folder.

    Raises:
        ValueError: another engine uses the folder, or it is open to others.
        OSError: it cannot be written to.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(root)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    lock = os.fdopen(os.open(root / "lock", flags, 0o600), "wb")
    try:
        _wait_for(lock, root, patience)
    except BaseException:
        lock.close()
        raise
    return lock


def _check_owner(root: Path) -> None:
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ValueError(
            f"--kv-host-cache-dir: {root} must be a folder of the user of this process, since its "
            "files are read as KV: choose another folder"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"--kv-host-cache-dir: {root} holds the KV of prompts and is open to other users: "
            "chmod 700, or choose another folder"
        )


def _wait_for(lock: BinaryIO, root: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise ValueError(
                    f"--kv-host-cache-dir: another engine uses {root}: give each engine a folder "
                    "of its own"
                ) from None
            time.sleep(0.2)
        else:
            return
