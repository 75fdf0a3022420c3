# SPDX-License-Identifier: Apache-2.0
"""Collections of garbage in processes that tests start."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu

CHILD = """
import gc
assert not gc.isenabled()
class Ring: pass
def make():
    ring = Ring()
    ring.itself = ring
make()
assert gc.collect() >= 1, "the first collection finds what was made before it"
assert gc.isenabled() and gc.get_freeze_count() > 1000, "imports are not looked through again"
frozen = gc.get_freeze_count()
make()
gc.freeze()
assert gc.get_freeze_count() <= frozen, "what is made later stays with the collector"
assert gc.collect() >= 1, "as does what is garbage"
"""


def test_imports_are_spared_and_garbage_goes() -> None:
    result = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_this_process_collects_as_ever() -> None:
    assert gc.isenabled()
