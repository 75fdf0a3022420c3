# SPDX-License-Identifier: Apache-2.0
"""Tables of all requests under vLLM's second runner, by its own classes: where they are, and what a
step takes of them. The kernel is the reference.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables

from tests.shifted_worker import Host, launch_tables
from vllm_pyramid.attention.shifted_tables import Slots
from vllm_pyramid.attention.table_layout import TableLayout
from vllm_pyramid.compat import held_tables
from vllm_pyramid.step.step import Step
from vllm_pyramid.worker.adapter_v2 import AdapterV2
from vllm_pyramid.worker.step_tables import StepTables

ROWS, WIDTH, BLOCK = 4, 6, 16
# KV cache groups: a window, two layers that evict, and one of another pipeline stage.
GROUPS = [["window"], ["a"], [], ["b"]]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The host memory that is read by the device: buffers of tables alone are as large."""
    made: list[Any] = []

    class Buffer(UvaBuffer):
        def __init__(self, size: Any, dtype: torch.dtype) -> None:
            super().__init__(size, dtype)
            if size == (ROWS, WIDTH):
                made.append(self.cpu)

    monkeypatch.setattr(buffer_utils, "UvaBuffer", Buffer)
    launch_tables(monkeypatch, Host())
    return made


def make_runner() -> Any:
    """The adapter, with vLLM's tables as its `initialize_kv_cache` makes them."""
    runner: Any = object.__new__(AdapterV2)
    layers = SimpleNamespace(
        evicting={
            name: SimpleNamespace(layer_idx=i, block_size=BLOCK) for i, name in enumerate("ab")
        },
        specs=dict.fromkeys(["window", "a", "b"]),
        stage=slice(0, 2),
        layout=TableLayout(),
    )
    runner.pyramid = SimpleNamespace(layers=layers)
    groups = [SimpleNamespace(layer_names=names) for names in GROUPS]
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    sizes = ([BLOCK] * 4, ROWS, 64, [WIDTH] * 4)
    runner.block_tables = BlockTables(*sizes, device=torch.device("cpu"))
    for number, table in enumerate(runner.block_tables.block_tables):
        table.gpu.copy_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) + 100 * number + 1)
    return runner


def bind(runner: Any) -> StepTables:
    tables = StepTables(runner.runner_tables(), runner.pyramid.layers, torch.device("cpu"))
    tables.shift_in_place_of({1: 0, 3: 1}, 64)
    return tables


def test_tables_of_requests_are_on_the_host(memory: list[Any]) -> None:
    """Those of layers that evict, and of other stages, which only slots are found by."""
    runner = make_runner()
    of_vllm = runner.block_tables
    assert len(memory) == 3
    for group, table in zip((1, 2, 3), memory, strict=True):
        assert of_vllm.block_tables[group].gpu is table
        assert of_vllm.block_table_ptrs[group] == table.data_ptr()
    assert runner.runner_tables().held_on_host


def test_tables_stay_where_no_memory_is_pinned(monkeypatch, memory) -> None:
    monkeypatch.setattr(held_tables, "is_uva_available", lambda: False)
    runner = make_runner()
    assert memory == [] and not runner.runner_tables().held_on_host


def test_one_launch_writes_what_a_step_reads() -> None:
    """Of two layers, and of the window's group, which is vLLM's own."""
    runner = make_runner()
    tables, of_vllm = bind(runner), runner.block_tables
    assert tables.shifted is not None
    stock = [table.gpu.clone() for table in of_vllm.block_tables]
    for table in of_vllm.input_block_tables:
        table.fill_(-9)
    requests = torch.tensor([3, 1])
    of_steps = of_vllm.gather_block_tables(requests, num_reqs_padded=3)
    assert [len(table) for table in of_steps] == [3, 3, 3, 3]
    assert of_steps[2].numel() == 0  # another stage's
    assert all((table == -9).all() for table in of_steps)  # slots do not need them
    of_vllm.num_blocks.np[0, [3, 1]] = [5, 2]
    blocks = of_vllm.num_blocks.copy_to_uva()
    step = Step.nothing(2, 2)
    step.skips = np.array([[32, 0], [64, 16]], np.int32)
    lens = np.array([70, 20], np.int32)
    on_device = torch.tensor([70, 20, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    tables.shift(on_device, starts, step, lens, Slots(requests.numpy(), requests, blocks))
    assert of_steps[1].tolist() == [
        [*stock[1][3, 2:5].tolist(), -9, -9, -9],
        [*stock[1][1, :2].tolist(), -9, -9, -9, -9],
        [-9] * WIDTH,
    ]
    assert of_steps[3].tolist() == [
        [*stock[3][3, 4:5].tolist(), *[-9] * 5],
        [*stock[3][1, 1:2].tolist(), *[-9] * 5],
        [-9] * WIDTH,
    ]
    assert of_steps[0].tolist() == [
        [*stock[0][3, :5].tolist(), -9],
        [*stock[0][1, :2].tolist(), *[-9] * 4],
        [0] * WIDTH,
    ]
    assert tables.shifted.lens[:, :3].tolist() == [[38, 20, 0], [6, 4, 0]]
    assert tables.of_layer(1).data_ptr() == of_vllm.input_block_tables[3].data_ptr()
    # A step without requests, whose tables vLLM has cleared, gets lengths alone.
    of_vllm.get_dummy_block_tables(2)
    of_steps[0][:, 0] = 7  # where vLLM puts states of its own
    tables.shift(on_device, starts, Step.nothing(2, 2))
    assert not of_steps[1][:2].any() and (of_steps[0][:, 0] == 7).all()
    assert tables.shifted.lens[:, :3].tolist() == [[70, 20, 0]] * 2


def test_tables_of_the_host_are_freed_with_their_generation(memory: list[Any]) -> None:
    """vLLM makes tables twice where it measures graphs first."""
    runner = make_runner()
    tables = bind(runner)
    config = runner.kv_cache_config
    del runner.kv_cache_config  # as vLLM does before it measures again
    tables.release()
    runner.kv_cache_config = config
    assert all(len(runner.block_tables.input_block_tables[group]) == 0 for group in (1, 3))
    before = weakref.ref(runner.block_tables)
    runner.block_tables = BlockTables(
        *([BLOCK] * 4, ROWS, 64, [WIDTH] * 4), device=torch.device("cpu")
    )
    assert len(memory) == 6 and before() is None
    shifted = bind(runner)
    assert shifted.of_layer(0).shape == (ROWS, WIDTH)
