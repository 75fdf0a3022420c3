# SPDX-License-Identifier: Apache-2.0
"""Window scores, key mass and recent mass in C++ against float64, and those against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.arguments import head_sinks, softmax_of, softmax_options
from tests.kernels.every_kernel import cpu, reference
from tests.kernels.readers import READERS, recent_mass, window_scores
from vllm_pyramid.kernels.records import GQA_REDUCTIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(("key mass", options) for options in softmax_options()),
    *(("recent mass", options) for options in ({"soft_cap": 2.0}, {"distance_weight": 0.5})),
    *(("recent mass", {"sinks": head_sinks(4), "soft_cap": cap}) for cap in (0.0, 2.0)),
    *(
        ("window scores", {"sinks": head_sinks(4), "gqa_reduce": reduce, "soft_cap": cap})
        for reduce in GQA_REDUCTIONS
        for cap in (0.0, 2.0)
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name in READERS for shape in READERS[name].shapes]
)
def test_matches_reference(make_batch, check_reader, name, shape, dtype) -> None:
    reader, (group, head_size) = READERS[name], shape
    options = {"dtype": dtype, "group": group, "head_size": head_size, "seed": group + head_size}
    check_reader(reader, make_batch(reader.lens, reader.queries, **options).attention())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options(make_batch, check_reader, name, options, dtype) -> None:
    reader = READERS[name]
    if "sinks" in options:
        options = options | {"sinks": options["sinks"].to(dtype)}
    batch = make_batch(reader.lens, reader.queries, dtype=dtype, layout="rows")
    check_reader(reader, batch.attention(), **options)


@pytest.mark.parametrize("block_size", [8, 16, 48])
@pytest.mark.parametrize("name", ["key mass", "recent mass"])
def test_skips(make_batch, check_reader, name, block_size) -> None:
    """Count keys of earlier pieces in the softmax; stale entries below `skips` are not read."""
    batch = make_batch(
        [300, 95, 700, 64], [90, 20, 400, 1], skips=[131, 48, 5, 40], layout="rows",
        block_size=block_size, dtype=torch.bfloat16,
    )  # fmt: skip
    check_reader(READERS[name], batch.attention())


@pytest.mark.parametrize("name", READERS)
def test_threads_change_no_bit(make_batch, two_threads, name) -> None:
    reader = READERS[name]
    batch = make_batch(reader.lens, reader.queries, dtype=torch.bfloat16).attention()
    many = reader.run(cpu, batch, softmax_of(batch))
    torch.set_num_threads(1)
    assert torch.equal(many, reader.run(cpu, batch, softmax_of(batch)))


@pytest.mark.parametrize("name", ["window scores", "recent mass"])
def test_sinks_are_the_heads_own(make_batch, name) -> None:
    """Check that leaving out or reordering the sinks changes the result."""
    reader = READERS[name]
    batch = make_batch(reader.lens, reader.queries, group=3).attention()
    found, turned, plain = (
        reader.run(cpu, batch, softmax_of(batch, sinks=sinks))[1]
        for sinks in (head_sinks(6), head_sinks(6).flip(0).contiguous(), None)
    )
    some = plain.isfinite() & (plain != 0)
    assert (found[some] < 0.9 * plain[some]).all()
    assert ((found - turned)[some].abs() > 0.1 * found[some]).any()
    with pytest.raises(ValueError, match=r"sinks must be contiguous \[6\], got \(2,\)"):
        reader.run(cpu, batch, softmax_of(batch, sinks=torch.zeros(2)))


def test_window_scores_of_the_reference_count_the_sinks(make_batch) -> None:
    """Compute each query and head: a sink is one more key, whose weight no token gets."""
    batch = make_batch([37], [30], group=3).attention()
    sinks = head_sinks(6)
    options = {"gqa_reduce": "sum", "pooling": "none", "compute_dtype": torch.float64}
    softmax = softmax_of(batch, sinks=sinks)
    found = window_scores(reference, batch, softmax, window=4, **options)[0]
    keys = reference.gather_tokens(batch.key_cache, batch.block_table[0], 0, 37).double()
    for kv_head in range(2):
        expected = torch.zeros(33, dtype=torch.float64)
        for head in range(kv_head * 3, kv_head * 3 + 3):
            for i in range(4):
                logits = keys[: 34 + i, kv_head] @ batch.query[26 + i, head].double() / 8
                logits = torch.cat([logits, sinks[head : head + 1].double()])
                expected += logits.softmax(0)[:33]
        torch.testing.assert_close(found[kv_head].double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sinks", [None, head_sinks(6)], ids=["plain", "sinks"])
def test_recent_mass_of_the_reference_is_the_papers(make_batch, sinks) -> None:
    """Compute each query and head from the definition; a sink is one more key."""
    batch, recent = make_batch([37], [30], skips=[3], group=3).attention(), 6
    softmax = softmax_of(batch, sinks=sinks)
    found = recent_mass(reference, batch, softmax, compute_dtype=torch.float64)[0]
    keys = reference.gather_tokens(batch.key_cache, batch.block_table[0], 3, 37).double()
    weights = [1 + 0.2 * i / (recent - 1) for i in range(recent)]
    for kv_head in range(2):
        expected = torch.zeros(37, dtype=torch.float64)
        for head in range(kv_head * 3, kv_head * 3 + 3):
            for i, weight in enumerate(weights):
                position = 37 - recent + i
                query = batch.query[30 - recent + i, head].double()
                logits = keys[: position + 1 - 3, kv_head] @ query / math.sqrt(64)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1].double()])
                probabilities = logits.softmax(0)[: position + 1 - 3]
                expected[3 : position + 1] += weight / sum(weights) * probabilities
        assert torch.allclose(found[kv_head].double(), expected[7:31], rtol=1e-6)
