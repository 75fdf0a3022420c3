# SPDX-License-Identifier: Apache-2.0
"""The cost model against numbers worked out by hand, and against the parameters of real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.cost.__main__ import main
from lab.cost.model import (
    CostModel,
    Machine,
    as_markdown,
    cost_rows,
    layer_parameters,
    step_parameters,
)
from vllm_pyramid.tools.bench.shapes import SHAPES, Shape

pytestmark = pytest.mark.cpu

TINY = Shape(layers=2, hidden=8, mlp=16, heads=4, kv_heads=2, head_size=2, vocabulary=100)


def test_sizes_of_a_shape() -> None:
    # Q 8x8, K and V 8x4 each, O 8x8, and three of 8x16.
    assert layer_parameters(TINY) == 64 + 2 * 32 + 64 + 3 * 128
    assert step_parameters(TINY) == 2 * 576 + 800
    assert TINY.token_bytes == 2 * 2 * 2 * 2


def test_named_shapes_have_the_parameters_of_their_models() -> None:
    """Llama 3 8B has 8.03 thousand million parameters, 70B 70.55; the embedding is not multiplied
    with."""
    for name, total in (("llama-3-8b", 8.03e9), ("llama-3-70b", 70.55e9)):
        shape = SHAPES[name]
        embedding = shape.hidden * shape.vocabulary
        assert step_parameters(shape) + embedding == pytest.approx(total, rel=0.002)
    # 128 KiB a token over 32 layers.
    assert 32 * SHAPES["llama-3-8b"].token_bytes == 131072
    # Of one byte, and with a scale of four bytes for each token and KV head, of K and of V.
    for dtype, row in (("fp8", 128), ("int8_per_token_head", 132)):
        shape = replace(SHAPES["llama-3-8b"], cache_dtype=dtype)
        assert shape.token_bytes == 2 * 8 * row


def test_decode_step_by_hand() -> None:
    weights, tokens = 2 * step_parameters(TINY), 3 * 2 * 50
    slow_memory = Machine(bandwidth=1000.0, flops=1e12, memory=1.0)
    # 48 tokens are kept, and half of the 4 that are generated are there too.
    step = CostModel(TINY, slow_memory, 64, 4, kept=48).decode_step(3)
    assert step == pytest.approx((weights + tokens * TINY.token_bytes) / 1000)
    slow_arithmetic = Machine(bandwidth=1e12, flops=1000.0, memory=1.0)
    assert CostModel(TINY, slow_arithmetic, 64, 4, kept=48).decode_step(3) == pytest.approx(
        (2 * step_parameters(TINY) * 3 + 4 * tokens * 4 * 2) / 1000
    )
    two = replace(slow_memory, devices=2)
    assert CostModel(TINY, two, 64, 4, kept=48).decode_step(3) == step / 2


def test_prefill_by_hand() -> None:
    machine = Machine(bandwidth=1.0, flops=1000.0, memory=1.0)
    linear = 2 * 2 * layer_parameters(TINY) * 10
    attention = 4 * 4 * 2 * 2 * 10 * 10 / 2
    prefill = CostModel(TINY, machine, 10, 4, kept=10).prefill()
    assert prefill == pytest.approx((linear + attention) / 1000)


@pytest.mark.parametrize(
    ("requests", "kept", "fit"),
    [
        (4.0, 160.0, 4),  # nothing evicted: as many as the pool was made for
        (4.0, 16.0, 18),  # pool 44 blocks, prompt 10, evicted 1 + 1: 1 + (44 - 10) / 2, below 22
        (1.0, 16.0, 1),  # one prompt fills the pool
        (0.5, 16.0, 0),
    ],
)
def test_resident(requests: float, kept: float, fit: int) -> None:
    model = CostModel(TINY, Machine(1.0, 1.0, 1.0), prompt_len=160, output_len=16, kept=kept)
    pool = requests * 11 * 16 * TINY.layers * TINY.token_bytes
    assert model.resident(pool) == fit


def test_end_to_end_adds_prefills_and_decode_steps() -> None:
    model = CostModel(TINY, Machine(1e3, 1e3, 1.0), prompt_len=64, output_len=9, kept=64)
    seconds = 8 * model.prefill() + 2 * 8 * model.decode_step(4)
    assert model.end_to_end(8, 4) == pytest.approx(8 / seconds)


def test_eviction_pays_as_the_cache_outweighs_the_weights() -> None:
    """Longer prompts gain more; at 12 % never more than 1 / 0.12, but for whole requests."""
    machine = Machine(4.8e12, 989e12, 141e9)
    rows = cost_rows(SHAPES["llama-3-8b"], machine, [8192, 131072], ["12%"], 256)
    assert rows["budget"].tolist() == ["100%", "12%"] * 2
    whole, short, again, long = map(float, rows["of 100%"])
    assert whole == again == 1.0 and 1 < short < long <= 1.02 / 0.12
    assert int(rows["resident"][3]) > int(rows["resident"][2])
    assert rows["prompt"].tolist() == ["8,192"] * 2 + ["131,072"] * 2
    assert as_markdown(rows).count("\n") == 1 + 4


def test_a_model_that_does_not_fit_says_so() -> None:
    machine = Machine(4.8e12, 989e12, 141e9)
    with pytest.raises(ValueError, match="141 GB of weights do not fit"):
        cost_rows(SHAPES["llama-3-70b"], machine, [8192], ["12%"], 256)


def test_documented_tables_are_what_the_command_prints() -> None:
    """The page on Llama 3 holds the output of `python -m lab.cost`."""
    page = Path(__file__).parents[1] / "results" / "llama-3-on-h200.md"
    text = page.read_text(encoding="utf-8")
    lens, budgets = [8192, 32768, 131072], ["12%", "2048"]
    for name, devices in (
        ("llama-3-8b", 1),
        ("llama-3-8b", 8),
        ("llama-3-70b", 2),
        ("llama-3-70b", 8),
    ):
        machine = Machine(4.8e12, 989e12, 141e9, devices)
        rows = cost_rows(SHAPES[name], machine, lens, budgets, 256)
        assert as_markdown(rows) in text, f"{name} on {devices}: run the command beside the table"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt-lens", "8192", "--budgets", "12%"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[3].startswith("| 8,192 | 12% |")
    assert main(["--model", "llama-3-70b"]) == 2
    assert "give more --devices" in capsys.readouterr().err
