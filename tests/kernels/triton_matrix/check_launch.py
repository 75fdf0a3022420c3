# SPDX-License-Identifier: Apache-2.0
"""What the launchers do on the host: no allocation in decode, no device value read anywhere.

Runs without the interpreter (which copies arguments by itself) and without a GPU: the kernels are
compiled under the offline driver of `scripts/compile_triton.py` and never launched.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver as triton_driver

from tests.kernels.arguments import check_no_requests
from tests.kernels.every_kernel import contracts_of, shared_triton, triton_ops
from tests.worker.test_launches import LAUNCHES
from vllm_pyramid.kernels.records import AttentionBatch, Reduction, Softmax, WindowBatch
from vllm_pyramid.kernels.table_records import StepRows, TableGroups
from vllm_pyramid.kernels.triton import lanes as triton_lanes
from vllm_pyramid.kernels.triton import tables as triton_tables
from vllm_pyramid.methods.host_values.kernels import Choosers
from vllm_pyramid.methods.host_values.kernels.triton import workspace_cells
from vllm_pyramid.methods.pages.kernels import triton as page_triton
from vllm_pyramid.methods.pages.kernels.records import PageBatch, PageLists
from vllm_pyramid.methods.thinning.kernels import RecentBatch

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
# One list for all tests: Triton keeps a compiled kernel, and the launcher it was compiled with.
LAUNCHED: list[str] = []
SOFTMAX = Softmax(0.125)


class Recorder(TorchDispatchMode):
    """Record the names of all tensor operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """Record the names of the kernels launched on a pretended device."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    path = ROOT / "scripts" / "compile_triton.py"
    spec = importlib.util.spec_from_file_location("compile_triton", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_triton"] = module
    spec.loader.exec_module(module)
    names = LAUNCHED
    names.clear()

    class Driver(module.OfflineDriver):
        def launcher_cls(self, source, metadata):
            return lambda *args, **kwargs: names.append(metadata.name)

    triton_driver.set_active(Driver(90, lambda name, cubin, shared: None))
    return names


def small_batch(queries):
    pool = torch.zeros(4, 2, 16, 128, dtype=torch.bfloat16)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    query = torch.zeros(sum(queries), 8, 64, dtype=torch.bfloat16)
    lens = torch.full((len(queries),), 40, dtype=torch.int32)
    table = torch.zeros(len(queries), 4, dtype=torch.int32)
    caches = (pool[..., :64], pool[..., 64:])
    skips, longest = torch.zeros_like(lens), max(queries)
    return AttentionBatch(query, *caches, table, starts, lens, skips, max_query_len=longest)


def test_launches_of_an_eviction(launches):
    """The numbers with which tests/worker/test_launches.py counts."""
    batch = small_batch([9, 30])
    lens, ends = batch.seq_lens, batch.query_start_loc[1:]
    prompts = WindowBatch(batch.query, batch.key_cache, batch.block_table, ends, lens, 8)
    prompts = replace(prompts, max_prompt_len=40)
    made = {"window_scores": lambda: triton_ops.window_scores(prompts, SOFTMAX, Reduction())}
    scores, keeps = made["window_scores"](), torch.full_like(lens, 20)
    kept = triton_ops.select(scores, lens, keeps, window=8, max_keep=20)
    caches = batch.key_cache, batch.value_cache
    first = torch.zeros_like(lens)
    made |= {
        "select": lambda: triton_ops.select(scores, lens, keeps, window=8, max_keep=20),
        "compact": lambda: triton_ops.compact(*caches, batch.block_table, kept, lens, keeps),
        "copy_blocks": lambda: triton_ops.copy_blocks(*caches, first[:1], lens[:1]),
        "unrankable": lambda: triton_ops.unrankable(scores, first, lens),
    }
    for name, call in made.items():
        launches.clear()
        with Recorder() as recorder:
            call()
        assert len(launches) + recorder.names.count("any") == LAUNCHES[name], name
        assert set(recorder.names) <= {"any", "empty", "empty_like", "detach", "slice", "view"}, (
            name
        )


def test_decode_with_a_workspace_runs_no_tensor_operation(launches):
    batch = small_batch([1, 1])
    out = torch.empty_like(batch.query)
    workspace = triton_ops.Workspace.allocate(8, 2, 64, "cpu", rows=2 * 8 * 4)
    with Recorder() as recorder:
        for num_splits in (4, 1):
            triton_ops.paged_attention(
                out, batch, SOFTMAX, workspace=workspace, num_splits=num_splits
            )
    assert recorder.names == []
    # The second call shows that one split needs neither scratch nor a second kernel.
    assert launches == ["decode_kernel", "combine_kernel", "decode_kernel"]


def test_key_mass_takes_its_scratch_from_the_workspace(launches):
    batch = small_batch([1, 1])
    mass = torch.zeros(batch.key_cache.shape[:3])
    workspace = triton_ops.Workspace.allocate(8, 2, 64, "cpu", rows=2 * 8 * 4)
    with Recorder() as recorder:
        triton_ops.add_key_mass(mass, batch, SOFTMAX, num_splits=4, workspace=workspace)
    assert recorder.names == []
    assert launches == ["row_statistics_kernel", "key_mass_kernel"]


def test_key_mass_by_the_log_sum_exp_is_one_launch(launches):
    batch = small_batch([1, 30])
    mass, lse = torch.zeros(batch.key_cache.shape[:3]), torch.zeros(batch.query.shape[:2])
    with Recorder() as recorder:
        triton_ops.add_key_mass(mass, batch, SOFTMAX, log_sum_exp=lse)
    assert recorder.names == []
    assert launches == ["key_mass_kernel"]


def test_nothing_is_read_back_where_the_maxima_are_given(launches):
    batch = small_batch([1, 30])
    key_cache, value_cache, table = batch.key_cache, batch.value_cache, batch.block_table
    lens, skips = batch.seq_lens, batch.skips
    keeps = torch.full_like(lens, 20)
    with Recorder() as recorder:
        triton_ops.paged_attention(torch.empty_like(batch.query), batch, SOFTMAX, num_splits=2)
        ends = batch.query_start_loc[1:]
        prompts = WindowBatch(batch.query, key_cache, table, ends, lens, 8, max_prompt_len=40)
        scores = triton_ops.window_scores(prompts, SOFTMAX, Reduction())
        kept = triton_ops.select(scores, lens, keeps, window=8, max_keep=20)
        triton_ops.compact(key_cache, value_cache, table, kept, lens, keeps)
        triton_ops.copy_blocks(key_cache, value_cache, lens[:1] * 0, lens[:1])
        triton_ops.unrankable(scores, skips, lens)
        assert "empty" in recorder.names  # the recorder does see what the calls do
        assert not {"_local_scalar_dense", "_to_copy"} & {*recorder.names}
        groups = TableGroups.of([table], [table.clone()], [16], [0], 1)
        of_slots = skips[:, None].long()
        recorder.names.clear()
        triton_tables.gather_tables(groups, StepRows(lens, 2), of_slots, lens[None], skips[None])
        assert set(recorder.names) <= {"unsqueeze", "view"}
    assert len(launches) == 3 + 4 + 1 + 1 + 1 + 1 + 1
    with Recorder() as recorder:
        triton_ops.select(scores, lens, keeps, window=8)
    assert "_local_scalar_dense" in recorder.names


def test_no_requests_launch_nothing(launches):
    check_no_requests(triton_ops, small_batch([1, 1]))
    assert launches == []


@pytest.mark.parametrize(("lanes", "held"), [(1, True), (1, False), (4, True), (4, False)])
def test_tables_and_slots_are_compiled_once(launches, lanes, held):
    """Change numbers of rows and requests as steps do; no step may wait for a compiler."""
    tables, others = torch.zeros(2, 300, 512, dtype=torch.int32)
    targets = tables
    if held or lanes > 1:
        targets = torch.zeros(300 * lanes, 512 // lanes, dtype=torch.int32)
    groups = TableGroups.of(
        *([tables, others][: 1 + held], [targets, others][: 1 + held], [16, 0], [1, 0], 1),
        per_layer=lanes,
        by_slot=held,
    )
    of_rows, skips = torch.zeros(2, 1, 300 * lanes).int(), torch.zeros(300, lanes).long()
    slots, order = torch.zeros(1, 4096, dtype=torch.int64), torch.zeros(4096, dtype=torch.int64)
    starts, of_lanes = torch.zeros(301).int(), torch.zeros(300 * lanes + 1).int()
    requests, blocks = torch.zeros(300).long(), torch.zeros(2, 300).int()
    kernels = [
        triton_tables.gather_tables_kernel,
        triton_lanes.lane_rows_kernel,
        triton_lanes.lane_slots_kernel,
    ]
    cached = []
    for count, num_reqs, written in ((1, 0, 0), (1, 1, 1), (5, 4, 16), (48, 48, 81), (300, 17, 99)):
        rows = StepRows(starts[:count], num_reqs)
        if held and num_reqs:
            rows = rows._replace(slots=requests[:num_reqs], num_blocks=blocks)
        triton_tables.gather_tables(groups, rows, skips, *of_rows)
        triton_lanes.lane_rows(of_lanes, order, starts[: count + 1], lanes)
        triton_lanes.lane_slots(slots, groups, rows, starts[: count + 1], written)
        cached.append(
            [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]
        )
    assert min(cached[0]) > 0
    assert cached == [cached[0]] * 5


def test_the_split_count_follows_only_what_the_host_knows():
    from vllm_pyramid.kernels.triton.tiles import choose_num_splits

    assert choose_num_splits(528, 8, 32768, 64) == 64
    assert choose_num_splits(528, 64, 32768, 64) == 8
    assert choose_num_splits(528, 1024, 32768, 64) == 1
    assert choose_num_splits(528, 8, 512, 64) == 4
    assert choose_num_splits(528, 8, 100, 64) == 1
    for pairs in range(1, 600):
        splits = choose_num_splits(528, pairs, 1 << 20, 64)
        assert splits == 1 or splits * pairs <= 528  # so a workspace never is too small


def test_choosers_that_the_host_knows_cost_three_launches(launches):
    """Check that nothing else is computed or read back, and that the workspace is the scratch."""
    batch = small_batch([1, 1])
    out, top_ns = torch.empty_like(batch.query), torch.tensor([4, 4], dtype=torch.int32)
    pairs = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    batch = replace(batch, max_query_len=1, max_seq_len=64)
    workspace = torch.empty(2 * workspace_cells(1, 8, 64, 4))
    choosers = Choosers(pairs, 4, alone=True, workspace=workspace)
    with Recorder() as recorder:
        triton_ops.topn_attention(out, batch, SOFTMAX, top_ns, choosers=choosers)
    assert set(recorder.names) <= {"slice", "view", "detach"}
    assert launches == ["topn_logits_kernel", "topn_choose_kernel", "topn_values_kernel"]


def test_recent_mass_by_the_log_sum_exp_is_one_launch(launches):
    batch = small_batch([1, 30])
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([1, 31], [1, 6], [8, 20])]
    recent = RecentBatch(
        *(batch.query, batch.key_cache, batch.block_table, ints[0], batch.seq_lens, batch.skips),
        *ints[1:],
        max_context=20,
    )
    lse = torch.zeros(batch.query.shape[:2])
    for known, expected in ((lse, []), (None, ["recent_log_sum_exp_kernel"])):
        launches.clear()
        with Recorder() as recorder:
            triton_ops.recent_mass(recent, SOFTMAX, distance_weight=1.2, log_sum_exp=known)
        assert set(recorder.names) == {"empty"}
        assert launches == [*expected, "recent_mass_kernel"]


def test_choosing_pages_allocates_and_reads_back_nothing(launches):
    """The numbers with which tests/worker/test_launches.py counts."""
    batch = small_batch([1, 1])
    key, table = batch.key_cache, batch.block_table
    lens, skips = batch.seq_lens, batch.skips
    pool = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    requests = torch.arange(2, dtype=torch.int32)
    rows = PageBatch(batch.query, table, requests, lens - 1, skips, 16, max_pages=3)
    scores, chosen = torch.zeros(2, 8, 2), PageLists.zeros(2, 2, 2, table.device)
    inputs = (rows, SOFTMAX, pool, torch.full_like(lens, 2), scores, chosen)
    attended = torch.empty_like(batch.query)
    with Recorder() as recorder:
        page_triton.summarise_pages(pool, key, table, skips, lens, skips, kind="box", max_pages=3)
        assert launches == ["summarise_pages_kernel"]
        page_triton.choose_pages(*inputs, kind="box", key_cache=key)
        assert launches[1:] == ["page_logits_kernel", "choose_pages_kernel"]
        lists = replace(
            batch, block_table=chosen.block_table, seq_lens=chosen.seq_lens, skips=chosen.skips
        )
        triton_ops.paged_attention(attended, lists, SOFTMAX, num_splits=1)
    assert set(recorder.names) <= {"unsqueeze", "view"}
    assert launches[3:] == ["decode_kernel"] and LAUNCHES["choose_pages"] == 2
    for message, wrong in (
        ("max_pages must be known", {0: replace(rows, max_pages=None)}),
        (r"scores must be \[>= 2, 8, >= 2\], got \[2, 8, 1\]", {4: scores[:, :, :1]}),
        (r"scores must be float32 \[>= 2", {4: scores[:1]}),
        ("lists of 2 rows must be contiguous", {5: PageLists.zeros(3, 2, 2, table.device)}),
        ("recent 0 at least 1", {}),
    ):
        given = [wrong.get(place, one) for place, one in enumerate(inputs)]
        with pytest.raises(ValueError, match=message):
            page_triton.choose_pages(*given, kind="box", recent=0 if not wrong else 1)
    with pytest.raises(ValueError, match="kind 'rows'"):
        page_triton.choose_pages(*(rows, SOFTMAX, key, *inputs[3:]), kind="rows", key_cache=key)


@pytest.mark.parametrize(("contract", "module", "name"), contracts_of(shared_triton))
def test_every_call_of_the_contract_is_accepted(contract, module, name):
    """Compare parameters: the engine calls every back end with the same arguments."""
    ours = inspect.signature(getattr(module, name)).parameters
    wanted = dict(inspect.signature(getattr(contract, name)).parameters)
    del wanted["self"]
    for key, parameter in wanted.items():
        assert key in ours, f"{name} of Triton does not take {key}"
        assert ours[key] == parameter
    extra = set(ours) - set(wanted)
    assert all(ours[key].default is not inspect.Parameter.empty for key in extra)
