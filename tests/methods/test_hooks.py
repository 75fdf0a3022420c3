# SPDX-License-Identifier: Apache-2.0
"""The four protocols of hooks, by a toy of each kind, on the CPU's back end and CUDA's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.back_ends import BLOCK, HEADS, KV_HEADS, LAYERS, SCALE, BackEnd, CudaImpl
from tests.shifted_worker import Host, launch_tables, policies
from tests.steps import make_context
from vllm_pyramid.attention.backend_cpu import PyramidCpuImpl
from vllm_pyramid.methods.accumulated.gather import KeyMass
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.step.attention_inputs import AttentionInputs, CacheWrite
from vllm_pyramid.step.eviction_batch import EvictionBatch
from vllm_pyramid.step.hooks import (
    LAYER_HOOKS,
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    MethodHooks,
    StepHooks,
    StepNeeds,
    WorkerContext,
)
from vllm_pyramid.step.step import Step, WorkerRequest

BACK_ENDS = pytest.mark.parametrize("name", ["cpu", "cuda"])
PROMPTS = {"a": 70, "b": 45}
POLICIES = ["pyramidkv", "xkv"]  # lengths known, and solved with the last layer


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_tables(monkeypatch, Host())


def evicting(name: str) -> Policy:
    return load_policy(name, 24, {"window": 8})


def serve_prompts(back_end: BackEnd) -> None:
    """Each prompt in one step, which evicts; then a token of each."""
    for name, tokens in PROMPTS.items():
        back_end.step({name: tokens})
    back_end.step(dict.fromkeys(PROMPTS, 1))


# A table of its own -------------------------------------------------------------------------------


class LastPages(LayerHooks):
    """Attends to the last two pages of each request."""

    name = "last_pages"

    def __init__(self, context: WorkerContext) -> None:
        self.seen: list[AttentionInputs] = []

    def before_attention(self, inputs: AttentionInputs) -> AttentionInputs:
        batch = inputs.batch
        first = (-(-batch.seq_lens // BLOCK) - 2).clamp(min=0)
        pages = first[:, None] + torch.arange(2)
        chosen = replace(
            batch,
            block_table=batch.block_table[: len(first)].gather(1, pages).int(),
            seq_lens=batch.seq_lens - first * BLOCK,
            skips=(batch.skips - first * BLOCK).clamp(min=0),
            max_query_len=1,
            max_seq_len=2 * BLOCK,
        )
        return replace(inputs, batch=chosen)

    def after_attention(self, inputs: AttentionInputs) -> None:
        self.seen.append(inputs)


@BACK_ENDS
@pytest.mark.parametrize("policy", ["full", *POLICIES])
def test_a_method_selects_what_is_attended_to(name: str, policy: str) -> None:
    """What lies before the selected pages may be anything: it is not read, and not lost."""
    served = load_policy("full") if policy == "full" else evicting(policy)
    back_end = BackEnd(name, served, PROMPTS)
    serve_prompts(back_end)
    chooses = LastPages(make_context(LAYERS))
    more = MethodHooks([*back_end.hooks, chooses])
    for impl in back_end.impls:
        impl.context.hooks = more
    for layer in range(LAYERS):
        for request in PROMPTS:
            table = back_end.tables[layer, list(PROMPTS).index(request)]
            first = -(-(back_end.computed[request] + 1) // BLOCK) - 2
            back_end.cache[table[:first].long()] = torch.nan
    back_end.step(dict.fromkeys(PROMPTS, 1))
    for layer in range(LAYERS):
        for row, request in enumerate(PROMPTS):
            first = (-(-back_end.computed[request] // BLOCK) - 2) * BLOCK
            first = max(first, back_end.skip(layer, request))
            key, value = back_end.held(back_end.before[layer], layer, request, first)
            group = HEADS // KV_HEADS
            key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
            logits = torch.einsum("hd,nhd->hn", back_end.queries[layer][row], key) * SCALE
            right = torch.einsum("hn,nhd->hd", logits.softmax(dim=-1), value)
            assert torch.allclose(back_end.outs[layer][row], right, atol=1e-5)
        whole = chooses.seen[layer]
        assert whole.log_sum_exp is None, "it would be that of another attention"
        assert whole.block_table.shape[1] > 2, "what comes behind attention sees the whole table"


class Attends(LayerHooks):
    """Attends in the lowest layer, in place of the back end."""

    name = "attends"

    def attend(self, inputs: AttentionInputs, out: torch.Tensor) -> bool:
        if inputs.layer == 0:
            out.fill_(0.5)
        return inputs.layer == 0


@BACK_ENDS
def test_a_method_attends(name: str) -> None:
    back_end = BackEnd(name, evicting("pyramidkv"), PROMPTS, [lambda context: Attends()])
    serve_prompts(back_end)
    assert (back_end.outs[0] == 0.5).all()
    plain = BackEnd(name, evicting("pyramidkv"), PROMPTS)
    serve_prompts(plain)
    assert torch.equal(plain.outs[1], back_end.outs[1])


class LastPagesOfHeads(LastPages):
    """Attends to the last two pages of each request, with a list for each KV head."""

    def before_attention(self, inputs: AttentionInputs) -> AttentionInputs:
        chosen = super().before_attention(inputs)
        lists = chosen.block_table[:, None].expand(-1, KV_HEADS, -1).contiguous()
        return replace(chosen, batch=replace(chosen.batch, block_table=lists))


@pytest.mark.parametrize(
    ("hooks", "said"),
    [(Attends(), "a method that attends"), (LastPagesOfHeads(make_context(LAYERS)), "lists of")],
    ids=["attends", "lists"],
)
def test_methods_have_no_fused_output(hooks: LayerHooks, said: str) -> None:
    back_end = BackEnd("cuda", load_policy("full"), PROMPTS)
    serve_prompts(back_end)
    for impl in back_end.impls:
        impl.context.hooks = MethodHooks([*back_end.hooks, hooks])
    back_end.step(dict.fromkeys(PROMPTS, 1))
    back_end.scales = (torch.ones(1),)
    with pytest.raises(NotImplementedError, match=f"{said}.* no fused output quantisation"):
        back_end.step(dict.fromkeys(PROMPTS, 1))


# A pool next to the blocks ------------------------------------------------------------------------


class FirstNumbers(CacheHooks, LayerHooks, EvictionHooks):
    """Keeps the first number of each key, for each slot and KV head: `[P, G, N]`."""

    name = "first_numbers"

    def __init__(self, context: WorkerContext) -> None:
        self.pool = torch.empty(0)
        self.copied = 0

    def bytes_per_block(self) -> int:
        return 4 * KV_HEADS * BLOCK

    def allocate(self, num_blocks: int) -> None:
        self.pool = torch.full((num_blocks, KV_HEADS, BLOCK), torch.inf)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.pool[targets] = self.pool[sources]
        self.copied += len(sources)

    def after_write(self, write: CacheWrite) -> None:
        blocks, rows = write.slots // BLOCK, write.slots % BLOCK
        assert torch.equal(write.key_cache[blocks, :, rows], write.keys)
        assert torch.equal(write.value_cache[blocks, :, rows], write.values)
        self.pool[blocks, :, rows] = write.keys[..., 0]

    def after_compact(self, batch: EvictionBatch, kept: torch.Tensor) -> None:
        for row, keep in enumerate(batch.host_keeps.tolist()):
            end, table = int(batch.host_lens[row]), batch.tables[row].long()
            places = torch.arange(end - keep, end)
            for head in range(KV_HEADS):
                old = kept[row, head, :keep].long()
                moved = self.pool[table[old // BLOCK], head, old % BLOCK]
                self.pool[table[places // BLOCK], head, places % BLOCK] = moved


@BACK_ENDS
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_follows_its_blocks(name: str, policy: str) -> None:
    """Through writes, evictions, and copies of what an eviction overwrites."""
    back_end = BackEnd(name, evicting(policy), PROMPTS, [FirstNumbers])
    (pool,) = (hooks for hooks in back_end.hooks if isinstance(hooks, FirstNumbers))
    back_end.tracker.copies = {"a": back_end.spare}  # as many as the plan comes to
    serve_prompts(back_end)
    assert pool.copied > 0
    evicted = 0
    for layer in range(LAYERS):
        for row, request in enumerate(PROMPTS):
            skip = back_end.skip(layer, request)
            evicted += skip
            table = back_end.tables[layer, row]
            positions = torch.arange(skip, back_end.computed[request])
            found = pool.pool[table[positions // BLOCK].long(), :, positions % BLOCK]
            keys, _ = back_end.held(back_end.cache, layer, request, skip)
            assert torch.equal(found, keys[..., 0])
    assert evicted
    keys, _ = back_end.parts(back_end.cache)
    copies = torch.tensor(back_end.spare[: pool.copied])
    assert torch.equal(pool.pool[copies], keys[copies][..., 0]) and keys[copies].isfinite().all()


# Steps --------------------------------------------------------------------------------------------


class Reports(StepHooks):
    """Says what it heard."""

    name = "reports"

    def __init__(self, context: WorkerContext) -> None:
        self.step, self.forgotten = context.step(), ""

    def begin_step(self, step: Step) -> StepNeeds:
        self.step = step
        return StepNeeds(wants_log_sum_exp=True)

    def end_step(self, step: Step) -> Any:
        assert step is self.step and step.wants_log_sum_exp
        return {"tokens": int(step.scheduled.sum())}

    def without_graphs(self, requests: Any, computed: Any) -> bool:
        return any(isinstance(one, WorkerRequest) for one in requests)

    def forget(self, request_id: str) -> None:
        self.forgotten += request_id


def test_a_step_gets_what_is_needed_and_reports() -> None:
    back_end = BackEnd("cpu", evicting("pyramidkv"), PROMPTS, [Reports])
    back_end.step({"a": 70})
    assert back_end.reports == {"reports": {"tokens": 70}}
    tracker = back_end.tracker
    assert tracker.needs_eager_step(["a"], tracker.step.computed)
    (hooks,) = (one for one in back_end.hooks if isinstance(one, Reports))
    tracker.remove("a")
    assert hooks.forgotten == "a"


# Start-up -----------------------------------------------------------------------------------------


class Scores(EvictionHooks):
    def __init__(self, name: str, inside: bool = False) -> None:
        self.name, self.inside = name, inside

    def score(self, batch: EvictionBatch) -> torch.Tensor | None:
        return None


class Decides(Scores):
    def decide(self, plans: Any, evidence: Any) -> Any: ...


def test_two_that_want_to_score_are_refused() -> None:
    with pytest.raises(ValueError, match="one and two both want to score evictions: choose"):
        MethodHooks([Scores("one"), Attends(), Scores("two")])
    with pytest.raises(ValueError, match="both want to score evictions inside prompts"):
        MethodHooks([Scores("one", inside=True), Scores("two", inside=True)])
    with pytest.raises(ValueError, match="both want to decide the lengths"):
        MethodHooks([Decides("one"), Decides("two", inside=True)])
    one, two = Scores("one"), Scores("two", inside=True)
    both = MethodHooks([one, two])
    assert both.scorer is one and both.scorer_inside is two
    assert MethodHooks([one]).scorer_inside is one


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        (Attends(), "attends has the hook `attend`"),
        (LastPages(make_context(1)), "last_pages has the hook `after_attention`"),
    ],
)
def test_a_hook_that_a_back_end_does_not_call_is_refused(hooks: Any, said: str) -> None:
    """Of a policy that neither attends nor works in every step, CUDA captures whole steps."""
    policy = evicting("pyramidkv")
    own = MethodHooks([hooks])
    own.check_called("PyramidCpuImpl", PyramidCpuImpl.called_hooks(policy))
    with pytest.raises(ValueError, match=f"{said}.*CudaImpl"):
        own.check_called("CudaImpl", CudaImpl.called_hooks(policy))
    own.check_called("CudaImpl", CudaImpl.called_hooks(load_policy("kcache")))
    own.check_called("CudaImpl", CudaImpl.called_hooks(load_policy("h2o")))


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
def test_all_policies_have_their_hooks_called(policy: Policy) -> None:
    called = CudaImpl.called_hooks(policy)
    if policy.attends:
        assert called == LAYER_HOOKS
    elif not policy.scorer.keeps_queries:  # whose memory follows from a model
        hooks = MethodHooks(policy.worker_hooks(make_context(4)))
        hooks.check_called("CudaImpl", called)


def test_a_scorer_inside_prompts_knows_it() -> None:
    args = {"window": 8, "chunk": {"tokens": 48, "keep": 24, "scorer": "accumulated_attention"}}
    policy = load_policy("pyramidkv", "24", args=args)
    hooks = MethodHooks(policy.worker_hooks(make_context(2)))
    assert isinstance(hooks.scorer_inside, KeyMass) and hooks.scorer is None
