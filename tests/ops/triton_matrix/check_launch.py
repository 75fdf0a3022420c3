# SPDX-License-Identifier: Apache-2.0
"""What the launchers do on the host: no allocation in decode, no device value read anywhere.

Runs without the interpreter (which copies arguments by itself) and without a GPU: the kernels are
compiled under the offline driver of `scripts/compile_triton.py` and never launched.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver as triton_driver

from vllm_pyramid.ops import reference, triton_ops, triton_tables
from vllm_pyramid.ops.cpu_library import KERNELS

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[3]
# One list for all tests: Triton keeps a compiled kernel, and the launcher it was compiled with.
LAUNCHED: list[str] = []
# Kernels of policies that are refused on CUDA at start-up: pyramidinfer.
CPU_ONLY = ["recent_mass"]


class Recorder(TorchDispatchMode):
    """Names of all tensor operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches():
    """The kernels launched, by name, on a pretended device."""
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
    return query, pool[..., :64], pool[..., 64:], table, starts, lens


def test_decode_with_a_workspace_runs_no_tensor_operation(launches):
    query, key_cache, value_cache, table, starts, lens = small_batch([1, 1])
    out, skips = torch.empty_like(query), torch.zeros_like(lens)
    workspace = triton_ops.Workspace.allocate(8, 2, 64, "cpu", rows=2 * 8 * 4)
    with Recorder() as recorder:
        for num_splits in (4, 1):
            triton_ops.paged_attention(
                out,
                query,
                key_cache,
                value_cache,
                table,
                starts,
                lens,
                skips,
                scale=0.125,
                max_query_len=1,
                workspace=workspace,
                num_splits=num_splits,
            )
    assert recorder.names == []
    # The second call shows that one split needs neither scratch nor a second kernel.
    assert launches == ["decode_kernel", "combine_kernel", "decode_kernel"]


def test_key_mass_takes_its_scratch_from_the_workspace(launches):
    query, key_cache, _, table, starts, lens = small_batch([1, 1])
    skips, mass = torch.zeros_like(lens), torch.zeros(key_cache.shape[:3])
    workspace = triton_ops.Workspace.allocate(8, 2, 64, "cpu", rows=2 * 8 * 4)
    inputs = (mass, query, key_cache, table, starts, lens, skips)
    with Recorder() as recorder:
        triton_ops.add_key_mass(
            *inputs, scale=0.125, max_query_len=1, num_splits=4, workspace=workspace
        )
    assert recorder.names == []
    assert launches == ["row_statistics_kernel", "key_mass_kernel"]


def test_key_mass_by_the_log_sum_exp_is_one_launch(launches):
    query, key_cache, _, table, starts, lens = small_batch([1, 30])
    skips, mass = torch.zeros_like(lens), torch.zeros(key_cache.shape[:3])
    inputs = (mass, query, key_cache, table, starts, lens, skips)
    lse = torch.zeros(query.shape[:2])
    with Recorder() as recorder:
        triton_ops.add_key_mass(*inputs, scale=0.125, max_query_len=30, log_sum_exp=lse)
    assert recorder.names == []
    assert launches == ["key_mass_kernel"]


def test_nothing_is_read_back_where_the_maxima_are_given(launches):
    query, key_cache, value_cache, table, starts, lens = small_batch([1, 30])
    skips, keeps = torch.zeros_like(lens), torch.full_like(lens, 20)
    with Recorder() as recorder:
        triton_ops.paged_attention(
            torch.empty_like(query),
            query,
            key_cache,
            value_cache,
            table,
            starts,
            lens,
            skips,
            scale=0.125,
            max_query_len=30,
            num_splits=2,
        )
        scores = triton_ops.window_scores(
            query, key_cache, table, starts[1:], lens, window=8, scale=0.125, max_prompt_len=40
        )
        kept = triton_ops.select(scores, lens, keeps, window=8, max_keep=20)
        triton_ops.compact(key_cache, value_cache, table, kept, lens, keeps)
        triton_ops.shift_block_tables_(table[None], skips[None], 16, num_columns=3)
        triton_ops.effective_lens(lens.clone(), lens, skips)
    assert "_local_scalar_dense" not in recorder.names
    assert "_to_copy" not in recorder.names
    assert "empty" in recorder.names  # the recorder does see what the calls do
    assert len(launches) == 3 + 4 + 1 + 1 + 2
    with Recorder() as recorder:
        triton_ops.select(scores, lens, keeps, window=8)
    assert "_local_scalar_dense" in recorder.names


def test_tables_and_lengths_are_compiled_once(launches):
    """Numbers of rows and columns change from step to step; no step may wait for a compiler."""
    tables = torch.zeros(4, 300, 512, dtype=torch.int32)
    lens, skips = torch.zeros(2, 4, 300, dtype=torch.int32)
    seq_lens = torch.zeros(300, dtype=torch.int32)
    cached = []
    for num_rows, num_columns in ((1, 0), (1, 1), (5, 16), (48, 17), (300, 512)):
        triton_ops.shift_block_tables_(
            tables[:, :num_rows], skips[:, :num_rows], 16, num_columns=num_columns
        )
        triton_ops.effective_lens(lens[:, :num_rows], seq_lens, skips[:, :num_rows])
        cached.append(
            [
                sum(len(caches[0]) for caches in kernel.device_caches.values())
                for kernel in (
                    triton_tables.shift_tables_kernel,
                    triton_tables.effective_lens_kernel,
                )
            ]
        )
    assert min(cached[0]) > 0
    assert cached == [cached[0]] * 5


def test_the_split_count_follows_only_what_the_host_knows():
    from vllm_pyramid.ops.triton_config import choose_num_splits

    assert choose_num_splits(528, 8, 32768, 64) == 64
    assert choose_num_splits(528, 64, 32768, 64) == 8
    assert choose_num_splits(528, 1024, 32768, 64) == 1
    assert choose_num_splits(528, 8, 512, 64) == 4
    assert choose_num_splits(528, 8, 100, 64) == 1
    for pairs in range(1, 600):
        splits = choose_num_splits(528, pairs, 1 << 20, 64)
        assert splits == 1 or splits * pairs <= 528  # so a workspace never is too small


@pytest.mark.parametrize("name", CPU_ONLY)
def test_what_is_left_out_is_missing(name):
    assert name in KERNELS and not hasattr(triton_ops, name)


@pytest.mark.parametrize("name", [*(k for k in KERNELS if k not in CPU_ONLY), "kept_mass"])
def test_every_call_of_the_contract_is_accepted(name):
    """The engine calls whichever back end it has with the same arguments."""
    ours = inspect.signature(getattr(triton_ops, name)).parameters
    for key, parameter in inspect.signature(getattr(reference, name)).parameters.items():
        assert key in ours, f"{name} of Triton does not take {key}"
        assert (ours[key].kind, ours[key].default) == (parameter.kind, parameter.default)
    extra = set(ours) - set(inspect.signature(getattr(reference, name)).parameters)
    assert all(ours[key].default is not inspect.Parameter.empty for key in extra)
