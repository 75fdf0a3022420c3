# SPDX-License-Identifier: Apache-2.0
"""Python in a process of its own, from the repository's root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, unset: str = "", **environment: str) -> tuple[int, str, str]:
    """Return status, output and errors. `unset`: a variable that the process does not see."""
    inherited = {key: value for key, value in os.environ.items() if key != unset}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr
