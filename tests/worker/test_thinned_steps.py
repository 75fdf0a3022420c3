# SPDX-License-Identifier: Apache-2.0
"""Steps that thin prompts where attention reads shifted tables: metadata, graphs, memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from tests.plans import THINS
from tests.shifted_worker import (
    HEADS,
    KV_HEADS,
    STEP_TOKENS,
    Host,
    InnerLlama,
    Worker,
    launch_tables,
)
from vllm_pyramid.attention.cuda_metadata import PyramidBuilderMixin
from vllm_pyramid.compat import thin_forward
from vllm_pyramid.compat.runner_v1 import RunnerV1Points
from vllm_pyramid.methods.thinning.worker import Thinner
from vllm_pyramid.policy import load_policy
from vllm_pyramid.step.step import Step
from vllm_pyramid.worker.adapter_v1 import AdapterV1
from vllm_pyramid.worker.adapter_v2 import AdapterV2, GraphDispatch

PROMPTS = {"a": 70, "b": 45, "c": 101}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    host = Host()
    launch_tables(monkeypatch, host)
    return Worker(load_policy("pyramidinfer", None, THINS), host, PROMPTS)


# Metadata -----------------------------------------------------------------------------------------


class _Stock:
    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(**vars(common))


class _Builder(PyramidBuilderMixin, _Stock):
    pass


def test_each_layer_is_told_its_own_tokens(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a second piece and a first one."""
    worker.step({"a": 48, "b": 45})
    seen: list[Any] = []

    def look(thinner: Thinner, call: Any) -> None:
        context = worker.contexts[call.layer]
        builder: Any = _Builder()
        builder.context = context
        common = SimpleNamespace(
            num_reqs=2,
            num_actual_tokens=70,
            max_query_len=48,
            max_seq_len=70,
            query_start_loc=torch.tensor([0, 22, 70], dtype=torch.int32),
            seq_lens=torch.zeros(2, dtype=torch.int32),
        )
        metadata = builder.build(0, common)
        seen.append(metadata)
        starts = metadata.query_start_loc
        assert starts.data_ptr() % 16 == 0, "a kernel would be another one"
        assert starts.tolist() == metadata.query_start_loc_cpu.tolist()
        assert metadata.num_actual_tokens == starts[-1] == len(call.query)
        assert metadata.max_query_len == starts.diff().max()
        assert metadata.max_seq_len == metadata.seq_lens.max()
        assert metadata.kv_step is context.step
        choose(thinner, call)

    choose = Thinner.after_attention
    monkeypatch.setattr(Thinner, "after_attention", look)
    worker.step({"a": 22, "c": 48})
    assert [metadata.num_actual_tokens for metadata in seen] == [70, 70, 70, 54]
    # Of a what its first piece left and 22 tokens; of c what comes.
    lens = [metadata.seq_lens.tolist() for metadata in seen]
    assert lens == [[70, 48], [70, 48], [54, 48], [38, 32]]


# Graphs -------------------------------------------------------------------------------------------


def test_which_steps_leave_graphs_out(worker: Worker) -> None:
    tracker = worker.tracker
    tracker.add("short", 20, None)  # nothing of it is given up
    tracker.add("long", 97, None)
    for names, computed, right in (
        (["short"], [0], False),
        (["short", "long"], [20, 0], True),
        (["long", "short"], [48, 24], True),
        (["long"], [96], True),  # a piece of one token looks like a decode step
        (["long", "short"], [97, 0], False),
        (["long"], [131], False),
    ):
        assert tracker.needs_eager_step(names, np.array(computed, np.int32)) == right


class _StockV1:
    def __init__(self) -> None:
        self.asked: list[bool] = []

    def _update_states(self, scheduler_output: Any) -> str:
        return "corrections"

    def _determine_batch_execution_and_padding(self, tokens: int, force_eager: bool = False) -> int:
        self.asked.append(force_eager)
        return tokens


class _RunnerV1(RunnerV1Points, _StockV1):
    thins = True

    def needs_eager_step(self) -> bool:
        return self.thins


def test_first_runner_forces_eager_steps_alone() -> None:
    runner: Any = _RunnerV1()
    for runner.thins in (True, False):
        assert runner._update_states(None) == "corrections"
        assert runner._determine_batch_execution_and_padding(5) == 5
        # Of a capture or a warm-up, which are steps without requests.
        runner._determine_batch_execution_and_padding(5)
        runner._determine_batch_execution_and_padding(5, force_eager=True)
    assert runner.asked == [True, False, True, False, False, True]


def test_first_runner_asks_of_the_requests_that_are_there() -> None:
    asked: list[Any] = []

    def needs_eager_step(names: Any, computed: Any) -> bool:
        asked.append((list(names), computed.tolist()))
        return True

    runner: Any = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=["a", "b"], num_computed_tokens_cpu=np.array([5, 0, 9], np.int32)
        ),
        pyramid=SimpleNamespace(tracker=SimpleNamespace(needs_eager_step=needs_eager_step)),
    )
    assert AdapterV1.needs_eager_step(runner)
    assert asked == [(["a", "b"], [5, 0])]


class _StockV2:
    state: Any = None

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        return (None if dummy_run else self.state), 1


class _RunnerV2(AdapterV2, _StockV2):
    pass


def test_second_runner_dispatches_no_graph_to_such_a_step(worker: Worker) -> None:
    runner: Any = object.__new__(_RunnerV2)
    runner.pyramid = SimpleNamespace(tracker=worker.tracker)
    worker.tracker.add("long", 97, None)
    graph = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, uniform_token_count=1)
    dispatch = GraphDispatch(lambda num_reqs, num_tokens, uniform, **others: graph, runner)
    for computed, dummy, right in ((96, False, False), (97, False, True), (0, True, True)):
        runner.state = SimpleNamespace(
            req_ids=["long"], num_computed_prefill_tokens_np=np.array([computed])
        )
        assert runner.gather_batch_req_state("output", dummy_run=dummy)[1] == 1
        found = dispatch(1, 5, 1, num_active_loras=0)
        if right:
            assert found is graph
        else:
            assert found == BatchExecutionDescriptor(CUDAGraphMode.NONE, 5, 1)


# Memory -------------------------------------------------------------------------------------------


class _Allocated(TorchDispatchMode):
    """Counts the bytes of new tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._seen: list[Any] = []  # keeps their storages alive, so that addresses differ

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs, self._seen))
            if isinstance(x, torch.Tensor)
        }
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in held:
                self.num_bytes += made.untyped_storage().nbytes()
                self._seen.append(made)
        return result


class _Kernels(Host):
    """Kernels take no memory but that of their results."""

    allocated: _Allocated | None = None

    def launch(self, function: Any) -> Any:
        def launched(*args: Any, **kwargs: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes():
                result = function(*args, **kwargs)
            if isinstance(result, torch.Tensor) and self.allocated is not None:
                self.allocated.num_bytes += result.untyped_storage().nbytes()
            return result

        return launched


def test_memory_of_a_layer_in_addition_to_the_forward_pass_is_counted(monkeypatch) -> None:
    """All that choosing and moving allocate, as if nothing of it were ever freed."""
    device = _Kernels()
    launch_tables(monkeypatch, device)
    worker = Worker(load_policy("pyramidinfer", None, THINS), device, PROMPTS)
    (thinner,) = worker.tracker.hooks
    after, found = Thinner.after_attention, []

    def measured(self: Thinner, call: Any) -> None:
        with _Allocated() as device.allocated:
            after(self, call)
        # On CUDA attention leaves no log-sum-exp.
        found.append(device.allocated.num_bytes + 4 * call.query.shape[0] * HEADS)

    monkeypatch.setattr(Thinner, "after_attention", measured)
    worker.step({"a": 48, "b": 45})
    assert max(found) > 4 * 2 * 48 * KV_HEADS  # scores of both
    # Counted for as many pieces and tokens as a step has room for.
    scheduler = context_of(thinner).config.scheduler_config
    monkeypatch.setattr(scheduler, "max_num_batched_tokens", 93)
    scheduler.max_num_seqs = 2
    assert max(found) <= thinner.bytes_of_buffers() < 2 * max(found)


def context_of(thinner: Any) -> Any:
    return thinner._context


class _Layer:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __call__(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        self.rows.append(len(hidden))
        assert len(positions) == len(hidden)
        return hidden + 1, hidden


def test_the_profile_runs_what_is_not_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows through every layer as vLLM's largest step has, until the cache exists."""
    rows: list[int] = []
    compiled: list[int] = []
    model: Any = InnerLlama()
    inner = model.model
    torch.nn.Module.__init__(inner)
    layers = [_Layer(rows)] * 3
    for name, value in (("layers", layers), ("norm", lambda x, r: (x, r))):
        object.__setattr__(inner, name, value)
    monkeypatch.setattr(
        type(inner), "embed_input_ids", lambda self, ids: torch.zeros(len(ids), 8), raising=False
    )

    def stock(self: Any, ids: Any, positions: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        compiled.append(len(positions))
        return torch.zeros(len(positions), 8)

    monkeypatch.setattr(type(inner), "__call__", stock)
    hooks = Worker(load_policy("pyramidinfer", None, THINS), Host(), PROMPTS).tracker.hooks
    (thinner,) = hooks
    context = context_of(thinner)
    monkeypatch.setattr(context, "model", lambda: model)
    monkeypatch.setattr(context, "step", lambda: Step.nothing(4, 0))
    tokens = torch.arange(STEP_TOKENS)
    thinner.before_profile()
    inner(tokens, tokens)
    assert rows == [STEP_TOKENS] * 3 and compiled == [STEP_TOKENS]
    thinner.allocate(10)
    inner(tokens, tokens)
    assert rows == [STEP_TOKENS] * 3 and compiled == [STEP_TOKENS] * 2


def test_padding_behind_the_steps_tokens_is_left_out() -> None:
    rows: list[int] = []
    model = SimpleNamespace(layers=[_Layer(rows)] * 2, norm=lambda x, r: (x + r, r))
    survivors = iter([torch.tensor([0, 2, 4]), None])
    embeds = torch.arange(8.0)[:, None].repeat(1, 2)
    out = thin_forward._forward(model, 5, lambda: next(survivors), None, torch.arange(8), embeds)
    assert rows == [5, 3]
    # Two layers add one each, the residual is what came before the last.
    assert out[:, 0].tolist() == [3.0, 0.0, 7.0, 0.0, 11.0, 0.0, 0.0, 0.0]
