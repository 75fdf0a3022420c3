# SPDX-License-Identifier: Apache-2.0
"""`VLLM_PYRAMID_CPU_ISA` forces each instruction set that the processor has, and no other."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.kernels.processes import run_python
from vllm_pyramid.kernels.cpu import functions as cpu
from vllm_pyramid.kernels.cpu import library

# What /proc/cpuinfo has to list for each instruction set, which the library finds out by itself.
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
PAIRS = {*AVX512, "avx512_bf16"}
NEEDS = {
    "portable": set(),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": PAIRS,
    "amx": {*PAIRS, "amx_tile", "amx_bf16"},
    "amx-emulated": PAIRS,
}
COMPARE = """
import torch
from tests.kernels.conftest import build_batch
from vllm_pyramid.kernels import get_ops, reference
from vllm_pyramid.kernels.records import Reduction, Softmax
cpu, softmax = get_ops("cpu"), Softmax(0.125)
for dtype in (torch.float32, torch.bfloat16):
    batch = build_batch([300, 90, 700], [300, 1, 4], skips=[0, 37, 16], group=4, dtype=dtype)
    right, found = (torch.zeros(batch.query.shape) for _ in range(2))
    reference.paged_attention(right, batch.attention(), softmax)
    cpu.paged_attention(found, batch.attention(), softmax)
    torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)
    batch = build_batch([300, 90], [40, 40], group=4, dtype=dtype)
    scores = [m.window_scores(batch.windows(32), softmax, Reduction()) for m in (cpu, reference)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=2e-2)
print(cpu.current_isa())
"""


def flags_of_this_cpu() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    raise AssertionError("/proc/cpuinfo lists no flags")


def test_the_table_names_every_instruction_set() -> None:
    assert NEEDS.keys() == {*library.ISAS, library.EMULATED}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors run portable code")
@pytest.mark.parametrize("isa", NEEDS)
def test_the_variable_forces_one_instruction_set(isa: str) -> None:
    status, out, errors = run_python("-c", COMPARE, **{library.ISA_VARIABLE: isa})
    if NEEDS[isa] <= flags_of_this_cpu():
        assert status == 0, errors
        assert out.strip() == isa
    else:
        assert status != 0
        assert f"ValueError: VLLM_PYRAMID_CPU_ISA: this CPU does not have {isa}" in errors


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors run portable code")
def test_all_that_the_processor_has_are_tested() -> None:
    has = flags_of_this_cpu()
    before = cpu.current_isa()
    assert set(library.isas()) == {isa for isa, needs in NEEDS.items() if needs <= has}
    assert cpu.current_isa() == before
