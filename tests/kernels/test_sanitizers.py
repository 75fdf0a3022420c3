# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels without instruction sets, under the compiler's sanitizers.

These are short versions of `make sanitize` and `make sanitize-threads`, which build all instruction
sets and run all tests of the kernels. A sanitizer that reported nothing would pass them, so each
has to find one mistake first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
UNITS = [
    path
    for path in sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
    if not path.name.startswith("kernels_") or path.stem == "kernels_portable"
]
READ_TOO_MUCH = """
import torch
from vllm_pyramid.kernels.cpu import library
cells = torch.zeros(1000)
library.load().pyr_read(cells.data_ptr(), 4096, 1)
"""
# Two threads write other rows to one slot.
WRITE_TWICE = """
import torch
from vllm_pyramid.kernels.cpu import functions as cpu
torch.set_num_threads(2)
rows, cache = torch.randn(4096, 2, 64), torch.zeros(2, 1, 2, 16, 64)
cpu.reshape_and_cache(rows, rows, cache[0], cache[1], torch.arange(4096) % 16)
"""


@dataclass(frozen=True)
class Sanitizer:
    """What one sanitizer needs.

    Attributes:
        flags: of the compiler. runtimes: libraries that a Python without it loads first.
        options: environment variables. mistake: code that it must stop, with what it `says`.
        tests: the expression that chooses tests. wrapper: what starts Python.
    """

    flags: tuple[str, ...]
    runtimes: tuple[str, ...]
    options: dict[str, str]
    mistake: str
    says: str
    tests: str
    wrapper: tuple[str, ...] = field(default=())


SANITIZERS = {
    "address": Sanitizer(
        (
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined",
            "-fno-sanitize=null,alignment,object-size,bounds",
            "-fno-sanitize-address-use-after-scope",
            "-fno-wrapv",
        ),
        ("libasan.so", "libubsan.so"),
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        READ_TOO_MUCH,
        "heap-buffer-overflow",
        "nothing or few_rows or no_requests or raise or sinks_far or windows or to_come",
    ),
    "thread": Sanitizer(
        ("-fsanitize=thread",),
        ("libtsan.so",),
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66"},
        WRITE_TWICE,
        "data race",
        "nothing or few_rows or windows or threads or reductions or to_come",
        ("setarch", "-R"),
    ),
}


@pytest.mark.parametrize("name", SANITIZERS)
def test_kernels(name: str, tmp_path: Path) -> None:
    """Build the library, let the sanitizer find a mistake, and then nothing in the kernels."""
    sanitizer = SANITIZERS[name]
    runtimes = []
    for program in ("g++", *sanitizer.wrapper[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} on this machine")
    for library in sanitizer.runtimes:
        question = ["g++", f"-print-file-name={library}"]
        path = subprocess.run(question, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"this g++ has no {library}")
        runtimes.append(path)
    target = tmp_path / "_kernels.so"
    options = ["-shared", "-fPIC", "-std=c++17", "-O1", "-g1", "-w", "-fvisibility=hidden"]
    sources = [str(path) for path in UNITS]
    command = ["g++", *options, *sanitizer.flags, *sources, "-o", str(target)]
    subprocess.run(command, check=True, cwd=ROOT)
    environment = {
        **{key: value for key, value in os.environ.items() if key != "VLLM_PYRAMID_CPU_ISA"},
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": ":".join(runtimes),
        "OMP_NUM_THREADS": "2",
        "VLLM_PYRAMID_CPU_LIBRARY": str(target),
        **sanitizer.options,
    }

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*sanitizer.wrapper, sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )

    caught = python("-c", sanitizer.mistake)
    assert caught.returncode != 0 and sanitizer.says in caught.stderr, caught.stderr
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys"]
    files = ["test_cpu_attention.py", "test_cpu_eviction.py", "test_topn.py", "test_key_mass.py"]
    files += ["test_key_scores.py", "test_cpu_observed_expected.py"]
    files += ["test_cpu_future_queries.py"]
    paths = [f"tests/kernels/{file}" for file in files]
    result = python("-m", "pytest", *quiet, "-k", sanitizer.tests, *paths)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout, result.stdout
