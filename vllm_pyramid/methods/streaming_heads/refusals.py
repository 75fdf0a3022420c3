# SPDX-License-Identifier: Apache-2.0
"""What does not work with tables of single heads, or was not tried, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pyramid.policy.policy import Policy

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def check_config(policy: Policy, config: VllmConfig) -> None:
    """Refuse what was not tried together with lengths of single heads.

    Raises:
        ValueError: naming the flag to change.
    """
    if current_platform.device_type != "cpu":
        check_cuda(policy, config)
    if config.use_v2_model_runner:
        check_alone(policy, config, "with vLLM's second model runner")
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    untried = {
        "drafts of a model (--speculative-config): draft by ngram": (
            config.speculative_config is not None and config.speculative_config.method != "ngram"
        ),
        f"--kv-cache-dtype {cache.cache_dtype}: leave it out": cache.cache_dtype not in _DTYPES,
    }
    for what, is_asked in untried.items():
        if is_asked:
            raise ValueError(
                f"policy {policy.name!r} gives each KV head a length of its own (heads), which was "
                f"not tried with {what}, or choose a policy without `heads`"
            )
    policy.heads.check_shape(
        model.get_total_num_hidden_layers(),
        model.get_total_num_kv_heads(),
        model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size,
    )


def check_cuda(policy: Policy, config: VllmConfig) -> None:
    """Refuse what was not rehearsed with lengths of single heads on CUDA devices.

    Raises:
        ValueError: naming what to change.
    """
    if not policy.heads.on_cuda:
        raise ValueError(
            f"policy {policy.name!r} has heads of kind {policy.heads.kind!r}, which was not "
            "rehearsed on CUDA devices: serve on a CPU, or choose a policy without `heads`"
        )
    check_alone(policy, config, "on CUDA devices")


def check_alone(policy: Policy, config: VllmConfig, where: str) -> None:
    """Refuse several ranks, replicas, drafts and traces.

    Raises:
        ValueError: naming the flag to leave out.
    """
    parallel, given = config.parallel_config, config.additional_config
    asked = given if isinstance(given, dict) else {}
    untried = {
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--speculative-config": config.speculative_config is not None,
        "--kv-trace": bool(asked.get("kv_trace")),
    }
    for flag, is_asked in untried.items():
        if is_asked:
            raise ValueError(
                f"policy {policy.name!r} gives each KV head a length of its own (heads), which was "
                f"not tried {where} together with {flag}: leave it out, or choose a policy without "
                "`heads`"
            )
