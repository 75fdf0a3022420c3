# SPDX-License-Identifier: Apache-2.0
"""Compensation tokens: the merged attention against an oracle in float64, and whose they are.

Shape legend: G KV heads of a layer, N tokens of a lane's block, D head size, T tokens of a step.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.steps import make_context, the_hooks
from vllm_pyramid.attention.backend_cpu import PyramidCpuImpl
from vllm_pyramid.attention.cpu_metadata import PyramidCpuMetadata
from vllm_pyramid.attention.head_lanes import HeadLanes
from vllm_pyramid.attention.layer_context import LayerContext
from vllm_pyramid.methods.streaming_heads import refusals
from vllm_pyramid.methods.streaming_heads.compensation import Compensation, merged
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.hooks import MethodHooks
from vllm_pyramid.worker.eviction_tracker import EvictionTracker

pytestmark = pytest.mark.cpu

LAYERS, G, GROUP, N, D = 2, 3, 2, 8, 16
MASK = [[0.9, 0.1, 0.2], [0.3, 0.8, 0.1]]
WHOLE = np.array(MASK) > 0.5
SINKS, RECENT, CHUNK = 4, 12, 40
LONGEST = 160


def skip_of(prompt_len: int, computed: int, chunked: bool) -> int:
    """What a streaming head has dropped of a request of which as many tokens are computed."""
    points = [prompt_len]
    if chunked:
        points += range(CHUNK, prompt_len - 1, CHUNK)
    return max((max(p - SINKS - RECENT, 0) // N * N for p in points if p <= computed), default=0)


class Worker:
    """The layers of a worker in steps of several requests, whose numbers are random.

    Attributes:
        history: the keys and values of each request, `[LAYERS, 2, tokens, G, D]` float64.
        differs: the most that compensation tokens have changed.
    """

    def __init__(self, chunked: bool, seed: int) -> None:
        self.chunked, self.random = chunked, torch.Generator().manual_seed(seed)
        args = {
            "heads.mask": MASK,
            "heads.share": 1 / 3,
            "heads.sinks": SINKS,
            "heads.recent": RECENT,
            "heads.recent_share": 0.0,
        }
        policy = load_policy("razorattention", None, args | {"chunk.tokens": CHUNK * chunked})
        model = SimpleNamespace(get_num_kv_heads=lambda parallel: G)
        specs: Any = [SimpleNamespace(layer_idx=layer, head_size=D) for layer in range(LAYERS)]
        config = SimpleNamespace(
            model_config=model,
            parallel_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        self.tracker = EvictionTracker(policy, LAYERS * G, N, 9)
        context = make_context(LAYERS, tracker=self.tracker, specs=specs, config=config)
        self.tracker.hooks = MethodHooks(policy.worker_hooks(context))
        self.compensation: Compensation = the_hooks(self.tracker, Compensation)
        self.lanes = HeadLanes(G, N)
        self.impls = []
        for layer in range(LAYERS):
            impl = PyramidCpuImpl(G * GROUP, D, D**-0.5, G)
            impl.context = LayerContext(self.tracker, layer, self.tracker.hooks, lanes=self.lanes)
            self.impls.append(impl)
        self.width = LONGEST // N
        self.free = torch.randperm(LAYERS * G * self.width * 8, generator=self.random) + 1
        self.cache = torch.full((len(self.free) + 1, 1, N, 2 * D), torch.nan)
        self.tables: dict[str, torch.Tensor] = {}
        self.prompt_lens: dict[str, int] = {}
        self.full: set[str] = set()
        self.history: dict[str, torch.Tensor] = {}
        self.differs = 0.0

    def add(self, name: str, prompt_len: int, full: bool = False) -> None:
        self.tracker.add(name, prompt_len, {"kv_policy": "full"} if full else None)
        used = LAYERS * G * self.width
        self.tables[name] = self.free[:used].view(LAYERS, -1).int()
        self.free = self.free[used:]
        self.prompt_lens[name] = prompt_len
        self.full |= {name} if full else set()
        self.preempt(name)

    def preempt(self, name: str) -> None:
        """Begin again without a token; what the blocks held belongs to others."""
        self.history[name] = torch.zeros(LAYERS, 2, 0, G, D, dtype=torch.float64)
        self.cache[self.tables[name].long()] = torch.nan

    def remove(self, name: str) -> None:
        self.tracker.remove(name)
        blocks = self.tables.pop(name)
        self.cache[blocks.long()] = torch.nan
        self.free = torch.cat([self.free, blocks.flatten().long()])
        self.full.discard(name)
        del self.history[name]

    def computed(self, name: str) -> int:
        return self.history[name].shape[2]

    def next_point(self, name: str) -> int:
        """The tokens that the request's next step ends with at most."""
        computed, prompt_len = self.computed(name), self.prompt_lens[name]
        points = [prompt_len]
        if self.chunked and name not in self.full:
            points += range(CHUNK, prompt_len - 1, CHUNK)
        return min((p for p in points if p > computed), default=computed + 3)

    def skips(self, name: str, computed: int) -> np.ndarray:
        """What each head has dropped, `[LAYERS, G]`."""
        dropped = skip_of(self.prompt_lens[name], computed, self.chunked)
        return np.where(WHOLE, 0, 0 if name in self.full else dropped)

    def step(self, scheduled: dict[str, int]) -> None:
        """Compute as many tokens of each, in this order, and compare every layer's attention."""
        names, counts = list(scheduled), list(scheduled.values())
        before = [self.computed(name) for name in names]
        lens = np.array(before, np.int32) + counts
        step = self.tracker.begin_step(
            names,
            np.array([self.prompt_lens[name] for name in names], np.int32),
            np.array(before, np.int32),
            np.array(counts, np.int32),
        )
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        total, seq_lens = sum(counts), torch.from_numpy(lens.astype(np.int32))
        shared = self.lanes.of_step(step, starts, seq_lens, int(lens.max()))
        new = torch.randn(LAYERS, 2, total, G, D, generator=self.random)
        new[:, 0] += 1  # a mean key that is not near zero
        for row, name in enumerate(names):
            own = new[:, :, int(starts[row]) : int(starts[row + 1])].double()
            self.history[name] = torch.cat([self.history[name], own], dim=2)
        for layer, impl in enumerate(self.impls):
            table = torch.stack([self.tables[name][layer] for name in names])
            skips = torch.from_numpy(step.skips[layer * G : (layer + 1) * G]).T
            meta = PyramidCpuMetadata(
                total,
                self.lanes.tables(shared, table),
                shared.query_starts,
                shared.seq_lens,
                skips.flatten(),
            )
            impl.ops.reshape_and_cache(
                *(self.lanes.as_one_head(part) for part in new[layer]),
                *impl._split(self.cache),
                self.lanes.slots(shared, table),
            )
            query = torch.randn(total, G * GROUP, D, generator=self.random)
            out = torch.full_like(query, torch.nan)
            impl.forward(SimpleNamespace(), query, new, new, self.cache, meta, out)
            for row, name in enumerate(names):
                own = slice(int(starts[row]), int(starts[row + 1]))
                assert (skips[row].numpy() == self.skips(name, before[row])[layer]).all()
                self.compare(out[own], query[own].double(), name, layer, before[row])
        self.tracker.end_step()
        for name in names:  # what a lane has dropped is another's from now on
            gone = self.skips(name, self.computed(name)) // N
            table = self.tables[name].view(LAYERS, -1, G)
            for layer, head in np.ndindex(LAYERS, G):
                self.cache[table[layer, : gone[layer, head], head].long()] = torch.nan
        assert not self.tracker.failures.of, self.tracker.failures.of

    def compare(
        self, out: torch.Tensor, query: torch.Tensor, name: str, layer: int, before: int
    ) -> None:
        keys, values = self.history[name][layer]
        count, tokens = len(query), keys.shape[0]
        for head in range(G * GROUP):
            lane = head // GROUP
            key, value = keys[:, lane], values[:, lane]
            logits = query[:, head] @ key.T * D**-0.5
            hidden = torch.ones(count, tokens, dtype=torch.bool).triu(tokens - count + 1)
            dropped = int(self.skips(name, before)[layer, lane])
            gone = slice(SINKS, SINKS + dropped)
            hidden[:, gone] = dropped > 0
            logits = logits.masked_fill(hidden, -torch.inf)
            without = logits.softmax(dim=-1) @ value
            expected = without
            if dropped:
                further = query[:, head] @ key[gone].mean(0) * D**-0.5 + np.log(dropped)
                weights = torch.cat([logits, further[:, None]], dim=1).softmax(dim=-1)
                expected = weights @ torch.cat([value, value[gone].mean(0)[None]])
            torch.testing.assert_close(out[:, head].double(), expected, rtol=0, atol=1e-5)
            self.differs = max(self.differs, float((expected - without).abs().max()))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_merged_attention_is_that_with_one_more_token(chunked: bool, seed: int) -> None:
    """Ragged steps in any order, with preemptions, requests that end, and new ones."""
    worker, chance = Worker(chunked, seed), random.Random(seed)
    names: list[str] = []
    preempted = ended = 0
    for number in range(60):
        if len(names) < 5:
            name = f"r{number}"
            worker.add(name, chance.randrange(1, 110), full=chance.random() < 0.2)
            names.append(name)
        chance.shuffle(names)
        behind = [name for name in names if worker.computed(name) >= worker.prompt_lens[name]]
        decodes = number % 3 == 0 and behind
        scheduled = {}
        for name in behind if decodes else names[: chance.randrange(1, 6)]:
            most = worker.next_point(name) - worker.computed(name)
            count = 1 if decodes else chance.choice([most, chance.randrange(1, most + 1)])
            scheduled[name] = count
        worker.step(scheduled)
        for name in list(names):
            if chance.random() < 0.05:
                preempted += bool(worker.skips(name, worker.computed(name)).any())
                worker.preempt(name)
            elif worker.computed(name) > LONGEST - 10 or chance.random() < 0.08:
                ended += worker.compensation.dropped.place_of(name) >= 0
                worker.remove(name)
                names.remove(name)
    assert preempted and ended >= 3 and worker.differs > 0.1
    places = len(worker.compensation.dropped.means)
    for name in names:
        worker.remove(name)
    assert len(worker.compensation.dropped) == 0
    assert places == 8, "requests that end leave their places to others"


def test_a_lane_that_has_not_dropped_what_its_plan_says_fails_its_request() -> None:
    worker = Worker(chunked=False, seed=3)
    for name in ("a", "b"):
        worker.add(name, 90)
        worker.step({name: 90})
    worker.compensation.dropped.counts[worker.compensation.dropped.place_of("a"), 1, 2] -= 1
    lens = np.array([90, 90], np.int32)
    worker.tracker.begin_step(["b", "a"], lens, lens, np.ones(2, np.int32))
    assert list(worker.tracker.failures.of) == ["a"]
    dropped = 4 * skip_of(90, 90, False)
    wanted = f"compensation tokens stand for {dropped - 1} dropped tokens of {dropped}; report this"
    assert worker.tracker.failures.of["a"].reason == wanted


# The merge alone ----------------------------------------------------------------------------------


def batch_of(scale: float, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(5)
    return {
        "out": torch.randn(40, G * GROUP, D).to(dtype),
        "log_sum_exp": torch.randn(40, G * GROUP) * scale,
        "query": (torch.randn(40, G * GROUP, D) * scale).to(dtype),
        "key": torch.randn(40, G, D),
        "value": torch.randn(40, G, D),
        "log_counts": torch.randint(1, 10**6, (40, G)).log(),
        "scale": 0.25,
    }


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 2e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
def test_the_merge_is_stable(
    dtype: torch.dtype, error: float, scale: float, soft_cap: float
) -> None:
    """Also where either side has all the weight: exponents of thousands."""
    given = batch_of(scale, dtype)
    found = merged(**given, soft_cap=soft_cap)
    assert found.dtype == dtype
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    key, value, counts = (
        wide[name].repeat_interleave(GROUP, dim=1) for name in ("key", "value", "log_counts")
    )
    logits = (wide["query"] * key).sum(-1) * given["scale"]
    if soft_cap:
        logits = soft_cap * (logits / soft_cap).tanh()
    pair = torch.stack([wide["log_sum_exp"], logits + counts], dim=-1)
    # A logit of 1e4 in float32 is known to 1e-2, so nothing is said where both sides weigh alike.
    sure = (pair[..., 0] - pair[..., 1]).abs() > (0 if scale < 100 else 12)
    weights = pair.softmax(dim=-1)
    expected = weights[..., :1] * wide["out"] + weights[..., 1:] * value
    assert int(sure.sum()) > 200
    tolerance = error * (1 + expected.abs()) * (1 if scale < 10 else 4)
    assert ((found.double() - expected).abs() <= tolerance)[sure].all()


def test_without_dropped_tokens_every_bit_stays() -> None:
    given = batch_of(1.0, torch.bfloat16)
    given["log_counts"][:, 1] = -torch.inf
    found = merged(**given)
    assert torch.equal(found[:, GROUP : 2 * GROUP], given["out"][:, GROUP : 2 * GROUP])
    assert not torch.equal(found[:, :GROUP], given["out"][:, :GROUP])


# The setting --------------------------------------------------------------------------------------


def test_razor_attention_compensates_and_duo_attention_does_not() -> None:
    razor, duo = load_policy("razorattention"), load_policy("duoattention")
    assert razor.attends and not duo.attends
    context = make_context(1)
    assert not duo.worker_hooks(context)
    off = load_policy("razorattention", None, {"heads.compensate": False})
    assert not off.attends and not off.worker_hooks(context)


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--tensor-parallel-size", {"tensor_parallel_size": 2}),
        ("--pipeline-parallel-size", {"pipeline_parallel_size": 2}),
        ("--speculative-config", {"speculative_config": object()}),
        ("vLLM's second model runner", {"use_v2_model_runner": True}),
    ],
)
def test_configurations_that_were_not_tried(flag: str, changes: dict[str, Any]) -> None:
    policy = load_policy("razorattention")

    def config(**changed: Any) -> Any:
        plain = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        parallel = {key: changed.pop(key, value) for key, value in plain.items()}
        rest = {"speculative_config": None, "use_v2_model_runner": False, **changed}
        return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), **rest)

    refusals.check_compensation(policy, config())
    with pytest.raises(ValueError, match=f"compensation tokens .* not tried with {flag}"):
        refusals.check_compensation(policy, config(**changes))
