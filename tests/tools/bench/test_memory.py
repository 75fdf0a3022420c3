# SPDX-License-Identifier: Apache-2.0
"""What the cost model takes a request to need under each kind of policy, by hand."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from vllm_pyramid.policy import load_policy, policy_names
from vllm_pyramid.tools.bench.cost import RequestNeeds, prefill_ops
from vllm_pyramid.tools.bench.memory import PolicyMemory
from vllm_pyramid.tools.bench.shapes import Shape

pytestmark = pytest.mark.cpu

# A token of a layer: K and V of 8 bytes each. A row of V: 4 bytes. A block: 256 bytes.
TINY = Shape(layers=2, hidden=8, mlp=16, heads=4, kv_heads=2, head_size=2, vocabulary=100)
ROW, BLOCK = 4, 256
WIDTH = 2 * 4 * 2  # operations of a query's product with a key, all heads


def needs(
    shape: Shape,
    name: str,
    prompt_len: int,
    output_len: int,
    budget: int | str | None = None,
    **args: Any,
) -> RequestNeeds:
    return PolicyMemory(shape, load_policy(name, budget, args)).needs(prompt_len, output_len)


def test_full_is_what_nothing_kept_back_needs() -> None:
    made, plain = needs(TINY, "full", 160, 9), RequestNeeds.plain(TINY, 160, 9, 160)
    assert astuple(made) == pytest.approx(astuple(plain))
    # Tokens 161 .. 168 are seen; the last one that is generated never has a place.
    assert made.step_bytes == 2 * 164.5 * 16 and made.step_ops == 2 * 2 * WIDTH * 164.5
    assert made.prompt_cache == 20 * BLOCK and made.decode_cache == 22 * BLOCK
    assert needs(TINY, "full", 160, 17).decode_cache == 22 * BLOCK
    assert needs(TINY, "full", 160, 18).decode_cache == 24 * BLOCK


def test_v_in_host_memory() -> None:
    """Of the swapped layer: K of half a block's bytes, and N rows of V for each of 4 heads."""
    made = needs(TINY, "kcache", 160, 9, top_n=8)
    assert made.step_bytes == 164.5 * (16 + 8) + 8 * 4 * ROW
    assert made.step_ops == WIDTH * (2 * 164.5 + 164.5 + 8)
    assert made.prompt_cache == (10 + 5) * BLOCK and made.decode_cache == (11 + 6) * BLOCK
    assert made.prefill_ops == prefill_ops(TINY, 160)
    none = needs(TINY, "kcache", 160, 9, top_n=8, device_layers=0)
    assert none.step_bytes == 2 * (164.5 * 8 + 8 * 4 * ROW) and none.prompt_cache == 10 * BLOCK


def test_no_more_rows_of_v_than_there_are() -> None:
    """21 .. 28 keys are seen: the first four steps use them all, and 24 x 4 heads are more, too."""
    made, full = needs(TINY, "kcache", 20, 9, top_n=24), needs(TINY, "full", 20, 9)
    assert made.step_bytes == full.step_bytes
    beyond = (26.5 - 24) / 2  # in half of the steps, of one layer
    assert made.step_ops == full.step_ops - WIDTH * beyond


def test_eviction_with_v_in_host_memory() -> None:
    """K and V of the survivors; blocks of 32 tokens in the swapped layer, and so in both."""
    made = needs(TINY, "snapkv", 160, 9, 64, values="host", top_n=8)
    # 96 of 160 tokens go; 65 .. 72 are seen.
    assert made.step_bytes == 68.5 * (16 + 8) + 8 * 4 * ROW
    assert made.prompt_cache == (10 + 5) * BLOCK
    assert made.decode_cache == (11 - 6 + 6 - 3) * BLOCK


def test_eviction_during_generation() -> None:
    """33 .. 48 keys, twice; K once more, its products and its numbers in every step."""
    made = needs(TINY, "h2o", 64, 33, 32, interval=16)
    assert made.step_bytes == 2 * 40.5 * (16 + 8 + 2 * 8)
    assert made.step_ops == 2 * 40.5 * WIDTH * (2 + 1)
    # Before an eviction 48 tokens are held, at the end, which is one, too.
    assert made.prompt_cache == 2 * 4 * BLOCK and made.decode_cache == 2 * 3 * BLOCK
    assert made.prefill_ops == prefill_ops(TINY, 64) + 2 * WIDTH * 64 * 64 / 2


def test_a_history_window_is_gathered_alone() -> None:
    """Of the last 4 of 16 queries before an eviction, when 45 .. 48 keys are seen."""
    made = needs(TINY, "scissorhands", 64, 33, 32, interval=16, queries=4)
    gathered = 2 * 46.5 / 4
    assert made.step_bytes == pytest.approx(2 * 40.5 * 16 + gathered * (8 + 2 * 8))
    assert made.step_ops == pytest.approx(WIDTH * (2 * 2 * 40.5 + gathered))
    pairs = 61 + 62 + 63 + 64 - 4 / 2  # half of the square on the diagonal, as in causal attention
    assert made.prefill_ops == pytest.approx(prefill_ops(TINY, 64) + 2 * WIDTH * pairs)


def test_a_window_that_slides_gathers_nothing() -> None:
    made = needs(TINY, "window", 64, 33, 32, schedule="interval", interval=16)
    assert made.step_bytes == 2 * 40.5 * 16 and made.prefill_ops == prefill_ops(TINY, 64)


def test_evictions_inside_the_prompt() -> None:
    """Points at 32, 48, ..., 144 of 160 tokens keep 16: from the second on 32 are held at most."""
    args = {"chunk.tokens": 16, "chunk.keep": 16, "window": 4}
    made = needs(TINY, "snapkv", 160, 9, 16, **args)
    at_end = needs(TINY, "snapkv", 160, 9, 16, window=4)
    assert made.prompt_cache == 2 * 2 * BLOCK and at_end.prompt_cache == 20 * BLOCK
    assert made.decode_cache == at_end.decode_cache and made.step_bytes == at_end.step_bytes
    pairs = 32**2 / 2 + 8 * (16 * 16 + 16**2 / 2)
    linear = 2 * TINY.layer_parameters * 2 * 160
    assert made.prefill_ops == linear + 2 * WIDTH * 2 * pairs
    assert at_end.prefill_ops == linear + 2 * WIDTH * 2 * 160**2 / 2
    memory = PolicyMemory(TINY, load_policy("snapkv", 16, args))
    assert 2 * 2 <= memory.most_blocks(10**5, 9) <= 2 * 4


def test_tokens_that_leave_the_forward_pass() -> None:
    """Two pieces, of 32 and 16 tokens; three layers keep all, 2/3 and 1/3 of their contexts."""
    shape = Shape(**{**TINY.__dict__, "layers": 3})
    made = needs(
        shape, "pyramidinfer", 48, 9, decay_curve="linear", decay_ratio=0.0, interval=1,
        min_context=1, recent_ratio=0.25, piece_tokens=32, sinks=0, fill_blocks=False,
    )  # fmt: skip
    # Enter 32, 32, 24 and 16, 16, 12; are held 32, 24, 13 and 16, 12, 6.
    linear = 2 * shape.layer_parameters * (32 + 32 + 24 + 16 + 16 + 12)
    pairs = 32**2 / 2 + 32**2 / 2 + 24**2 / 2
    pairs += 32 * 16 + 16**2 / 2 + 24 * 16 + 16**2 / 2 + 13 * 12 + 12**2 / 2
    # The recent 8 and 4 look again at the context.
    again = 8 * 24 + 8 * 16 + 4 * 12 + 4 * 8
    assert made.prefill_ops == pytest.approx(linear + WIDTH * (2 * pairs + again))
    held = 48 + 36 + 19
    assert made.step_bytes == (held + 3 * 4.5) * 16
    assert made.prompt_cache == 3 * 3 * BLOCK
    assert made.prefill_ops < prefill_ops(shape, 48)


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_has_its_needs(name: str) -> None:
    """Everything but `full` needs less of the pool behind the prompt's end, and reads less."""
    shape = Shape(**{**TINY.__dict__, "layers": 8})
    evicts = load_policy(name).evicts and name != "pyramidinfer"
    made = needs(shape, name, 2048, 64, "12%" if evicts else None)
    full = needs(shape, "full", 2048, 64)
    assert made.prompt_cache <= full.prompt_cache
    if name != "full":
        assert made.decode_cache < full.decode_cache
        assert made.step_bytes < full.step_bytes
