# SPDX-License-Identifier: Apache-2.0
"""KV heads that share their layer's budget by a prompt's scores, against an oracle in PyTorch.

Shape legend: L layers, G KV heads, n tokens of a prompt, N tokens of a lane's block.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.methods.lanes import G, L, N, Prompts, are_best
from tests.steps import make_context
from vllm_pyramid.kernels import get_ops, reference
from vllm_pyramid.methods import kvpress_presses
from vllm_pyramid.methods.adaptive_heads.worker import joint_lengths
from vllm_pyramid.plan import DeferredPlan, RetentionPlan, least_given_back
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.scorer import Scorer
from vllm_pyramid.policy.selectors import Selector
from vllm_pyramid.step.scorer_inputs import ScorerInputs

SINKS, WINDOW = 2, 3


def adaptive(budget: str | int | None = None, **args: Any) -> Policy:
    return load_policy("adakv", budget, args)


class ByNorm(Scorer):
    """Keeps the keys of the lowest norms, so that an oracle is short."""

    in_parts: ClassVar[bool] = True
    kind: str = f"{__name__}:ByNorm"

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        return -inputs.keys.norm(dim=-1)


class AcrossHeads(Scorer):
    """Gives all KV heads of a layer the same scores, and does not say `in_parts`."""

    kind: str = f"{__name__}:AcrossHeads"

    def score(self, inputs: ScorerInputs) -> torch.Tensor:
        mean = inputs.keys.norm(dim=-1).mean(dim=0)
        return mean.expand(inputs.num_kv_heads, -1)


class OverRanks(ByNorm):
    """Asks the heads of all ranks."""

    asks_ranks: ClassVar[bool] = True
    kind: str = f"{__name__}:OverRanks"


class Worst(Selector):
    """Keeps what has the lowest scores."""

    kind: str = f"{__name__}:Worst"

    def select(self, scores: torch.Tensor, keep: int) -> torch.Tensor:
        return scores.argsort(dim=-1)[:, :keep]


def by_norms(budget: str | int | None = None, **args: Any) -> Policy:
    """Scored by the norms of keys."""
    return adaptive(budget, scorer=f"{__name__}:ByNorm", sinks=SINKS, window=WINDOW, **args)


# Lengths ------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data())
def test_the_joint_choice_index_for_index(data: st.DataObject) -> None:
    """With ties, floors, sinks, and heads that have nothing but the worst score."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    heads, n, sinks = (data.draw(st.integers(low, 6)) for low in (1, 1, 0))
    n = sinks + n * data.draw(st.sampled_from([1, 9]))
    capacity = n - sinks
    mean = data.draw(st.integers(0, capacity))
    safe = data.draw(st.integers(0, mean))
    random = torch.Generator().manual_seed(seed)
    values = data.draw(st.sampled_from([2, 5, 10**6]))
    scores = torch.randint(values, (heads, n), generator=random).float()
    scores[scores == 0] = -torch.inf
    scores[:, :sinks] = torch.nan  # these say nothing
    chosen = are_best(scores[:, sinks:], mean * heads, safe)
    lengths = joint_lengths(scores, mean * heads, safe=safe, sinks=sinks)
    assert lengths.tolist() == chosen.sum(dim=1).tolist()
    assert int(lengths.sum()) == mean * heads and int(lengths.min()) >= safe
    # A head's own choice of as many is its part of the joint one.
    parts = zip(scores[:, sinks:], lengths.tolist(), strict=True)
    own = torch.cat([are_best(row[None], count, 0) for row, count in parts])
    assert torch.equal(own, chosen)


def test_what_cannot_be_chosen_is_a_bug() -> None:
    for total, safe in ((7, 0), (3, 2)):
        with pytest.raises(RuntimeError, match="tokens are to be chosen"):
            joint_lengths(torch.zeros(2, 5), total, safe=safe, sinks=2)


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 12), st.integers(6, 900), st.sampled_from([0, 0.2, 1]))
def test_plans_bound_what_is_solved(n: int, lanes: int, budget: int, alpha: float) -> None:
    policy = by_norms(budget, alpha=float(alpha))
    plan = policy.plan(n, lanes, N)
    if budget >= n:
        assert isinstance(plan, RetentionPlan) and not plan.evicts
        return
    assert isinstance(plan, DeferredPlan) and plan.exact and plan.evicts
    mean = budget - SINKS - WINDOW
    least = SINKS + WINDOW + (max(1, int(alpha * mean)) if alpha else 0)
    assert (plan.least, plan.budget_tokens) == (least, budget)
    # One lane keeps all that the others leave; no lane may keep more, or less than its part.
    keep = np.full(lanes, budget)
    taken = min(n - budget, (budget - least) * (lanes - 1))
    for lane in range(1, lanes):
        given_up = min(budget - least, taken - int(keep[0] - budget))
        keep[lane] -= given_up
        keep[0] += given_up
    assert keep[0] == plan.most <= n
    resolved = plan.resolve(keep)
    sizes = np.full(lanes, N)
    assert int((resolved.end.skip // sizes).sum()) >= least_given_back(plan, sizes)
    assert int((plan.estimate().end.skip // sizes).sum()) >= least_given_back(plan, sizes)
    for wrong in (keep + 1, keep - 1):
        with pytest.raises(ValueError, match="lengths"):
            plan.resolve(wrong)
    if lanes > 1 and budget < n - 1 and least > 1:
        keep = np.full(lanes, budget)
        keep[0], keep[1] = least - 1, 2 * budget - least + 1
        with pytest.raises(ValueError, match="each layer keeps at least"):
            plan.resolve(keep)


def test_the_least_that_is_given_back_can_be_all_that_is() -> None:
    """The worst lengths of a plan give back no block more."""
    plan = by_norms(40).plan(80, 4, N)
    assert isinstance(plan, DeferredPlan)
    resolved = plan.resolve([33, 33, 33, 61])  # skips of 47, 47, 47 and 19
    # Of 160 tokens, 4 * 7 stay in blocks that hold others.
    assert int((resolved.end.skip // N).sum()) == least_given_back(plan, np.full(4, N)) == 17


# A worker's layers --------------------------------------------------------------------------------


def check(prompts: Prompts, row: int) -> None:
    """The lengths, the sums and every survivor's row against the oracle."""
    n, given_up = prompts.lens[row], 0
    budget = prompts.policy.budget.tokens_for(n, prompts.policy.min_budget)
    mean = budget - SINKS - WINDOW
    alpha = prompts.policy.heads.alpha  # type: ignore[attr-defined]
    safe = max(1, int(alpha * mean)) if alpha else 0
    for layer in range(L):
        tokens = prompts.rows[layer][row]
        scores = -tokens[0].double().norm(dim=-1)[:, SINKS : n - WINDOW]
        chosen = are_best(scores, mean * G, safe)
        counts = (SINKS + WINDOW + chosen.sum(dim=1)).tolist()
        assert prompts.keep(row)[layer].tolist() == counts
        for head, count in enumerate(counts):
            skip = n - count
            if prompts.policy.fill_blocks:
                skip = skip // N * N
            own = are_best(scores[head : head + 1], n - skip - SINKS - WINDOW, 0)[0]
            if skip == n - count:
                assert torch.equal(own, chosen[head])
            stays = torch.ones(n, dtype=torch.bool)
            stays[SINKS : n - WINDOW] = own
            assert torch.equal(prompts.held(row, layer, head), tokens[:, head][:, stays])
            given_up += skip
    assert (prompts.keep(row).sum(axis=1) == budget * G).all()
    assert prompts.evictions.tokens_done[row] == given_up


BACK_ENDS = [pytest.param(reference, id="reference"), pytest.param(get_ops("cpu"), id="cpu")]


@pytest.mark.parametrize("ops", BACK_ENDS)
@pytest.mark.parametrize("fill_blocks", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.75])
def test_lengths_and_caches_of_ragged_prompts(ops: Any, fill_blocks: bool, alpha: float) -> None:
    policy = by_norms("40%", alpha=alpha, fill_blocks=fill_blocks)
    prompts = Prompts(policy, [90, 41, 63, 12], ops=ops)
    assert prompts.evictions.deferred.tolist() == [0, 1, 2, 3]
    prompts.run()
    assert not prompts.evictions.failures.of
    for row in range(4):
        check(prompts, row)
    assert (prompts.keep(0)[:, 0] > prompts.keep(0)[:, 1]).all(), "norms of the second are larger"
    report, _ = prompts.tracker.end_step()
    for row, name in enumerate(prompts.names):
        assert report[name].keep == tuple(prompts.keep(row).ravel().tolist())
        assert report[name].tokens == prompts.evictions.tokens_done[row]


@pytest.mark.parametrize("layer", range(L))
def test_a_request_with_nan_fails_and_changes_no_other(layer: int) -> None:
    alone = Prompts(by_norms("40%"), [90])
    alone.run()
    prompts = Prompts(by_norms("40%"), [89, 90, 63])
    table = prompts.tables[G * 0 + 1].long()
    prompts.caches[layer][0, table[4], 0, 3] = torch.nan
    prompts.run()
    assert set(prompts.evictions.failures.of) == {"r0"}
    assert "gave NaN or infinity" in prompts.evictions.failures.of["r0"].reason
    assert (prompts.keep(0).sum(axis=1) == 36 * G).all(), "it has valid lengths"
    assert prompts.keep(1).tolist() == alone.keep(0).tolist()
    check(prompts, 1)
    check(prompts, 2)


def test_a_nan_in_a_sink_is_nobodys_score() -> None:
    """Attention tells of it (`check_attention`), which this test leaves out."""
    prompts = Prompts(by_norms("40%"), [90])
    prompts.caches[0][0, prompts.tables[1].long()[0], 0, 0] = torch.nan
    prompts.run()
    assert not prompts.evictions.failures.of
    assert (prompts.keep(0).sum(axis=1) == 36 * G).all()


def test_lengths_that_break_the_sum_of_a_layer_fail_their_request(monkeypatch) -> None:
    prompts = Prompts(by_norms("40%"), [90, 89])
    assert prompts.deferred is not None
    right = prompts.deferred.method.decide

    def wrong(plans: Any, evidence: torch.Tensor) -> Any:
        first, *others = right(plans, evidence)
        return [first + np.array([1, 0]), *others]

    monkeypatch.setattr(prompts.deferred.method, "decide", wrong)
    prompts.run()
    assert set(prompts.evictions.failures.of) == {"r0"}
    assert "add up to 73 tokens" in prompts.evictions.failures.of["r0"].reason
    assert prompts.keep(0).tolist() == [[36, 36]] * L
    check(prompts, 1)


# kvpress ------------------------------------------------------------------------------------------


@pytest.fixture
def kvpress() -> Iterator[Any]:
    """The module of `AdaKVPress`, and that of presses that score."""
    try:
        found = importlib.metadata.distribution("kvpress")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("`make smollm2` installs kvpress")
    assert found.version == kvpress_presses.VERSION
    package = ModuleType("kvpress")
    package.__path__ = [str(found.locate_file("kvpress"))]
    sys.modules["kvpress"] = package
    names = ("adakv_press", "scorer_press")
    yield SimpleNamespace(
        **{name: importlib.import_module(f"kvpress.presses.{name}") for name in names}
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpress"]:
        del sys.modules[name]


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.88, 0.99])
def test_the_same_tokens_as_kvpress(alpha: float, ratio: float, kvpress: Any) -> None:
    """Of scores without ties, whose order kvpress leaves to `topk`."""
    for seed, (heads, n) in enumerate([(2, 100), (8, 333), (1, 64), (3, 1000)]):
        scores = torch.randn(heads, n, generator=torch.Generator().manual_seed(seed))
        assert len(scores.unique()) == scores.numel()
        skewed = scores * torch.arange(1, heads + 1)[:, None]  # heads differ in what they keep

        class Given(kvpress.scorer_press.ScorerPress):  # type: ignore[misc,name-defined]
            def score(self, *args: Any, found: torch.Tensor = skewed) -> torch.Tensor:
                return found[None].clone()

        press = kvpress.adakv_press.AdaKVPress(Given(ratio), alpha)
        module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
        press.compress(module, None, None, None, None, {})
        _, masked_heads, masked = module.masked_key_indices
        theirs = torch.ones(heads, n, dtype=torch.bool)
        theirs[masked_heads, masked] = False

        args: dict[str, Any] = {
            "scorer": f"{__name__}:ByNorm",
            "window": 0,
            "sinks": 0,
            "alpha": alpha,
        }
        mean = int(theirs.sum()) // heads
        plan = adaptive(mean, **args).plan(n, heads, N)
        assert isinstance(plan, DeferredPlan)
        lengths = joint_lengths(skewed, plan.mean * heads, safe=plan.safe)
        ours = reference.select(
            skewed[:, None], torch.full((heads,), n), lengths, window=0, max_keep=int(lengths.max())
        )
        for head, places in enumerate(ours[:, 0]):
            assert torch.equal(places[: lengths[head]].long(), theirs[head].nonzero()[:, 0])


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"scorer": f"{__name__}:OverRanks"}, "looks at all KV heads of a layer together"),
        ({"scorer": "accumulated_attention"}, "gathers numbers in every step"),
        ({"scorer": "none"}, "ranks nothing"),
        ({"scorer": f"{__name__}:AcrossHeads"}, "does not say that it looks at each KV head"),
        ({"selector": f"{__name__}:Worst"}, "go with selector 'top_k' alone"),
        ({"allocator": "arithmetic"}, "with allocator 'uniform' alone"),
        ({"allocator": "global", "scorer": "observation_window"}, "with allocator 'uniform' alone"),
        ({"scorer": "recency", "schedule": "interval"}, "go with schedule 'prompt_end' alone"),
        ({"values": "host"}, "go with values 'device' alone"),
        ({"attend": "pages"}, "go with attend 'all' alone"),
        ({"chunk.tokens": 128}, "solved once, from the scores of a whole prompt: leave chunk"),
        ({"scorer": "keydiff", "selector.recent": 0.5}, "a whole prompt: leave selector.recent"),
        ({"alpha": 1.5}, "less than or equal to 1"),
        ({"alpha": -0.1}, "greater than or equal to 0"),
    ],
)
def test_policies_that_cannot_have_adaptive_heads(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy("adakv", None, args)


def test_memory_that_waits_is_a_layers() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    policy = adaptive()
    hooks: Any = policy.heads.worker_hooks(
        policy, make_context(8, heads=1, block_size=N, tables_per_layer=G, config=config)
    )
    assert hooks.together == G
    # A prompt of n tokens has 8 * G * n / N lane blocks, and scores of G * n tokens, three times,
    # padded to twice as many.
    assert 8 * G * hooks.bytes_per_block() // N >= 2 * 3 * 4 * G
    assert hooks.bytes_of_buffers() == G * (56 * 1000 + 4 * 4 * 125)
    other = make_context(16, heads=1, block_size=N, tables_per_layer=G, config=config)
    hooks = policy.heads.worker_hooks(policy, other)
    assert hooks.bytes_per_block() == 12
