# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what only a GPU has, for `child.py`: FlashAttention, CUDA graphs and the start-up.

They go into vLLM's own modules, so vLLM's code and ours around them is what runs.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

# Of this engine: replays of full graphs and calls of piecewise ones, captures, warm-ups.
COUNTS: Counter[str] = Counter()


# FlashAttention ----------------------------------------------------------------------------------


class Quantised(NamedTuple):
    """The last queries that were quantised: as they were, of 8 bits, and their scale."""

    query: torch.Tensor
    found: torch.Tensor
    scale: torch.Tensor


QUANTISED: list[Quantised] = []  # the last ones alone


def quantise(
    query: torch.Tensor, scale: torch.Tensor, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scaled_fp8_quant` in PyTorch, for one scale."""
    assert not others and query.dim() == 2 and query.stride(-1) == 1
    kind = torch.float8_e4m3fn
    most = torch.finfo(kind).max
    found = (query.float() / scale).clamp(-most, most).to(kind)
    QUANTISED[:] = [Quantised(query, found, scale)]
    COUNTS["quantised queries"] += 1
    return found, scale


def unquantised(q: torch.Tensor, k: torch.Tensor, q_descale: torch.Tensor | None) -> torch.Tensor:
    """The queries that were quantised to `q`, with which a CPU attends to the same cache."""
    if k.dtype != torch.float8_e4m3fn:
        assert q.dtype == k.dtype
        return q
    query, found, scale = QUANTISED.pop()
    assert q.dtype == found.dtype and q.data_ptr() == found.data_ptr() and q.is_contiguous()
    # One scale, of each request and KV head.
    assert q_descale is not None and q_descale.data_ptr() == scale.data_ptr()
    return query.reshape(-1, *q.shape[1:])[: len(q)]


def attend(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    block_table: torch.Tensor,
    softcap: float,
    s_aux: torch.Tensor | None,
    **others: Any,
) -> None:
    """`flash_attn_varlen_func` in PyTorch; what it must not be given is checked."""
    from vllm_pyramid.kernels import reference
    from vllm_pyramid.kernels.records import AttentionBatch, Softmax

    requests = len(cu_seqlens_q) - 1
    assert causal is True and block_table.stride(1) == 1 and seqused_k.is_contiguous()
    assert others["scheduler_metadata"] is None and others["alibi_slopes"] is None
    assert others["mask_mod"] is None and others["fa_version"] == 3
    assert len(block_table) == len(seqused_k) == requests
    # The kernel sizes its grid by what the host says.
    assert int(seqused_k.max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    scales = [others[name] for name in ("q_descale", "k_descale", "v_descale")]
    assert all(x is None or x.shape == (requests, k.shape[2]) for x in scales)
    batch = AttentionBatch(
        *(unquantised(q, k, scales[0]), k.transpose(1, 2), v.transpose(1, 2), block_table),
        *(cu_seqlens_q, seqused_k, torch.zeros_like(seqused_k)),
        key_scale=float(scales[1][0, 0]),
        value_scale=float(scales[2][0, 0]),
    )
    window = window_size[0] + 1 if window_size[0] >= 0 else 0
    softmax = Softmax(softmax_scale, soft_cap=softcap, sliding_window=window, sinks=s_aux)
    reference.paged_attention(out, batch, softmax)
    COUNTS["flash attention"] += 1
    COUNTS["flash attention, one KV head"] += k.shape[2] == 1


def write(key: Any, value: Any, k: Any, v: Any, slots: Any, dtype: str, *scales: Any) -> None:
    """`reshape_and_cache_flash` in PyTorch."""
    from vllm_pyramid.kernels import reference

    assert dtype in ("auto", "fp8")
    if dtype == "fp8":
        k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
    names = {"key_scale": float(scales[0]), "value_scale": float(scales[1])}
    reference.reshape_and_cache(key, value, k.transpose(1, 2), v.transpose(1, 2), slots, **names)


def install_flash_attention(set_attribute: Callable[..., None] = setattr) -> None:
    """As vLLM finds it on sm_90."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends import flash_attn

    set_attribute(_custom_ops, "scaled_fp8_quant", quantise)
    for name, stand_in in (
        ("flash_attn_varlen_func", attend),
        ("reshape_and_cache_flash", write),
        ("get_flash_attn_version", lambda *args, **kwargs: 3),
        ("is_flash_attn_varlen_func_available", lambda: True),
        ("flash_attn_supports_sinks", lambda: True),
        (
            "flash_attn_supports_kv_cache_dtype",
            lambda dtype, **others: dtype in ("fp8", "fp8_e4m3"),
        ),
        ("flash_attn_supports_quant_query_input", lambda: True),
    ):
        set_attribute(flash_attn, name, stand_in)
    builder, support = flash_attn.FlashAttentionMetadataBuilder, flash_attn.AttentionCGSupport
    set_attribute(builder, "_cudagraph_support", support.ALWAYS)


# Our own kernels ---------------------------------------------------------------------------------


class LateCopies:
    """A stream for copies that runs each as late as it may: when the step waits for it.

    So what was to be copied is another thing by then, if the step went on too early.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self.launched = 0

    def launch(self, copy: Callable[..., None], *args: Any, **kwargs: Any) -> int:
        self._waiting.append(lambda: copy(*args, **kwargs))
        self.launched += 1
        COUNTS[f"late {copy.__name__}"] += 1
        return self.launched

    def wait(self, mark: int) -> None:
        while self.launched - len(self._waiting) < mark:
            self._waiting.pop(0)()

    def is_done(self, mark: int) -> bool:
        return self.launched - len(self._waiting) >= mark


def move_bytes(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
    """`swap_blocks_batch` where both memories are the host's; the last copy comes first."""
    copies = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
    for target, source, size in reversed(copies):
        ctypes.memmove(target, source, size)
    COUNTS["batches of copies"] += 1
    COUNTS["copies in batches"] += len(copies)


def install_triton_kernels() -> None:
    """Our Triton kernels run, interpreted, in place of those for the CPU.

    So the device has a memory of its own, as far as methods can tell, and a stream for copies.
    """
    from vllm_pyramid.attention import backend_cuda
    from vllm_pyramid.kernels.triton import functions as triton_ops
    from vllm_pyramid.worker import runtime as runner

    backend_cuda.get_ops = lambda device_type: triton_ops
    runner.copies_of = lambda device: LateCopies()


# CUDA graphs -------------------------------------------------------------------------------------


# The model runner, once its graphs are captured.
RUNNERS: list[Any] = []


def check_step() -> None:
    """No graph stands for a step in which layers compute different tokens."""
    for runner in RUNNERS:
        assert runner.pyramid.tracker.step.layout is None, "a graph in a step without graphs"


class Graph:
    """A replay calls the model again, with the inputs and metadata of the capture.

    So it reads what lies at their addresses now, and nothing else of the step, as a graph does.
    """

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def replay(self) -> None:
        from vllm.config import CUDAGraphMode

        COUNTS["full replays"] += 1
        check_step()
        self.forward(CUDAGraphMode.NONE)


class Pieces:
    """In place of `BreakableCUDAGraphWrapper`: attention between the pieces is called as ever."""

    _all_instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, model: Any, config: Any, key_fn: Any = None) -> None:  # the last in 0.33
        self.model, self.graph_pool = model, None
        self._all_instances.add(self)

    @classmethod
    def clear_all_graphs(cls) -> None:
        """Nothing is kept."""

    def __call__(self, **inputs: Any) -> Any:
        COUNTS["piecewise calls"] += 1
        check_step()
        return self.model(**inputs)


def capture(manager: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    """`CudaGraphManager.capture` with `Graph`; in vLLM's order."""
    from vllm.config import CUDAGraphMode

    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        shapes = manager._capture_descs.get(mode, [])
        if mode == CUDAGraphMode.FULL:
            shapes = shapes[: manager._max_full_descs_to_capture]
        for shape in shapes:
            create_forward_fn(shape, warmup=True)(CUDAGraphMode.NONE)
            forward = create_forward_fn(shape, warmup=False)
            if mode == CUDAGraphMode.PIECEWISE:
                forward(mode)
                continue
            forward(CUDAGraphMode.NONE)
            manager.graphs[shape] = Graph(forward)
            COUNTS["captures"] += 1
    manager._graphs_captured = True


def install_start_up(mode: str) -> None:
    """The worker starts as vLLM's for GPUs does where the user says nothing of memory.

    The graphs' memory is profiled with a small cache, which is taken down again; then come the real
    cache, the kernels of evictions, vLLM's warm-up, and the capture.
    """
    from vllm import SamplingParams
    from vllm.config import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import workspace
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    from vllm_pyramid.frontend.graphs import check_graphs
    from vllm_pyramid.policy.served_settings import ServedSettings
    from vllm_pyramid.worker.cpu_worker import PyramidCpuWorker

    # Not all of vLLM's kernels for sampling can be interpreted.
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=0))
    cudagraph_utils.CudaGraphManager.capture = capture
    cudagraph_utils.BreakableCUDAGraphWrapper = Pieces
    for name in ("graph_pool_handle", "get_global_graph_pool"):
        setattr(CpuPlatform, name, classmethod(lambda cls: (0, 0)))
    CpuPlatform._global_graph_pool = None
    torch.accelerator.get_memory_info = lambda *args: (0, 0)
    for name in ("empty_cache", "synchronize"):
        setattr(torch.accelerator, name, lambda *args: None)
    determine = PyramidCpuWorker.determine_available_memory
    warm_up = PyramidCpuWorker.compile_or_warm_up_model

    def determine_available_memory(worker: Any) -> int:
        workspace.init_workspace_manager(worker.device, 1)
        available: int = determine(worker)
        compilation = worker.vllm_config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode[mode]
        # What the front end makes of it, where vLLM knows of graphs.
        check_graphs(worker.vllm_config, ServedSettings.of(worker.vllm_config).policy)
        compilation.cudagraph_capture_sizes = [1, 2, 4, 24, 48]
        compilation.max_cudagraph_capture_size = 48
        worker.model_runner.profile_cudagraph_memory()
        COUNTS["profiled captures"] = COUNTS.pop("captures", 0)
        return available

    def compile_or_warm_up_model(worker: Any) -> Any:
        runner = worker.model_runner
        runner.pyramid.compile_kernels()
        warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
        runner.capture_model()
        RUNNERS[:] = [runner]
        COUNTS["mode " + str(runner.cudagraph_manager.cudagraph_mode)] += 1
        for name in ("full replays", "piecewise calls", "flash attention"):
            COUNTS.pop(name, None)  # of the warm-up
        return warm_up(worker)

    PyramidCpuWorker.determine_available_memory = determine_available_memory
    PyramidCpuWorker.compile_or_warm_up_model = compile_or_warm_up_model
