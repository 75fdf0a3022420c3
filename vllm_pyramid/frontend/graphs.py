# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs with a policy: which are refused, and for how many requests they are captured."""

from __future__ import annotations

from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_pyramid.policy import Policy

logger = init_logger(f"vllm.{__name__}")

# Requests of the largest decode step that is captured, and how far apart vLLM captures large ones.
_MOST_REQUESTS = 1024
_STRIDE = 16


def check_graphs(config: VllmConfig, policy: Policy) -> None:
    """Refuse full graphs of prefill, which would replay attention without evicting.

    Policies that replace the attention of some layers on the host also exclude attention from
    decode graphs. ValueError names the option to change.
    """
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    stages = config.parallel_config.pipeline_parallel_size
    if mode is not None and policy.excludes_graphs(stages):
        _exclude_attention(config, policy, mode)
        return
    if mode is None or mode == CUDAGraphMode.NONE or not (policy.evicts or policy.attends):
        return
    if mode.mixed_mode() == CUDAGraphMode.FULL:
        skipped = "eviction" if policy.evicts else "summaries of pages"
        raise ValueError(
            f"compilation_config.cudagraph_mode {mode.name} captures prefill in a full graph, "
            f"which would skip the {skipped}: use FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE "
            "or NONE"
        )
    if policy.attends:
        _check_partition(compilation, policy)


def gives_sizes(args: EngineArgs) -> bool:
    """Return whether the user says for how many tokens graphs are captured."""
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    of_user = (args, args.compilation_config)
    return any(getattr(one, name, None) is not None for one in of_user for name in names)


def capture_more(config: VllmConfig, policy: Policy) -> None:
    """Capture decode steps of as many requests as evictions make room for, on CUDA devices.

    vLLM captures up to 512 tokens by default. With drafts vLLM's own sizes stay, which are
    multiples of a request's tokens.
    """
    compilation, scheduler = config.compilation_config, config.scheduler_config
    sizes = compilation.cudagraph_capture_sizes
    if current_platform.device_type != "cuda" or not policy.evicts or not sizes:
        return
    most = min(scheduler.max_num_seqs, _MOST_REQUESTS, scheduler.max_num_batched_tokens)
    if most <= sizes[-1] or config.num_speculative_tokens:
        return
    more = range((sizes[-1] // _STRIDE + 1) * _STRIDE, most, _STRIDE)
    compilation.cudagraph_capture_sizes = [*sizes, *more, most]
    compilation.max_cudagraph_capture_size = most
    logger.info(
        "kv-policy %s: CUDA graphs are captured for up to %d requests instead of %d; set "
        "max_cudagraph_capture_size to change it",
        policy.name,
        most,
        sizes[-1],
    )


def _exclude_attention(config: VllmConfig, policy: Policy, mode: CUDAGraphMode) -> None:
    """Turn vLLM's default into graphs without attention, and refuse other graphs that cover it."""
    compilation = config.compilation_config
    if mode == CUDAGraphMode.NONE:
        return
    if mode.decode_mode() == CUDAGraphMode.FULL and mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        raise ValueError(
            f"compilation_config.cudagraph_mode {mode.name} captures whole decode steps, and "
            f"policy {policy.name!r} replaces the attention of some layers by code that runs on "
            "the host in each step: use PIECEWISE or NONE"
        )
    _check_partition(compilation, policy)
    if mode != CUDAGraphMode.PIECEWISE:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        logger.info(
            "kv-policy %s: cudagraph_mode is PIECEWISE instead of %s: attention runs between the "
            "graphs, since only the host knows which rows a step reads",
            policy.name,
            mode.name,
        )


def _check_partition(compilation: CompilationConfig, policy: Policy) -> None:
    if compilation.use_inductor_graph_partition:
        raise ValueError(
            f"policy {policy.name!r} does not work with "
            "compilation_config.use_inductor_graph_partition and CUDA graphs: the graphs would "
            "include the writing of V; leave one of them out"
        )
