# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, whose numbers the caches of `tests/plumbing/interpreter.py` keep."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.processes import run_python

SCRIPT = '''
import torch
import triton
import triton.language as tl

from tests.plumbing.interpreter import quicken


@triton.jit
def halves(x, y):
    return (x * 2 + y) / 2, x // 3 % 5


@triton.jit
def kernel(numbers, floats, out, n, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Types, shapes and signs of many kinds; a function within the kernel; reductions."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row[:, None] * COLUMNS + column[None, :]
    seen = at < n
    number = tl.load(numbers + at, mask=seen, other=-7)
    real = tl.load(floats + at, mask=seen, other=0.5).to(tl.float32)
    left, right = halves(number, real)
    total = tl.sum(left, axis=1)[:, None] + tl.max(right, axis=0)[None, :]
    short = (real * scale).to(tl.float16) + 1
    total += (short + short) / (short * short + 3)  # in float32
    dot = tl.dot(real, tl.trans(left.to(tl.float32)), input_precision="ieee")
    best = tl.argmax(left, axis=1)
    for step in range(0, 3):
        total += tl.where((number > step) & seen, short, dot * 0.01)
    wide = number.to(tl.int64) * 5_000_000_000 + best[:, None]
    small = (number.to(tl.uint8) >> 1).to(tl.float32)
    high = (wide >> 32).to(tl.float32)
    tl.store(out + at, total + small + high + tl.program_id(0))


@triton.jit
def wrong(numbers, ROWS: tl.constexpr):
    tl.store(numbers + tl.arange(0, ROWS), tl.zeros((ROWS * 2,), tl.float32))


def run(scale):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-99, 99, (256,), dtype=torch.int32, generator=generator)
    out = torch.zeros(256)
    for dtype in (torch.float32, torch.float16):
        floats = torch.randn(256, generator=generator).to(dtype)
        kernel[(2,)](numbers, floats, out, 250, scale, ROWS=16, COLUMNS=16)
        yield out.clone()


def error():
    try:
        wrong[(1,)](torch.zeros(8), ROWS=8)
    except Exception as error:
        return repr(error)
    raise AssertionError("shapes that do not go together")


scales = (1, 0.25, -3)
expected = [out for scale in scales for out in run(scale)]
assert len({tuple(out.tolist()) for out in expected}) == 6
refusal = error()
quicken()
for _ in range(2):  # what is kept is made, and used
    found = [out for scale in scales for out in run(scale)]
    assert all(map(torch.equal, found, expected))
    assert error() == refusal, (error(), refusal)
'''


def test_same_numbers_and_errors(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    status, _, errors = run_python(str(script), TRITON_INTERPRET="1")
    assert status == 0, errors[-3000:]
