# SPDX-License-Identifier: Apache-2.0
"""The kernels of `observed_expected`: all requests of a step together, as one at a time.

`test_scorers.py` has the formula. `tests/kernels/triton_matrix/check_observed_expected.py` compares
Triton's kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import JITFunction

from tests.kernels.every_kernel import shared_cpu, shared_reference, shared_triton
from tests.methods.views import cos_sin
from tests.steps import make_call, make_evictions
from vllm_pyramid.kernels.contract import Ops
from vllm_pyramid.kernels.records import Softmax
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.attention_inputs import AttentionInputs
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.rotary import Rotary

BLOCK, KV_HEADS, HEADS, SIZE = 16, 2, 6, 32
LENS = [70, 300, 49, 128]
BACK_ENDS = pytest.mark.parametrize("ops", [shared_reference, shared_cpu], ids=["torch", "cpu"])


def policy_of(**args: Any) -> Policy:
    return load_policy("snapkv-expected", 40, args={"window": 24, "queries": 8, **args})


def batch_of(policy: Policy, ops: Ops, skips: list[int], **fields: Any) -> EvictionBatch:
    """Prompts that end in one step, of which `skips` tokens were evicted before."""
    source = torch.Generator().manual_seed(0)
    entries = [-(-n // BLOCK) for n in LENS]
    order = torch.randperm(sum(entries) + 1, generator=source).int()
    tables = torch.zeros(len(LENS), max(entries), dtype=torch.int32)
    for row, count in enumerate(entries):
        first = sum(entries[:row])
        tables[row, :count] = order[first : first + count]
    caches = torch.full((2, len(order), KV_HEADS, BLOCK, SIZE), torch.nan)
    for row, (skip, n) in enumerate(zip(skips, LENS, strict=True)):
        places = torch.arange(skip, n)
        blocks = tables[row, places // BLOCK].long()
        new = torch.randn(2, len(places), KV_HEADS, SIZE, generator=source)
        caches[:, blocks, :, places % BLOCK] = new.transpose(0, 1)
    query = torch.randn(sum(LENS), HEADS, SIZE, generator=source)
    query += torch.randn(HEADS, SIZE, generator=source)  # queries of a head are alike
    call = make_call(
        tables,
        ops=ops,
        query=query,
        caches=(caches[0], caches[1]),
        scale=SIZE**-0.5,
        **{"rotary": Rotary(cos_sin(SIZE, 400)), **fields},
    )
    evictions = make_evictions(LENS, [[30] * len(LENS)], skips=[skips])
    return evictions.batch(call, policy, np.arange(len(LENS)))


def check(batch: EvictionBatch) -> torch.Tensor:
    """Return the scores of the kernels, which are those of `score`."""
    scorer = batch.policy.scorer
    together, each = scorer.scores(batch), batch.score_each(scorer.kind, scorer.score_parts)
    assert not batch.evictions.failures.of
    torch.testing.assert_close(together, each, rtol=2e-5, atol=1e-8)
    inside = together[0, :, batch.dead_prefixes[0] + 4 : batch.lens[0] - 24]
    assert inside.min() > 0 and inside.std() > 1e-3
    return together


@BACK_ENDS
@pytest.mark.parametrize("skips", [[0, 0, 0, 0], [5, 37, 0, 16]], ids=["whole", "evicted"])
@pytest.mark.parametrize("expected", [0.25, 0.0])
def test_all_requests_are_scored_as_each_is(ops: Ops, skips: list[int], expected: float) -> None:
    """The tables of some begin with tokens that were evicted before, which are NaN here."""
    check(batch_of(policy_of(expected=expected), ops, skips))


@BACK_ENDS
def test_embeddings(ops: Ops) -> None:
    """None, one that turns half of the channels, and one that scales, in pairs of neighbours."""
    scaled = Rotary(1.2 * cos_sin(SIZE, 400), halves=False)
    found = [
        check(batch_of(policy_of(), ops, [0] * 4, rotary=rotary))
        for rotary in (None, Rotary(cos_sin(SIZE // 2, 400)), scaled)
    ]
    assert not torch.allclose(found[0], found[1]) and not torch.allclose(found[1], found[2])


@BACK_ENDS
def test_learned_sinks_and_a_cap(ops: Ops) -> None:
    batch = batch_of(policy_of(expected=3.0), ops, [0, 20, 3, 0])
    plain = check(batch)
    sinks = torch.linspace(-1.0, 5.0, HEADS)
    capped = Softmax(batch.call.softmax.scale, soft_cap=0.5, sinks=sinks)
    found = check(replace(batch, call=replace(batch.call, softmax=capped)))
    assert not torch.allclose(plain, found)


@BACK_ENDS
def test_a_request_alone_has_the_same_scores(ops: Ops) -> None:
    batch = batch_of(policy_of(), ops, [5, 37, 0, 16])
    together = batch.policy.scorer.scores(batch)
    for row in range(len(LENS)):
        alone = batch.evictions.batch(batch.call, batch.policy, np.array([row]))
        found = batch.policy.scorer.scores(alone)[0]
        assert torch.equal(found, together[row, :, : found.shape[1]])


def test_too_few_queries_are_refused() -> None:
    batch = batch_of(policy_of(), shared_reference, [0] * 4)
    batch.evictions.query_lens = np.array([70, 7, 49, 128], np.int32)
    with pytest.raises(ValueError, match="looks at 8 queries, and the step has 7 of a request"):
        batch.policy.scorer.scores(batch)


def test_only_the_batch_is_looked_at() -> None:
    """Rows may be of several layers: the layer's index and the plans say nothing."""
    batch = batch_of(policy_of(), shared_reference, [0, 20, 0, 0])
    wanted = batch.policy.scorer.scores(batch)
    call: AttentionInputs = replace(batch.call, layer=10**6)
    batch.evictions.plans = []
    assert torch.equal(batch.policy.scorer.scores(replace(batch, call=call)), wanted)


class Operations(TorchDispatchMode):
    """Records the names of all tensor operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("expected", [0.25, 0.0])
def test_triton_launches_as_much_for_many_requests_as_for_one(monkeypatch, expected) -> None:
    """Nothing else runs on the device but an upload of positions, and nothing is read back."""
    launched: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: launched.append(self.__name__))
    policy, found = policy_of(expected=expected), []
    for lens in ([70], [70, 700, 90, 5000, 64, 53, 1030, 70]):
        launched.clear()
        call = make_call(
            torch.zeros(len(lens), 320, dtype=torch.int32),
            ops=shared_triton,
            query=torch.zeros(sum(lens), HEADS, SIZE),
            caches=(torch.zeros(4, KV_HEADS, BLOCK, SIZE), torch.zeros(4, KV_HEADS, BLOCK, SIZE)),
            rotary=Rotary(cos_sin(SIZE, 400)),
        )
        batch = make_evictions(lens, [[30] * len(lens)]).batch(call, policy, np.arange(len(lens)))
        with Operations() as operations:
            scores = policy.scorer.scores(batch)
        assert scores.shape == (len(lens), KV_HEADS, max(lens))
        uploads = operations.names.count("lift_fresh")
        assert set(operations.names) - {"lift_fresh"} == {"empty", "empty_like"}
        assert uploads == bool(expected) and len(launched) + uploads <= 10
        found.append(list(launched))
    first, second = ["future_queries_kernel"], ["future_logits_kernel"]
    wanted = [
        *(first if expected else []),
        "window_max_sum_kernel",
        *(second if expected else []),
        *("join_log_sum_exp_kernel", "window_mass_kernel"),
        *("weigh_kernel", "pool_and_sum_kernel", "blend_kernel"),
    ]
    assert found == [wanted, wanted]
