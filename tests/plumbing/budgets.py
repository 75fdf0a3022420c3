# SPDX-License-Identifier: Apache-2.0
"""Fail tests that take longer than their tier allows, and files whose tests do in sum.

Times are processor seconds of this process and of children that ended: on a machine with other
work they change less than the clock's. Importing torch or vLLM is not a test's fault, so a test in
which either is imported is not judged.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

# Seconds of one test by its mark, and of a file's tests together. `long` and `slow` tests have no
# budget, and do not count for their file.
OF_A_TEST = {"cpu": 2.0, "engine": 15.0}
OF_A_FILE = 60.0
WITHOUT = ("long", "slow")
HEAVY_IMPORTS = ("torch", "vllm", "transformers", "ray")


def used_seconds() -> float:
    """Return processor seconds of this process and of the children that it waited for."""
    return sum(os.times()[:4])


class Budgets:
    """Seconds of the tests that this process ran, by test and by file.

    Args:
        scale: multiplies the budgets, for slow machines.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.of_tests: dict[str, float] = {}
        self.of_files: defaultdict[str, float] = defaultdict(float)

    def imported(self) -> set[str]:
        """Return which heavy modules this process has imported."""
        return {name for name in HEAVY_IMPORTS if name in sys.modules}

    def judge(self, item: pytest.Item, seconds: float, *, imports: bool) -> str | None:
        """Count a test's seconds and return what is over its budget; None if nothing is.

        Args:
            imports: whether a heavy module was imported while it ran.
        """
        file = item.nodeid.partition("::")[0]
        self.of_tests[item.nodeid] = seconds
        if imports or any(item.get_closest_marker(mark) for mark in WITHOUT):
            return None
        self.of_files[file] += seconds
        for mark, most in OF_A_TEST.items():
            if item.get_closest_marker(mark) and seconds > most * self.scale:
                return f"took {seconds:.1f} s; a test marked {mark} has {most:.0f} s"
        if self.of_files[file] > OF_A_FILE * self.scale:
            return f"{file} took {self.of_files[file]:.0f} s so far; a file has {OF_A_FILE:.0f} s"
        return None

    def write(self, folder: Path, worker: str) -> None:
        """Write the seconds of all tests of this process into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{worker}.json").write_text(json.dumps(self.of_tests, indent=1))
