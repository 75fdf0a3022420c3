# SPDX-License-Identifier: Apache-2.0
"""Processes that wait for tasks."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from vllm_pyramid.tools.child_process import Child

# Says what memory PyTorch asks the kernel for: a tensor is made, then looked up in the mappings.
CODE = """
import json, re, sys, torch
sys.stdin.readline()
data = torch.ones(1 << 26, dtype=torch.uint8)
flags, inside = None, False
for line in open("/proc/self/smaps"):
    if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
        inside = int(match[1], 16) <= data.data_ptr() < int(match[2], 16)
    elif inside and line.startswith("VmFlags:"):
        flags = line.split()[1:]
print("\\n@vllm-pyramid " + json.dumps({"done": flags}), flush=True)
"""


@pytest.mark.parametrize(("variable", "wanted"), [(None, True), ("0", False)])
def test_memory_of_engines_in_a_child_is_in_huge_pages(variable, wanted, monkeypatch) -> None:
    """As that of the workers of a server; who runs the bench can say otherwise."""
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if variable is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", variable)
    with Child([sys.executable, "-c", CODE], "the tensor's process", offline=True) as child:
        (message,) = child.ask({})
    assert ("hg" in message["done"]) is wanted


TERMINATED = """
import os, signal
from vllm_pyramid.tools.child_process import orderly_termination
with orderly_termination():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("unwound")
"""


def test_a_second_sigterm_does_not_break_off_the_unwinding() -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "unwound\n")


def test_a_process_that_ends_shows_its_log() -> None:
    """What it said, though nanobind's report of leaks comes behind it and is longer."""
    code = """
import sys
print("to stderr", file=sys.stderr)
print("nanobind: leaked 64 types!", *[' - leaked type "X"'] * 99, sep="\\n", file=sys.stderr)
sys.exit(1)
"""
    with Child([sys.executable, "-c", code], "the process", offline=True) as process:
        said = str(process.error())
    assert "the process failed with exit status 1" in said
    assert "to stderr" in said and "leaked" not in said
