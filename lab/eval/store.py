# SPDX-License-Identifier: Apache-2.0
"""Results in a file of JSON lines, each under a key, written as they come.

An interrupted `python -m lab.eval` continues with them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import vllm_pyramid


class Store:
    """The results of this and earlier runs.

    Args:
        path: of the file, which is made if it does not exist.
        fresh: delete what is in it.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        self._known: dict[str, dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                # The last line of an interrupted run may be cut off.
                if line.startswith("{") and line.endswith("}}"):
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry["result"]
        self._file = path.open("a", encoding="utf-8")
        if path.stat().st_size and not path.read_text(encoding="utf-8").endswith("\n"):
            self._file.write("\n")

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the result under a key; None if there is none."""
        return self._known.get(key)

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result."""
        self._known[key] = result
        self._file.write(json.dumps({"key": key, "result": result}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def key_of(*parts: Any) -> str:
    """Return a short name for values that JSON can write."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def identity_of_model(model: str) -> list[Any]:
    """Return values that change with the model (its files, or its name) and with our code."""
    folder = Path(model)
    files: dict[str, Any] = {}
    if folder.is_dir():
        files = {
            path.name: [path.stat().st_size, path.stat().st_mtime_ns]
            for path in sorted(folder.iterdir())
            if path.is_file()
        }
    return [vllm_pyramid.__version__, hash_of_package(), model, files]


def hash_of_package() -> str:
    """Return a hash of every source file and compiled kernel of the package and of this folder."""
    folders = (Path(vllm_pyramid.__file__).parent, Path(__file__).parent)
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.suffix in (".py", ".so", ".yaml"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
