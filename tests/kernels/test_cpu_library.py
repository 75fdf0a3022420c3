# SPDX-License-Identifier: Apache-2.0
"""The library of the C++ kernels: loading, instruction sets, threads, and its absence."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.every_kernel import contracts_of
from tests.kernels.processes import run_python
from vllm_pyramid import kernels as ops
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.cpu import library as cpu_library

REFERENCES = [(*found, True) for found in contracts_of(reference)]
FUNCTIONS = [*((*found, False) for found in contracts_of(cpu)), *REFERENCES]


@pytest.mark.parametrize(("contract", "module", "name", "is_reference"), FUNCTIONS)
def test_signatures_are_the_contract(contract, module, name, is_reference) -> None:
    """Compare parameters exactly; only the reference has one more, its `compute_dtype`."""
    wanted = inspect.signature(getattr(contract, name)).parameters
    found = inspect.signature(getattr(module, name)).parameters
    assert [*found.values()][: len(wanted) - 1] == [*wanted.values()][1:]
    extra = [*found][len(wanted) - 1 :]
    assert extra in ([], ["compute_dtype"] if is_reference else [])


@pytest.mark.long
def test_variable_names_another_build(tmp_path: Path) -> None:
    code = "from vllm_pyramid.kernels.cpu import functions as cpu; cpu.load_error()"
    _, _, errors = run_python("-c", code, VLLM_PYRAMID_CPU_LIBRARY=str(tmp_path / "nothing.so"))
    assert "nothing.so: there is no such file" in errors
    code = "from vllm_pyramid.kernels.cpu import library; print(library.load()._name)"
    copy = tmp_path / "copy.so"
    copy.write_bytes(cpu_library._find().read_bytes())
    _, out, errors = run_python("-c", code, VLLM_PYRAMID_CPU_LIBRARY=str(copy))
    assert out.strip() == str(copy), errors


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the library, as on a machine where no compiler built it."""
    monkeypatch.setattr(cpu_library, "EXTENSION_SUFFIXES", [".missing"])
    monkeypatch.delenv(cpu_library.LIBRARY_VARIABLE, raising=False)
    monkeypatch.delenv(ops.REFERENCE_VARIABLE, raising=False)
    cpu_library.load.cache_clear()
    ops.get_ops.cache_clear()
    yield
    monkeypatch.undo()
    cpu_library.load.cache_clear()
    ops.get_ops.cache_clear()
    assert ops.get_ops("cpu") is cpu


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_without_the_library_there_are_no_kernels(no_library, monkeypatch, value) -> None:
    monkeypatch.setenv(ops.REFERENCE_VARIABLE, value)
    with pytest.raises(RuntimeError, match=r"C\+\+17 compiler and reinstall.*_REFERENCE=1 to run"):
        ops.get_ops("cpu")
    assert cpu.load_error()


def test_the_reference_is_allowed_with_one_warning(no_library, monkeypatch) -> None:
    monkeypatch.setenv(ops.REFERENCE_VARIABLE, "1")
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(ops.logger, "level", logging.WARNING)
    ops.logger.addHandler(handler)
    try:
        assert ops.get_ops("cpu") is reference
        assert ops.get_ops("cpu") is reference
        (record,) = records
        assert "C++17 compiler" in record.getMessage()
    finally:
        ops.logger.removeHandler(handler)


def test_another_version_of_the_library_is_refused(no_library, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cpu_library, "ABI_VERSION", cpu_library.ABI_VERSION + 1)
    with pytest.raises(RuntimeError, match=r"interface, this package needs .*rebuild it with"):
        ops.get_ops("cpu")


def test_one_openmp_runtime_and_torch_governs_the_threads() -> None:
    """Check that the kernels add no runtime and no thread to PyTorch's pool."""
    code = """
import os, torch
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.records import (AttentionBatch, Softmax)
torch.set_num_threads(2)
a = torch.randn(400, 400)
for _ in range(3): a @ a
torch.nn.functional.softmax(torch.randn(2000, 2000), -1)
before = len(os.listdir("/proc/self/task"))
cache = torch.randn(600, 4, 32, 64)
table = torch.arange(512, dtype=torch.int32)[None]
i = lambda *x: torch.tensor(x, dtype=torch.int32)
for threads in (2, 1, 2):
    torch.set_num_threads(threads)
    q = torch.randn(1, 8, 64)
    batch = AttentionBatch(q, cache[:, :, :16], cache[:, :, 16:], table, i(0, 1), i(8192), i(0))
    cpu.paged_attention(torch.empty_like(q), batch, Softmax(.1))
after = len(os.listdir("/proc/self/task"))
names = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "omp" in line}
print(after - before, sum(n.startswith(("libgomp", "libomp", "libiomp")) for n in names))
"""
    if not Path("/proc/self/task").exists():
        pytest.skip("counts threads and mappings in /proc")
    status, out, errors = run_python("-c", code, OMP_NUM_THREADS="2")
    assert status == 0, errors
    assert out.split() == ["0", "1"]


def test_reading_pages_reads_those_that_are_named(each_isa) -> None:
    """Check the read that bounds decode: all of each page, and no page that was not named."""
    page_floats, count = 256, 200
    memory = torch.zeros(count, page_floats)
    memory[torch.randperm(count)[:77], -1] = 1.0
    read = cpu_library.load().pyr_read_pages
    pages = torch.randperm(count).int()
    some = pages[:70].contiguous()
    for _ in each_isa():
        for named, threads in ((pages, 1), (pages, 2), (some, 1)):
            seen = read(memory.data_ptr(), named.data_ptr(), len(named), page_floats * 4, threads)
            assert seen == memory[named.long()].count_nonzero()


def test_scratch_of_a_long_prompt_is_given_back() -> None:
    """Threads keep what they need again; decoding asks them for far less."""
    code = """
import torch
from vllm_pyramid.kernels.cpu import functions as cpu, library
from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch

torch.set_num_threads(2)
tokens, heads, size, block = 65_536, 2, 16, 16
cache = torch.randn(tokens // block, heads, block, size)
table = torch.arange(tokens // block, dtype=torch.int32)[None]
ints = lambda *values: torch.tensor(values, dtype=torch.int32)
query = torch.randn(32, 4 * heads, size)
prompt = WindowBatch(query, cache, table, ints(32), ints(tokens), 32, max_prompt_len=tokens)
scores = cpu.window_scores(prompt, Softmax(0.2), Reduction("mean", "avg", 5))
cpu.select(scores, ints(tokens), ints(100), window=32, sinks=0, max_keep=100)
print(library.scratch_bytes())
length = 3000
decode = AttentionBatch(
    query[:1], cache, cache, table, ints(0, 1), ints(length), ints(0), max_query_len=1,
    max_seq_len=length,
)
out = torch.empty(1, 4 * heads, size)
for _ in range(300):
    cpu.paged_attention(out, decode, Softmax(0.2))
print(library.scratch_bytes())
again = cpu.window_scores(prompt, Softmax(0.2), Reduction("mean", "avg", 5))
assert torch.equal(scores, again)
"""
    status, out, errors = run_python("-c", code)
    assert status == 0, errors
    prompt, decoding = map(int, out.split())
    assert prompt > 60 << 20 and decoding < 6 << 20, (prompt, decoding)
