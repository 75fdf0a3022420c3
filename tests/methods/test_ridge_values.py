# SPDX-License-Identifier: Apache-2.0
"""Values that make up for evicted tokens, against a solve in float64 of another form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import back_ends
from tests.back_ends import BackEnd
from tests.shifted_worker import Host, launch_tables
from vllm_pyramid.methods.ridge_values import worker
from vllm_pyramid.methods.ridge_values.worker import RidgeHooks, changed_values, window_outputs
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.scorer_inputs import ScorerInputs

BACK_ENDS = pytest.mark.parametrize("name", ["cpu", "cuda"])
# Of the window's error without the change, by ridge.
BOUNDS = {1.0: 0.6, 0.1: 0.35, 0.01: 0.25}
WINDOW, PROMPTS = 8, {"a": 70, "b": 45}


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_tables(monkeypatch, Host())


def policy(budget: int | str = 24, **args: Any) -> Policy:
    return load_policy("pyramidkv", budget, {"window": WINDOW, "values": "ridge", **args})


def skip_of(back_end: BackEnd, layer: int, name: str) -> int:
    plan = back_end.tracker.policy.plan(back_end.prompts[name], back_ends.LAYERS, back_ends.BLOCK)
    return int(plan.end.skip[layer])


def attended(
    queries: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Attention of the last queries of a KV head in float64, `[H / G * W, n]`."""
    count = queries.shape[1]
    last = torch.arange(tokens - count, tokens)[:, None]
    logits = (queries.double() @ keys.double().T) * back_ends.SCALE
    return logits.masked_fill(places > last, -math.inf).softmax(dim=-1).flatten(0, 1)


def solved(
    attention: torch.Tensor, values: torch.Tensor, outputs: torch.Tensor, ridge: float
) -> torch.Tensor:
    """The least change by its normal equations, which are as many as kept tokens."""
    weight = ridge * (attention**2).sum(dim=1).mean()
    left = attention.T @ attention + weight * torch.eye(len(values)).double()
    return values + torch.linalg.solve(left, attention.T @ (outputs - attention @ values))


class Head:
    """A KV head of a request in a layer, before and behind the eviction of the latest step.

    Attributes:
        queries: `[H / G, W, D]`. keys, values: of all tokens. kept: places of those that stay.
        kept_keys, kept_values: what the cache holds of these.
    """

    def __init__(self, back_end: BackEnd, layer: int, name: str, head: int, rows: slice) -> None:
        tokens, group = back_end.computed[name], back_ends.HEADS // back_ends.KV_HEADS
        queries = back_end.queries[layer][rows][-WINDOW:]
        self.queries = queries[:, head * group : (head + 1) * group].transpose(0, 1)
        before = back_end.held(back_end.before[layer], layer, name, 0)
        self.keys, self.values = (part[:, head].double() for part in before)
        skip = skip_of(back_end, layer, name)
        after = back_end.held(back_end.cache, layer, name, skip)
        self.kept_keys, self.kept_values = (part[:, head].double() for part in after)
        same = (self.kept_keys[:, None] == self.keys).all(dim=-1)
        assert (same.sum(dim=1) == 1).all()
        self.kept = same.int().argmax(dim=1)
        everything = torch.arange(tokens)
        self.outputs = attended(self.queries, self.keys, everything, tokens) @ self.values
        self.attention = attended(self.queries, self.kept_keys, self.kept, tokens)

    def error(self, values: torch.Tensor) -> float:
        return float((self.outputs - self.attention @ values).norm())


def heads_of(back_end: BackEnd, scheduled: dict[str, int]) -> Iterator[Head]:
    for layer in range(back_ends.LAYERS):
        start = 0
        for name, count in scheduled.items():
            for head in range(back_ends.KV_HEADS):
                yield Head(back_end, layer, name, head, slice(start, start + count))
            start += count


@BACK_ENDS
@pytest.mark.parametrize(
    ("chunks", "ridge", "kv_heads", "copies"),
    [
        ([PROMPTS], 1.0, 2, 2**28),
        ([{"a": 50, "b": 20}, {"a": 20, "b": 25}], 0.1, 2, 2**28),
        ([PROMPTS], 0.01, 4, 1),
    ],
    ids=["at once", "in chunks", "heads in parts"],
)
def test_values_are_those_of_a_solve_in_float64(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    chunks: list[dict[str, int]],
    ridge: float,
    kv_heads: int,
    copies: int,
) -> None:
    """And the outputs of the window's queries come closer to those over all tokens."""
    monkeypatch.setattr(back_ends, "KV_HEADS", kv_heads)
    monkeypatch.setattr(back_ends, "HEADS", 2 * kv_heads)
    monkeypatch.setattr(worker, "COPIES_BYTES", copies)
    back_end = BackEnd(name, policy(ridge=ridge), PROMPTS)
    for scheduled in chunks:
        back_end.step(scheduled)
    assert not back_end.tracker.failures.of
    errors = []
    for head in heads_of(back_end, chunks[-1]):
        plain = head.values[head.kept]
        wanted = solved(head.attention, plain, head.outputs, ridge)
        assert torch.allclose(head.kept_values, wanted, atol=2e-4), "another solution"
        if len(plain) < len(head.values):
            errors.append((head.error(head.kept_values), head.error(plain)))
    assert len(errors) >= 3 * kv_heads, "layers kept everything"
    assert all(changed < plain for changed, plain in errors)
    changed, plain = (sum(column) for column in zip(*errors, strict=True))
    assert changed < BOUNDS[ridge] * plain, changed / plain


@BACK_ENDS
def test_blocks_that_others_share_or_find_keep_their_values(name: str) -> None:
    """What stood before the survivors' new places is published as the full cache's KV."""
    back_end = BackEnd(name, policy(), PROMPTS)
    back_end.step(PROMPTS)
    looked = 0
    for layer in range(back_ends.LAYERS):
        for request in PROMPTS:
            skip = skip_of(back_end, layer, request)
            before = back_end.held(back_end.before[layer], layer, request, 0)
            after = back_end.held(back_end.cache, layer, request, 0)
            for was, now in zip(before, after, strict=True):
                assert torch.equal(was[:skip], now[:skip])
                assert not skip or not torch.equal(was[skip:], now[skip:])
            looked += skip
    assert looked


@BACK_ENDS
def test_nothing_changes_where_nothing_is_evicted(name: str) -> None:
    changed, plain = (
        BackEnd(name, load_policy("pyramidkv", 80, {"window": WINDOW, **args}), PROMPTS)
        for args in ({"values": "ridge"}, {})
    )
    for back_end in (changed, plain):
        back_end.step(PROMPTS)
        back_end.step(dict.fromkeys(PROMPTS, 1))
    assert torch.equal(changed.cache.nan_to_num(), plain.cache.nan_to_num())
    assert all(map(torch.equal, changed.outs, plain.outs))


def inputs_of(tokens: int, window: int, **fields: Any) -> ScorerInputs:
    """A request with two KV heads of two query heads each, whose keys lie in one block."""
    rows = torch.randn(2, 1, 2, 64, 16)
    given = {
        "num_tokens": tokens,
        "window": window,
        "sinks": 0,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "first_kv_head": 0,
        "layer": 0,
        "num_layers": 1,
        "scale": 0.25,
        "soft_cap": 0.0,
        "queries": torch.randn(window + 3, 4, 16),
        "key_cache": rows[0],
        "value_cache": rows[1],
        "block_row": torch.zeros(1, dtype=torch.int32),
    }
    return ScorerInputs(**{**given, **fields})


@pytest.mark.parametrize("keep", [20, 3])
def test_sinks_caps_and_layers_that_keep_less_than_the_window(keep: int) -> None:
    """Attention sums to less than 1 with learned sinks; of a long window the last rows count."""
    torch.manual_seed(3)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    inputs = inputs_of(40, 6, soft_cap=2.0, logit_sinks=sinks)
    kept = replace(inputs, start=40 - keep, num_tokens=keep)
    outputs = window_outputs(inputs)
    changed = changed_values(kept, outputs, 0.5)
    count = min(keep, 6)
    for head in range(2):
        keys, values = inputs.key_cache[0, head, :40].double(), inputs.value_cache[0, head, :40]
        parts = []
        for first in (0, 40 - keep):
            places, last = torch.arange(first, 40), torch.arange(40 - 6, 40)[:, None]
            queries = inputs.queries[-6:, 2 * head : 2 * head + 2].transpose(0, 1).double()
            logits = 2.0 * torch.tanh(queries @ keys[first:].T * 0.25 / 2.0)
            weights = logits.masked_fill(places > last, -math.inf).exp()
            total = weights.sum(dim=-1) + sinks[2 * head : 2 * head + 2, None].double().exp()
            parts.append(weights / total[..., None])
        wanted = parts[0] @ values.double()
        assert torch.allclose(outputs[2 * head : 2 * head + 2].double(), wanted, atol=1e-5)
        attention, wanted = parts[1][:, -count:].flatten(0, 1), wanted[:, -count:].flatten(0, 1)
        right = solved(attention, values[40 - keep :].double(), wanted, 0.5)
        assert torch.allclose(changed[head].double(), right, atol=1e-4)


def test_a_request_whose_values_are_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker.ridge_change
    calls = iter(range(100))

    def breaks(attention: torch.Tensor, missing: torch.Tensor, ridge: float) -> torch.Tensor:
        change = real(attention, missing, ridge)
        return change * torch.nan if next(calls) == 0 else change

    monkeypatch.setattr(worker, "ridge_change", breaks)
    back_end = BackEnd("cpu", policy(), PROMPTS)
    back_end.step(PROMPTS)
    assert set(back_end.tracker.failures.of) == {"a"}
    assert "not finite" in back_end.tracker.failures.of["a"].reason


def test_what_cannot_be_solved_is_marked() -> None:
    broken = torch.full((2, 3, 5), torch.nan)
    assert worker.ridge_change(broken, torch.ones(2, 3, 4), 1.0).isnan().all()
    nothing = worker.ridge_change(torch.zeros(2, 3, 5), torch.ones(2, 3, 4), 1.0)
    assert torch.equal(nothing, torch.zeros(2, 5, 4)), "all attention went to learned sinks"


@pytest.mark.parametrize(
    ("preset", "args", "reason"),
    [
        ("select", {}, "evicts nothing"),
        ("keydiff", {}, "'keydiff' has no observation window"),
        ("pyramidkv", {"chunk.tokens": 256}, "chunk.tokens 256"),
    ],
)
def test_policies_without_such_values(preset: str, args: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot change the kept values.*{reason}"):
        load_policy(preset, None, {**args, "values": "ridge"})


def test_the_memory_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of two KV heads at least, of all where they fit, and the outputs of a step's ends."""
    model = SimpleNamespace(max_model_len=1000, get_num_attention_heads=lambda parallel: 8)
    limits = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=16)
    config = SimpleNamespace(model_config=model, parallel_config=None, scheduler_config=limits)
    spec = SimpleNamespace(num_kv_heads=4, head_size=16)
    context: Any = SimpleNamespace(config=config, specs=[spec])
    outputs, of_head = 4 * 2 * 8 * WINDOW * 16, 4 * 1000 * (3 * 16 + 3 * 2 * WINDOW)
    hooks = RidgeHooks(policy(), 1.0, context)
    assert hooks.bytes_of_buffers() == 4 * of_head + outputs
    monkeypatch.setattr(worker, "COPIES_BYTES", of_head)
    assert hooks.bytes_of_buffers() == 2 * of_head + outputs
