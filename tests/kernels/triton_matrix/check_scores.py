# SPDX-License-Identifier: Apache-2.0
"""`window_scores` against the reference in float64, `select` against the reference exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.arguments import head_sinks
from vllm_pyramid.kernels import reference
from vllm_pyramid.kernels.records import Reduction, Softmax, WindowBatch
from vllm_pyramid.kernels.triton import functions as triton_ops

# (KV heads, group, head size, dtype, window, reduction, pooling, kernel size, soft cap)
SCORE_CASES = [
    (2, 4, 64, torch.bfloat16, 8, "mean", "avg", 5, 0.0),
    (2, 1, 128, torch.bfloat16, 8, "mean", "max", 7, 0.0),
    (1, 8, 80, torch.float32, 16, "max", "avg", 3, 0.0),
    (1, 4, 32, torch.float32, 5, "sum", "none", 5, 3.0),
    (2, 3, 32, torch.float16, 40, "max", "max", 5, 0.0),  # padded heads and padded window rows
    (1, 2, 64, torch.bfloat16, 100, "mean", "avg", 1, 0.0),  # window in two tiles
    (1, 20, 32, torch.float32, 8, "mean", "avg", 5, 0.0),  # group in several tiles
]


def run_both(paged, ints, case, lens, before, seed=0, sinks=False, **keywords):
    """Return the scores of Triton and of the reference, with `before` tokens between requests."""
    num_kv_heads, group, head_size, dtype, window, reduce, pooling, kernel_size, cap = case
    device = paged.key_cache.device
    ends, total = [], 0
    for gap in before:
        total += gap + window
        ends.append(total)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(total + 1, num_kv_heads * group, head_size, generator=generator)
    query = (2 * query).to(dtype).to(device)
    batch = WindowBatch(
        query, paged.key_cache, paged.block_table, ints(ends), ints(lens), window, **keywords
    )
    own = head_sinks(num_kv_heads * group, dtype).to(device) if sinks else None
    softmax = Softmax(head_size**-0.5, cap, sinks=own)
    arguments = (batch, softmax, Reduction(reduce, pooling, kernel_size))
    expected = reference.window_scores(*arguments, compute_dtype=torch.float64)
    return triton_ops.window_scores(*arguments), expected, arguments


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("case", SCORE_CASES)
def test_window_scores(make_paged, ints, case, sinks):
    num_kv_heads, _, head_size, dtype, window, *_ = case
    lens = [window + 1, window + 90, 2 * window + 30]
    paged = make_paged(lens, num_kv_heads, head_size, dtype, joint=head_size == 64)
    actual, expected, arguments = run_both(paged, ints, case, lens, [0, 3, 2], sinks=sinks)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-7)
    if sinks:  # they matter, and so does whose they are
        batch, softmax, reduction = arguments
        turned = replace(softmax, sinks=softmax.sinks.flip(0).contiguous())
        for other in (replace(softmax, sinks=None), turned):
            different = triton_ops.window_scores(batch, other, reduction)
            finite = ~actual.isneginf()
            assert ((actual - different)[finite].abs() > 0.05 * actual[finite]).any()


def test_scores_of_a_long_prompt_in_several_splits(make_paged, ints):
    """Score 513 keys with a window of 8: the first pass's last split lies inside the window."""
    case = (1, 2, 64, torch.bfloat16, 8, "mean", "avg", 5, 0.0)
    paged = make_paged([513, 1100], 1, 64, torch.bfloat16)
    actual, expected, _ = run_both(paged, ints, case, [513, 1100], [0, 0])
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-7)


def test_a_larger_maximum_only_widens(make_paged, ints):
    case = SCORE_CASES[0]
    paged = make_paged([60, 33], 2, 64, torch.bfloat16)
    actual, expected, _ = run_both(paged, ints, case, [60, 33], [0, 0], max_prompt_len=90)
    assert actual.shape[2] == 90 - 8
    torch.testing.assert_close(actual[..., : 60 - 8], expected, rtol=2e-5, atol=1e-7)
    assert (actual[..., 60 - 8 :] == -math.inf).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_log_sum_exp_of_the_prefill_saves_a_pass(make_paged, ints, sinks):
    """Pass that of the keys alone, with sinks or without: the kernel adds the sinks."""
    case = (2, 2, 64, torch.bfloat16, 8, "mean", "avg", 5, 3.0)
    paged = make_paged([70], 2, 64, torch.bfloat16)
    expected, _, arguments = run_both(paged, ints, case, [70], [4], sinks=sinks)
    query = arguments[0].query
    keys = reference.gather_tokens(paged.key_cache, paged.block_table[0], 0, 70).double()
    logits = torch.einsum("thd,khd->thk", query.double(), keys.repeat_interleave(2, 1)) / 8
    logits = 3.0 * torch.tanh(logits / 3.0)
    end = int(arguments[0].query_ends[0])
    lse = torch.full(query.shape[:2], math.nan, device=query.device)
    for i in range(8):
        lse[end - 8 + i] = logits[end - 8 + i, :, : 70 - 8 + i + 1].logsumexp(-1).float()
    actual = triton_ops.window_scores(*arguments, log_sum_exp=lse)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-7)
    transposed = lse.T.contiguous().T
    actual = triton_ops.window_scores(*arguments, log_sum_exp=transposed)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("pooling", ["none", "avg", "max"])
@pytest.mark.parametrize("gqa_reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("head", range(4))
def test_a_query_head_with_nan_is_not_lost(make_paged, ints, head, gqa_reduce, pooling):
    """A maximum of NaN and a number is the number: a request that failed would go on by it."""
    paged, lens = make_paged([60, 33], 2, 64, torch.float32), ints([60, 33])
    batch = paged.batch([8, 8], [60, 33], group=4)
    inputs = batch.query, paged.key_cache, paged.block_table, batch.query_start_loc[1:], lens
    reduction = Reduction(gqa_reduce, pooling)

    def scores():
        return triton_ops.window_scores(WindowBatch(*inputs, 8), Softmax(0.125), reduction)

    whole = scores()
    batch.query[7, head] = math.nan
    found = scores()
    assert found[0, 0].isnan().all()
    assert torch.equal(found[0, 1], whole[0, 1]) and torch.equal(found[1], whole[1])


def make_scores(kind, shape, device):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(shape, generator=generator)
    if kind == "ties":
        scores = (scores * 2).round() / 2  # about ten distinct values, -0.0 among them
        assert (scores.view(torch.int32) == -(2**31)).any()
    elif kind == "constant":
        scores = torch.zeros(shape)
    elif kind == "tiny":
        scores = scores.abs() * 1e-42  # denormal
    elif kind == "infinite":
        scores[..., ::3] = math.inf
        scores[..., 1::3] = -math.inf
    elif kind == "close":
        scores = 1.0 + torch.randint(0, 40, shape, generator=generator) * 2.0**-23
    return scores.to(device)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("kind", ["random", "ties", "constant", "tiny", "infinite", "close"])
def test_select(ints, device, kind, sinks):
    """Select from ragged rows: none evicted, one evicted, few kept, only sinks and window kept."""
    window = 8
    lens = [30, 300, 300, 9 + sinks, 120]
    keeps = [30, 299, 40, window + sinks, window + sinks]
    scores = make_scores(kind, (5, 2, 300), device)
    for r, n in enumerate(lens):
        scores[r, :, n - window :] = math.inf  # behind the candidates: never read as scores
    arguments = (scores, ints(lens), ints(keeps))
    expected = reference.select(*arguments, window=window, sinks=sinks)
    actual = triton_ops.select(*arguments, window=window, sinks=sinks)
    assert torch.equal(actual, expected)


def test_select_over_several_tiles_and_wider_maximum(ints, device):
    scores = make_scores("ties", (2, 1, 5000), device)[..., :4600]
    arguments = (scores, ints([4500, 2100]), ints([700, 2000]))
    expected = reference.select(*arguments, window=32)
    actual = triton_ops.select(*arguments, window=32, max_keep=2200)
    assert torch.equal(actual[..., :2000], expected)
    assert (actual[..., 2000:] == -1).all()
    with pytest.raises(ValueError, match="float64"):
        triton_ops.select(scores.double(), *arguments[1:], window=32)


def test_unrankable(ints, device):
    """NaN and +inf among the scores that count, of any head and tile; -inf is a score."""
    scores = torch.randn(7, 3, 2100, generator=torch.Generator().manual_seed(3)).to(device)
    scores[0, 1, 5] = math.nan
    scores[1, 2, 2099] = math.inf
    scores[2, 0, 3] = math.nan  # before the first that counts
    scores[3, 0, 2050] = math.inf  # behind the last
    scores[4, 0, 100] = -math.inf
    scores[5, 2, 1024] = -math.nan
    firsts, ends = ints([4, 0, 4, 0, 0, 4, -3]), ints([2100, 9000, 2100, 2050, 2100, 1025, 0])
    wide = torch.full((7, 3, 2200), math.nan, device=device)
    wide[..., 40:2140] = scores
    for some in (scores, wide[..., 40:2140]):
        wanted = reference.unrankable(some, firsts, ends)
        assert wanted.tolist() == [True, True, False, False, False, True, False]
        assert torch.equal(triton_ops.unrankable(some, firsts, ends), wanted)
    with pytest.raises(ValueError, match="float32"):
        triton_ops.unrankable(scores.double(), firsts, ends)
