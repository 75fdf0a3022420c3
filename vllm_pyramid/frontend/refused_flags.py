# SPDX-License-Identifier: Apache-2.0
"""The user's flags that do not work with a KV policy, each with its reason.

They are refused before anything is loaded; the table of docs/limits.md begins with them.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, fields

from vllm.engine.arg_utils import EngineArgs

from vllm_pyramid.frontend.refusals import (
    KV_CACHE_DTYPES,
    Refusal,
    asks_for_host_cache,
    unless,
)
from vllm_pyramid.policy import Policy

_STOCK_WORKERS = (
    "auto",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
)


def _changed(args: EngineArgs, name: str) -> bool:
    """Return whether an argument differs from vLLM's default."""
    (own,) = (field for field in fields(EngineArgs) if field.name == name)
    default = own.default if own.default_factory is MISSING else own.default_factory()
    return bool(getattr(args, name) != default)


def _has_host_cache(args: EngineArgs) -> bool:
    return asks_for_host_cache(args.additional_config)


def _has_host_folder(args: EngineArgs) -> bool:
    return asks_for_host_cache(args.additional_config, "kv_host_cache_dir")


def _has_several_hosts(args: EngineArgs) -> bool:
    return args.nnodes > 1 or args.distributed_executor_backend == "ray"


def _has_own_page_scorer(policy: Policy) -> bool:
    scorer = getattr(policy.attend, "scorer", None)
    return scorer is not None and ":" in scorer.kind


def _has_hashes_of_one_process(args: EngineArgs) -> str | None:
    """Return the hash algorithm if it begins with a random number in each process."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return None
    return unless(args.prefix_caching_hash_algo, ("sha256", "sha256_cbor"))


OF_ARGUMENTS = (
    Refusal(
        "--kv-transfer-config",
        "a KV connector would move blocks that hold other tokens than their positions say",
        lambda args, _: args.kv_transfer_config is not None,
    ),
    Refusal(
        "--kv-offloading-size",
        "offloaded blocks would hold other tokens than their positions say",
        lambda args, _: bool(args.kv_offloading_size),
    ),
    Refusal(
        "--pipeline-parallel-size and a policy that solves its lengths from the prompt",
        "the solver needs the scores of all layers, and a stage has its own; run `vllm-pyramid "
        "calibrate` without the flag and serve the policy that it writes, or choose pyramidkv",
        lambda args, policy: args.pipeline_parallel_size > 1 and policy.allocator.solves,
    ),
    Refusal(
        "--pipeline-parallel-size and a policy that drops tokens between layers",
        "the next stage expects them; choose another policy, such as pyramidkv",
        lambda args, policy: args.pipeline_parallel_size > 1 and policy.allocator.thins_prompts,
    ),
    Refusal(
        "--pipeline-parallel-size and V in host memory",
        "its host pool is made for all layers; set values to device",
        lambda args, policy: args.pipeline_parallel_size > 1 and not policy.copies_blocks,
    ),
    Refusal(
        "--pipeline-parallel-size and --async-scheduling",
        "they were not tried together; leave --async-scheduling out",
        lambda args, _: args.pipeline_parallel_size > 1 and bool(args.async_scheduling),
    ),
    Refusal(
        "--kv-host-cache and a policy without prefix caching",
        "it stores what prefix caching finds; choose another policy, such as pyramidkv",
        lambda args, policy: _has_host_cache(args) and policy.why_not_shareable is not None,
    ),
    Refusal(
        "--kv-host-cache and --no-enable-prefix-caching",
        "it stores what prefix caching finds; leave one of them out",
        lambda args, _: _has_host_cache(args) and args.enable_prefix_caching is False,
    ),
    Refusal(
        "--kv-host-cache and V in host memory",
        "V of a block does not follow it to another place on the host; set values to device",
        lambda args, policy: _has_host_cache(args) and not policy.copies_blocks,
    ),
    Refusal(
        "--kv-host-cache-dir and a page scorer of your own",
        "files hold its summaries, and its code may be another after a restart; choose spread or "
        "box, or leave the folder out",
        lambda args, policy: _has_host_folder(args) and _has_own_page_scorer(policy),
    ),
    Refusal(
        "--kv-host-cache and lengths of single heads",
        "a slot has a block of each layer; choose a policy without `heads`",
        lambda args, policy: _has_host_cache(args) and policy.heads.splits,
    ),
    Refusal(
        "--kv-host-cache-dir and ranks on several hosts",
        "each rank would write to the disk of its own host, and files are read on the host that "
        "schedules; leave the folder out",
        lambda args, _: _has_host_folder(args) and _has_several_hosts(args),
    ),
    Refusal(
        "--kv-host-cache-dir and --enable-lora",
        "an adapter is known by its name, which another one may have after a restart; leave one of "
        "them out",
        lambda args, _: _has_host_folder(args) and args.enable_lora,
    ),
    Refusal(
        "--kv-host-cache-dir and --prefix-caching-hash-algo",
        "its hashes are others after a restart; choose sha256, or set PYTHONHASHSEED",
        lambda args, _: _has_host_folder(args) and _has_hashes_of_one_process(args),
    ),
    Refusal(
        "--distributed-executor-backend external_launcher",
        "every rank would have a scheduler of its own, and only one is told what was evicted; take "
        "mp",
        lambda args, _: args.distributed_executor_backend == "external_launcher",
    ),
    Refusal(
        "--data-parallel-backend ray",
        "it was not tried together with eviction; leave it out",
        lambda args, _: args.data_parallel_size > 1 and args.data_parallel_backend == "ray",
    ),
    Refusal(
        "--enable-expert-parallel",
        "experts that are spread over ranks were not tried together with eviction; leave it out",
        lambda args, _: args.enable_expert_parallel,
    ),
    Refusal(
        "--enable-fault-tolerance",
        "an engine that recovers would not know what its requests have evicted; leave it out",
        lambda args, _: args.enable_fault_tolerance,
    ),
    Refusal(
        "--decode-context-parallel-size",
        "the tokens of a block would be spread over ranks",
        lambda args, _: args.decode_context_parallel_size > 1,
    ),
    Refusal(
        "--prefill-context-parallel-size",
        "the observation window would be spread over ranks",
        lambda args, _: args.prefill_context_parallel_size > 1,
    ),
    Refusal(
        "--enable-dbo",
        "a step's requests would be split into two batches",
        lambda args, _: args.enable_dbo,
    ),
    Refusal(
        "--disable-hybrid-kv-cache-manager",
        "it forces one block table for all layers; leave the flag out",
        lambda args, _: bool(args.disable_hybrid_kv_cache_manager),
    ),
    Refusal(
        "--kv-sharing-fast-prefill",
        "it skips the queries that the scorer looks through",
        lambda args, _: args.kv_sharing_fast_prefill,
    ),
    Refusal(
        "--kv-cache-dtype",
        f"such caches have no scoring kernel; use one of {', '.join(KV_CACHE_DTYPES)}",
        lambda args, _: unless(args.kv_cache_dtype, KV_CACHE_DTYPES),
    ),
    Refusal(
        "--enable-return-routed-experts",
        "vLLM stores them by the blocks in which it believes a token to be; leave it out",
        lambda args, _: args.enable_return_routed_experts or args.aux_output_config.enabled,
    ),
    Refusal(
        "--prefix-match-unit",
        "prefixes are found at the ends of whole blocks; leave it out",
        lambda args, _: args.prefix_match_unit is not None,
    ),
    Refusal(
        "--prefix-cache-retention-interval",
        "prefixes of all layers are kept together, at every block; leave it out",
        lambda args, _: _changed(args, "prefix_cache_retention_interval"),
    ),
    Refusal(
        "--use-replayssm",
        "states with a buffer of inputs were not tried together with eviction; leave it out",
        lambda args, _: args.use_replayssm,
    ),
    Refusal(
        "--kv-cache-metrics",
        "blocks come from a pool that does not count how long they stay; leave it out",
        lambda args, _: args.kv_cache_metrics,
    ),
    Refusal(
        "--diffusion-config",
        "such a model writes to tokens of its cache again; serve it with --kv-policy none",
        lambda args, _: args.diffusion_config is not None,
    ),
    Refusal(
        "--runner pooling",
        "pooling keeps no cache to evict from",
        lambda args, _: args.runner == "pooling",
    ),
    Refusal(
        "--scheduler-cls",
        "the policy brings its own scheduler",
        lambda args, _: bool(args.scheduler_cls),
    ),
    Refusal(
        "--worker-cls",
        "the policy brings its own worker",
        lambda args, _: unless(args.worker_cls, _STOCK_WORKERS),
    ),
)
