# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.planted_faults [NAME ...]`: plant a fault, and run tests until one fails.

Each fault goes into a copy of the checkout in a temporary folder; the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
# One policy whose layers keep different lengths, with everything that the core does for it.
TESTS = ("tests/engine/test_battery.py", "-m", "engine and not slow", "-k", "pyramidkv-")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


def copy_checkout(folder: Path) -> None:
    """Copy the files of the checkout that git knows, and the compiled kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    built = (ROOT / "vllm_pyramid").rglob("_kernels*.so")
    names = [*filter(None, listed.stdout.split("\0")), *(str(f.relative_to(ROOT)) for f in built)]
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def plant(fault: Fault, folder: Path) -> None:
    """Apply the edits of a fault.

    Raises:
        ValueError: a text does not stand in its file once: the fault is out of date.
    """
    for edit in fault.edits:
        path = folder / edit.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(edit.old)) != 1:
            raise ValueError(f"{edit.file} has {count} times, and not once: {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def find(fault: Fault, tests: list[str]) -> tuple[str | None, str]:
    """Return the first test that fails with the fault, or None; and what pytest wrote."""
    with tempfile.TemporaryDirectory(prefix="planted-fault-") as name:
        folder = Path(name)
        copy_checkout(folder)
        plant(fault, folder)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    written = done.stdout + done.stderr
    failed = _FAILED.search(written)
    if done.returncode not in (0, 1) and failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{written[-3000:]}")
    return (failed.group(1) if failed else None), written


def main(argv: list[str] | None = None) -> int:
    """Print a row for each fault; return 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m lab.planted_faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=list(TESTS))
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(FAULTS):
        parser.error(f"no faults: {', '.join(sorted(unknown))}")
    missed = 0
    for name in args.names or FAULTS:
        test, _ = find(FAULTS[name], args.tests)
        missed += test is None
        print(f"| {name} | {test or 'not found'} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
