# SPDX-License-Identifier: Apache-2.0
"""Refuse CUDA graphs that would cover an eviction, or attention that a policy replaces."""

from __future__ import annotations

from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger

from vllm_pyramid.policy import Policy

logger = init_logger(f"vllm.{__name__}")


def check_graphs(config: VllmConfig, policy: Policy) -> None:
    """Refuse full graphs of prefill, which would replay attention without evicting.

    Policies that replace the attention of some layers on the host also exclude attention from
    decode graphs.

    Raises:
        ValueError: naming the option to change.
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
            "kv-policy %s: cudagraph_mode is PIECEWISE, not %s: which rows a step reads is "
            "known to the host only, so attention runs between the graphs",
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
