# SPDX-License-Identifier: Apache-2.0
"""What the runtime gives to the layers, and what it refuses, with stand-ins for vLLM's runner."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_pyramid.attention.backend_triton import PyramidTritonBuilder
from vllm_pyramid.attention.cuda_metadata import PyramidBuilderMixin
from vllm_pyramid.attention.per_head.lane_tables import LaneTables
from vllm_pyramid.attention.shifted_tables import ShiftedTables
from vllm_pyramid.frontend.settings import KVSettings
from vllm_pyramid.policy import Policy, load_policy
from vllm_pyramid.policy.served_settings import SERVED_KEY
from vllm_pyramid.step.hooks import LAYER_HOOKS
from vllm_pyramid.worker import adapter, adapter_v2, layer_binding, worker_layers
from vllm_pyramid.worker.adapter import RunnerAdapter
from vllm_pyramid.worker.adapter_v1 import TablesV1
from vllm_pyramid.worker.adapter_v2 import MetadataBuilding, TablesV2
from vllm_pyramid.worker.pipeline_sync import PipelineSync

NAMES = ["layers.0.attn", "layers.1.attn", "layers.2.attn"]
ROWS, WIDTH = 3, 8


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's groups of processes exist in workers alone."""
    group = SimpleNamespace(rank_in_group=0, world_size=1, ranks=[0], cpu_group=None)
    monkeypatch.setattr(adapter, "get_tp_group", lambda: group)
    monkeypatch.setattr(adapter, "get_pp_group", lambda: group)
    monkeypatch.setattr(worker_layers, "get_shared_kv_cache_layers", lambda config: {})


def served(policy: str, **settings: Any) -> dict[str, Any]:
    """What the front end puts into `additional_config`."""
    found = KVSettings(policy, kv_min_tokens=0, **settings).served()
    assert found is not None
    return {SERVED_KEY: found.as_data()}


class OurImpl:
    context = None
    alibi_slopes: Any = None
    serves_single_heads = True
    sinks: torch.Tensor | None = None

    @classmethod
    def called_hooks(cls, policy: Policy) -> frozenset[str]:
        return LAYER_HOOKS


class OurBuilder:
    context = None
    reads_shifted_tables = True


class StockRunner:
    """Makes tables as vLLM's second runner does: one a group, new ones in every initialisation."""

    own = NAMES  # layers of this worker

    def __init__(self, heads: Sequence[int]) -> None:
        self.generations: list[weakref.ref[torch.Tensor]] = []
        self.heads = heads

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {
            # Pages of one size, however many heads share them.
            name: FullAttentionSpec(
                block_size=16, num_kv_heads=heads, head_size=128 // heads, dtype=torch.bfloat16
            )
            for name, heads in zip(NAMES, self.heads, strict=True)
            if name in self.own
        }

    def initialize_kv_cache(self, groups: list[Any]) -> None:
        assert all(old() is None for old in self.generations), "the tables before are still alive"
        self.attn_groups = [[g] if g.layer_names[0] in self.own else [] for g in groups]
        self.tables = [torch.zeros(ROWS, WIDTH, dtype=torch.int32) for _ in groups]


class Tables:
    """The tables of a `StockRunner`."""

    tensors_per_group, holds_tables, held_on_host = 1, False, False

    def __init__(self, runner: StockRunner) -> None:
        self.runner = runner

    def shape(self, group: int) -> tuple[int, int]:
        return ROWS, WIDTH

    def held(self, groups: Sequence[int]) -> None:
        return None

    def replace(self, tables: Mapping[int, torch.Tensor]) -> None:
        for group, table in tables.items():
            self.runner.tables[group] = table


class Runner(RunnerAdapter, StockRunner):
    """Has been asked by vLLM for the specs of its caches."""

    tables_class: Any = Tables

    def __init__(
        self,
        policy: str = "pyramidkv",
        kv_trace: str | None = None,
        heads: Sequence[int] = (2, 2, 2),
        args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(heads)
        self.device = torch.device("cpu")
        self.kv_caches: list[torch.Tensor] = []  # read where there is a host cache alone
        self.layers = {
            name: SimpleNamespace(impl=OurImpl(), kv_cache=torch.zeros(1)) for name in NAMES
        }
        budget = None if policy in ("full", "duoattention") else 64
        self.vllm_config = SimpleNamespace(  # type: ignore[assignment]
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            speculative_config=None,
            model_config=SimpleNamespace(
                max_model_len=1024, get_num_attention_heads=lambda parallel: 4
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=512),
            max_concurrent_batches=1,
            additional_config=served(
                policy, kv_budget=budget, kv_trace=kv_trace, kv_policy_args=args
            ),
        )
        assert list(self.get_kv_cache_spec()) == self.own

    def get_model(self) -> torch.nn.Module:  # type: ignore[override]
        return torch.nn.Module()

    def runner_tables(self) -> Any:
        return self.tables_class(self)

    @property
    def shifted(self) -> ShiftedTables | LaneTables | None:
        return self.pyramid.tables.shifted


class CacheConfig(list[Any]):
    """The groups, as `StockRunner` takes them, with what else is read of vLLM's configuration."""

    num_blocks = 30


def make_groups(order: Sequence[int] = (0, 1, 2)) -> CacheConfig:
    return CacheConfig(
        SimpleNamespace(
            layer_names=[NAMES[layer]], metadata_builders=[OurBuilder()], kernel_block_size=None
        )
        for layer in order
    )


def test_one_runtime_serves_all_calls_for_specs() -> None:
    """vLLM asks again where it measures what CUDA graphs need."""
    runner = Runner()
    runtime = runner.pyramid
    assert runner.get_kv_cache_spec() == runtime.layers.specs
    assert runner.pyramid is runtime


def test_tables_of_vllm_become_layers_of_one_tensor() -> None:
    runner = Runner()
    groups = make_groups(order=(2, 0, 1))  # a group's table is its layer's, in whatever order
    runner.initialize_kv_cache(groups)
    shifted = runner.shifted
    assert shifted is not None
    assert [table.shape for table in shifted.tables] == [(ROWS, WIDTH)] * len(NAMES)
    assert len({table.untyped_storage().data_ptr() for table in shifted.tables}) == 1
    for group, table in zip(groups, runner.tables, strict=True):
        (builder,) = group.metadata_builders
        context = builder.context
        assert NAMES[context.layer] == group.layer_names[0]
        assert table.data_ptr() == shifted.tables[context.layer].data_ptr()
        assert context is runner.layers[group.layer_names[0]].impl.context
        assert context.shifted is shifted


def test_a_pipeline_stage_binds_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers in the model; vLLM leaves the groups of other stages' layers empty."""
    group = SimpleNamespace(rank_in_group=1, world_size=2, ranks=[0, 1], cpu_group=None)
    monkeypatch.setattr(adapter, "get_pp_group", lambda: group)

    def of_two_stages(self: Any, specs: dict[str, Any], readers: Any) -> list[Any]:
        return [({NAMES[0]: specs[NAMES[1]]}, {}), (specs, readers)]

    monkeypatch.setattr(PipelineSync, "layers_of_all", of_two_stages)
    monkeypatch.setattr(StockRunner, "own", NAMES[1:])
    monkeypatch.setattr(layer_binding, "evicts_at_step_end", lambda caches, policy: True)
    runner = Runner()
    assert runner.pyramid.tracker.num_layers == len(NAMES)
    groups = make_groups()
    runner.initialize_kv_cache(groups)
    assert runner.attn_groups[0] == []
    assert runner.shifted is not None and len(runner.shifted.tables) == 2
    for place, layer in enumerate((1, 2)):
        context = groups[layer].metadata_builders[0].context
        assert context.layer == layer
        # The last layer of this stage is the last one that it waits for.
        assert context.step_end.num_layers == len(runner.shifted.tables)
        assert runner.tables[layer].data_ptr() == runner.shifted.tables[place].data_ptr()
    # vLLM has a table of the other stage's layer, too.
    runner.pyramid.memory._device = torch.device("cuda")
    numbers = 2 * 4 * ROWS * 4 + 3 * 512 * 8
    assert runner.pyramid.memory.table_bytes() == 3 * ROWS * 64 * 4 + numbers
    runner.pyramid.memory._tables = TablesV2(runner)
    assert runner.pyramid.memory.table_bytes() == 2 * ROWS * 64 * 4 + numbers
    runner.pyramid.start_trace()


def test_layers_are_evicted_together_where_their_caches_are_one_memory() -> None:
    cache = torch.zeros(4, 2)
    assert layer_binding.are_one_memory([cache, cache.view(2, 4)])
    assert not layer_binding.are_one_memory([cache, cache.clone()])
    always, levels = (load_policy("auto", args={"schedule": s}) for s in ("prompt_end", "pressure"))
    assert not layer_binding.evicts_at_step_end([cache], always)  # on the CPU
    assert layer_binding.evicts_at_step_end([cache], levels)
    assert not layer_binding.evicts_at_step_end([], levels)  # a stage whose layers evict nothing


def test_the_tables_of_an_earlier_initialisation_are_freed_first() -> None:
    runner = Runner()
    runner.initialize_kv_cache(make_groups())
    assert runner.shifted is not None
    runner.generations.append(weakref.ref(runner.shifted.tables[0]))
    assert runner.generations[0]() is not None
    runner.attn_groups = []  # vLLM clears these
    runner.initialize_kv_cache(make_groups())
    assert runner.shifted is not None
    assert runner.tables[0].shape == (ROWS, WIDTH)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda runner, group: setattr(group, "metadata_builders", [SimpleNamespace()]),
            "layers.1.attn has the attention SimpleNamespace",
        ),
        (
            lambda runner, group: group.metadata_builders.append(SimpleNamespace(context=None)),
            "layers.1.attn has the attention SimpleNamespace",
        ),
        (
            lambda runner, group: setattr(runner.layers[NAMES[1]], "impl", SimpleNamespace()),
            "layers.1.attn has the attention SimpleNamespace",
        ),
        (
            lambda runner, group: setattr(group, "kernel_block_size", 8),
            "blocks of 16 tokens into blocks of 8, .* set --block-size 8",
        ),
    ],
)
def test_attention_that_does_not_follow_a_policy_is_refused(spoil: Any, message: str) -> None:
    runner = Runner()
    groups = make_groups()
    spoil(runner, groups[1])
    with pytest.raises(RuntimeError, match=message):
        runner.initialize_kv_cache(groups)


def test_a_layer_without_a_group_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"without an attention group of their own: \[1\]"):
        Runner().initialize_kv_cache(make_groups(order=(0, 2)))


@pytest.mark.parametrize("policy", ["pyramidkv", "full"])
def test_distances_that_eviction_loses_are_refused(policy: str) -> None:
    runner = Runner(policy)
    runner.layers[NAMES[2]].impl.alibi_slopes = torch.ones(4)
    if policy == "full":
        runner.initialize_kv_cache(make_groups())
        assert runner.shifted is not None
    else:
        with pytest.raises(ValueError, match=r"layers\.2\.attn weights keys by their distance"):
            runner.initialize_kv_cache(make_groups())


def test_traces_start_when_the_worker_says_so(tmp_path: Path) -> None:
    runner = Runner("xkv", kv_trace=str(tmp_path / "traces"))
    assert len(runner.pyramid.tracker.hooks) == 1
    groups = make_groups()
    runner.initialize_kv_cache(groups)
    contexts = [group.metadata_builders[0].context for group in groups]
    assert [context.trace for context in contexts] == [None] * 3
    assert not (tmp_path / "traces").exists()
    runner.pyramid.start_trace()
    assert (tmp_path / "traces").is_dir()
    assert all(context.trace is contexts[0].trace is not None for context in contexts)
    assert all(hooks.trace is contexts[0].trace for hooks in runner.pyramid.tracker.hooks)
    silent = Runner()
    silent.initialize_kv_cache(make_groups())
    silent.pyramid.start_trace()
    assert silent.layers[NAMES[0]].impl.context.trace is None


# What methods keep in addition to the cache -------------------------------------------------------


def test_a_hook_that_attention_does_not_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    called = LAYER_HOOKS - {"after_write"}
    monkeypatch.setattr(OurImpl, "called_hooks", staticmethod(lambda policy: called))
    said = "the method accumulated has the hook `after_write`, which the attention back end OurImpl"
    with pytest.raises(ValueError, match=said):
        Runner("h2o").initialize_kv_cache(make_groups())
    Runner("pyramidkv").initialize_kv_cache(make_groups())


def test_the_mass_is_taken_out_of_the_memory_of_the_cache() -> None:
    page = 16 * 2 * 64 * 2 * 2  # tokens, KV heads, head size, K and V, bytes
    for policy, expected in (("h2o", 1000 * page), ("pyramidkv", 1000 * (page + 4 * 16 * 2))):
        runner = Runner(policy)
        assert {spec.page_size_bytes for spec in runner.pyramid.layers.evicting.values()} == {page}
        assert runner.pyramid.memory.cache_bytes(1000 * (page + 4 * 16 * 2)) == expected


def test_levels_are_taken_out_of_the_memory_of_the_cache() -> None:
    """A byte for each token and KV head, and as many again where one layer keeps twice the mean."""
    page = 16 * 2 * 64 * 2 * 2
    for policy, levels in (("snapkv", 1), ("pyramidkv", 2)):
        memory = Runner(policy, args={"schedule": "pressure"}).pyramid.memory
        assert memory.cache_bytes(1000 * (page + levels * 16 * 2)) == 1000 * page
        assert memory.eviction_bytes() > Runner(policy).pyramid.memory.eviction_bytes()


@pytest.mark.parametrize("policy", ["pyramidkv", "keydiff", "xkv", "h2o", "full"])
def test_what_evictions_take_is_taken_out_of_the_memory_of_the_cache(policy: str) -> None:
    memory = Runner(policy).pyramid.memory
    evictions, available = memory.eviction_bytes(), 1 << 30
    assert (evictions > 3 * 1024 * 2 * 4) == (policy != "full")  # scores of three longest requests
    taken = memory.table_bytes() + memory.buffer_bytes() + evictions
    assert memory.reserve(available, is_fixed=False) == memory.cache_bytes(available - taken)
    assert memory.reserve(available, is_fixed=True) == memory.cache_bytes(available)
    with pytest.raises(ValueError, match="no memory is left for the KV cache"):
        memory.reserve(taken, is_fixed=False)
    memory.check_room(available, free=available + taken)
    with pytest.raises(ValueError, match="GiB of free memory: lower"):
        memory.check_room(available, free=available + taken - 1)


def test_traces_and_further_requests_take_more() -> None:
    plain, traced = Runner("snapkv"), Runner("snapkv", kv_trace="/tmp/never-written")
    assert traced.pyramid.memory.eviction_bytes() > plain.pyramid.memory.eviction_bytes()
    before = plain.pyramid.memory.eviction_bytes()
    plain.vllm_config.scheduler_config.max_num_seqs += 1
    assert plain.pyramid.memory.eviction_bytes() > before


def test_logits_of_replays_are_reserved() -> None:
    """In bfloat16, and in float32 with their logarithms, for each word."""
    memory = Runner().pyramid.memory
    model: Any = memory._config.model_config
    model.head_dtype, model.get_vocab_size = torch.bfloat16, lambda: 152_000
    before = memory.buffer_bytes()
    memory._settings = replace(memory._settings, shadow=0.01)
    assert memory.buffer_bytes() - before == 256 * 152_000 * (2 + 4 + 4)


@pytest.mark.parametrize("policy", ["pyramidkv", "full"])
@pytest.mark.parametrize("tables_class", [TablesV1, TablesV2])
def test_tables_are_as_large_as_is_said(monkeypatch, policy, tables_class) -> None:
    """1,024 tokens are 64 entries of 4 bytes: once per layer and row, or twice."""
    monkeypatch.setattr(Runner, "tables_class", tables_class)
    tables = 3 * ROWS * 64 * 4
    beside = 3 * (2 * ROWS * 4 + ROWS * 8) + 3 * 512 * 8
    memory = Runner(policy).pyramid.memory
    assert memory.table_bytes() == tables_class.tensors_per_group * tables + beside
    memory._device = torch.device("cuda")
    assert memory.table_bytes() == tables + beside
    if tables_class is TablesV2:  # whose tables of all requests stay where the host pins nothing
        monkeypatch.setattr(adapter_v2, "has_host_tables", lambda: False)
        assert memory.table_bytes() == 2 * tables + beside
    assert (TablesV1.tensors_per_group, TablesV2.tensors_per_group) == (1, 2)


STREAMS = {"mask": [[1.0, 0.0]] * 3}


def test_heads_with_tables_of_their_own_get_a_second_tensor() -> None:
    runner = Runner("duoattention", args=STREAMS)
    runner.initialize_kv_cache(make_groups(order=(2, 0, 1)))
    shifted, memory = runner.shifted, runner.pyramid.memory
    assert isinstance(shifted, LaneTables) and shifted.lanes == 2
    for group, layer in enumerate((2, 0, 1)):
        assert runner.tables[group].data_ptr() == shifted.of_runner[layer].data_ptr()
    lanes, filled = 3 * ROWS * 2, 3 * ROWS * 64 * 4
    assert [table.shape for table in shifted.tables] == [(ROWS * 2, WIDTH // 2)] * 3
    assert shifted.slots.shape == (3, 512 * 2) and shifted.lens.shape == (3, ROWS * 2)
    expected = filled + lanes * 16 + 3 * 512 * 8
    assert memory.table_bytes() == expected  # of the CPU, which has no second tensor
    memory._device = torch.device("cuda")
    of_tensors = filled + 8 * shifted.slots.numel() + 8 * shifted.order.numel()
    starts = 4 * len(shifted.query_starts)
    assert memory.table_bytes() == expected + of_tensors + starts
    memory._tables = TablesV2(runner)  # which holds tables, and gathers lanes from these
    assert memory.table_bytes() == expected + of_tensors + starts - filled


def test_vllm_still_makes_so_many_tables() -> None:
    """What `table_bytes` counts, of vLLM's own classes."""
    from vllm.v1.worker.gpu import block_table

    source = inspect.getsource(block_table.BlockTables.__init__)
    assert source.count("StagedWriteTensor(") == 1 and source.count("torch.zeros_like(") == 1


def test_layers_with_different_numbers_of_heads_have_no_mass() -> None:
    Runner("pyramidkv", heads=(2, 4, 2))
    with pytest.raises(ValueError, match=r"pages of \[2, 4\] KV heads"):
        Runner("h2o", heads=(2, 4, 2))


@pytest.mark.parametrize(
    ("policy", "args", "support"),
    [
        ("pyramidkv", {}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("h2o", {}, AttentionCGSupport.NEVER),
        ("streaming-llm", {}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("streaming-llm", {"schedule": "interval"}, AttentionCGSupport.NEVER),
    ],
)
def test_graphs_never_replay_a_step_that_evicts(policy: str, args: Any, support: Any) -> None:
    config = SimpleNamespace(additional_config=served(policy, kv_policy_args=args))
    assert PyramidBuilderMixin.get_cudagraph_support(config, None) == support


class _Builder(PyramidBuilderMixin, AttentionMetadataBuilder):  # type: ignore[type-arg]
    """Over a kernel that can be in any graph."""

    _cudagraph_support = AttentionCGSupport.ALWAYS


@pytest.mark.parametrize(
    ("args", "drafts", "support"),
    [
        ({}, 3, AttentionCGSupport.UNIFORM_BATCH),
        # A prompt of 29 tokens looks like a decode step with 28 drafts, and may keep 13.
        ({"window": 8}, 27, AttentionCGSupport.UNIFORM_BATCH),
        ({"window": 8}, 28, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        (
            {"window": 8, "chunk": {"tokens": 32, "keep": 16, "scorer": "keydiff"}},
            31,
            AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        ),
    ],
)
def test_graphs_with_drafts_never_replay_a_step_that_evicts(args, drafts, support) -> None:
    settings = KVSettings(kv_policy="streaming-llm", kv_policy_args=args).served()
    assert settings is not None
    data = replace(settings, num_drafts=drafts).as_data()
    config: Any = SimpleNamespace(additional_config={SERVED_KEY: data})
    layer: Any = SimpleNamespace(num_layers=4, block_size=16)
    assert _Builder.get_cudagraph_support(config, layer) == support
    companion: Any = SimpleNamespace(block_size=16)
    assert _Builder.get_cudagraph_support(config, companion) == AttentionCGSupport.UNIFORM_BATCH


# Metadata of steps that replay one graph ---------------------------------------------------------


class _Stock:
    """Makes metadata as a stock builder does, and counts."""

    built = 0

    def __init__(self, *args: Any) -> None:
        pass

    def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        self.built += 1
        return SimpleNamespace(lens=common.seq_lens, max_seq_len=common.max_seq_len)


class _Counting(PyramidBuilderMixin, _Stock):
    pass


def _common(num_reqs: int, num_tokens: int) -> Any:
    return SimpleNamespace(num_reqs=num_reqs, num_actual_tokens=num_tokens, max_seq_len=900)


def make_builder() -> Any:
    builder: Any = _Counting()
    shifted = ShiftedTables(slice(0, 2), 8, [(WIDTH, 16)] * 2, torch.device("cpu"))
    shifted.max_lens = np.array([5, 6], np.int32)
    step = SimpleNamespace(layout=None)
    builder.context = SimpleNamespace(layer=1, shifted=shifted, step=step)
    return builder


def test_metadata_that_is_not_read_is_built_once() -> None:
    builder = make_builder()
    shifted = builder.context.shifted
    for _ in range(3):
        metadata = builder.build(0, _common(4, 4))
    step = builder.context.step
    assert builder.built == 3 and metadata.kv_step is step and metadata.max_seq_len == 6
    shifted.replays = True
    first = builder.build(0, _common(4, 4))
    assert builder.build(0, _common(4, 4)) is first and builder.built == 4
    assert builder.build(0, _common(8, 8)) is not first and builder.built == 5
    shifted.replays = False
    later = builder.context.step = SimpleNamespace(layout=None)
    # A step whose attention is called reads its own.
    assert builder.build(0, _common(4, 4)).kv_step is later and builder.built == 6


def test_only_replays_of_full_graphs_are_such_steps() -> None:
    seen: list[bool] = []
    shifted = ShiftedTables(slice(0, 1), 2, [(WIDTH, 16)], torch.device("cpu"))
    tables: Any = SimpleNamespace(shifted=shifted)

    def prepare(batch: Any, mode: Any, *args: Any, for_capture: bool, **kwargs: Any) -> str:
        seen.append(shifted.replays)
        return "metadata"

    building = MetadataBuilding(prepare, tables)
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        assert building("batch", mode, "tables") == "metadata"
    building("batch", CUDAGraphMode.FULL, "tables", for_capture=True)
    assert seen == [True, False, False, False] and not shifted.replays


def test_layers_share_the_scratch_of_split_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    def stock(self: Any, heads: int) -> None:
        self.softmax_segm_output = torch.zeros(8, heads, 16, 32)
        self.softmax_segm_max, self.softmax_segm_expsum = torch.zeros(2, 8, heads, 16)

    monkeypatch.setattr(TritonAttentionMetadataBuilder, "__init__", stock)
    layers: list[Any] = [PyramidTritonBuilder(4) for _ in range(3)]
    other: Any = PyramidTritonBuilder(8)
    for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"):
        first = getattr(layers[0], name)
        assert all(getattr(layer, name) is first for layer in layers)
        assert getattr(other, name) is not first
    gone = weakref.ref(layers[0].softmax_segm_output)
    del layers, first
    assert gone() is None  # an engine that ends gives it back
