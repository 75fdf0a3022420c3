# SPDX-License-Identifier: Apache-2.0
"""What a KV policy asks of the rest of vLLM's configuration, and what it cannot live with.

Two moments: `prepare_args` before vLLM resolves its defaults (so that what vLLM would switch on by
itself is switched off with one line, and what the user asked for is refused), `finish_config`
after. Whatever is not mentioned here works or fails with vLLM's own message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_pyramid.config import SERVED_KEY, KVSettings
from vllm_pyramid.policy import AUTO, Policy
from vllm_pyramid.worker.backend_names import BACKENDS, CPU_BACKEND

logger = init_logger(f"vllm.{__name__}")

_WORKERS = {
    "cpu": "vllm_pyramid.worker.cpu_worker.PyramidCpuWorker",
    "cuda": "vllm_pyramid.worker.gpu_worker.PyramidGpuWorker",
}
_STOCK_WORKERS = ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")
_KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")
SLIDING_WINDOW_REASON = (
    "{layer} has a sliding window of {window} tokens. Evicted caches lose the distances that a "
    "window is measured in, so models with sliding windows run with --kv-policy full or none only"
)


def _refuse(what: str, why: str) -> None:
    raise ValueError(f"a KV policy (--kv-policy) does not work with {what} yet: {why}")


def prepare_args(args: EngineArgs, settings: KVSettings) -> None:
    """Refuse what the user asked for and eviction cannot do; switch off vLLM's own defaults.

    Raises:
        ValueError: naming the flag to change.
    """
    policy = settings.policy()
    assert policy is not None
    if settings.kv_policy == AUTO:
        logger.info("kv-policy auto: %s (%s), budget %s", policy.name, policy.paper, policy.budget)
    if current_platform.device_type not in _WORKERS:
        raise ValueError(
            f"a KV policy runs on CUDA devices and on CPUs; this is {current_platform.device_type}"
        )
    if (reason := policy.not_shareable) is not None:
        if args.enable_prefix_caching:
            raise ValueError(
                f"policy {policy.name!r} does not work with --enable-prefix-caching: {reason}; "
                "leave the flag out"
            )
        if args.enable_prefix_caching is None:
            args.enable_prefix_caching = False
            logger.info("kv-policy %s: prefix caching is off: %s", policy.name, reason)
    wants: list[tuple[str, Any, str]] = [
        (
            "--kv-transfer-config",
            args.kv_transfer_config,
            "a KV connector would move blocks that hold other tokens than their positions say",
        ),
        (
            "--kv-offloading-size",
            args.kv_offloading_size,
            "offloaded blocks would hold other tokens than their positions say",
        ),
        (
            "--speculative-config",
            args.speculative_config,
            "drafts may be rejected, and an eviction cannot be taken back",
        ),
        (
            "--pipeline-parallel-size",
            args.pipeline_parallel_size > 1,
            "a stage knows only its own layers; use --tensor-parallel-size",
        ),
        (
            "--decode-context-parallel-size",
            args.decode_context_parallel_size > 1,
            "the tokens of a block would be spread over ranks",
        ),
        (
            "--prefill-context-parallel-size",
            args.prefill_context_parallel_size > 1,
            "the observation window would be spread over ranks",
        ),
        ("--enable-dbo", args.enable_dbo, "a step's requests would be split into two batches"),
        (
            "--disable-hybrid-kv-cache-manager",
            args.disable_hybrid_kv_cache_manager,
            "it forces one block table for all layers; leave the flag out",
        ),
        (
            "--kv-sharing-fast-prefill",
            args.kv_sharing_fast_prefill,
            "it skips the queries that the scorer looks through",
        ),
        (
            f"--kv-cache-dtype {args.kv_cache_dtype}",
            args.kv_cache_dtype not in _KV_CACHE_DTYPES,
            f"quantised caches have no scoring kernel; use one of {', '.join(_KV_CACHE_DTYPES)}",
        ),
        ("--runner pooling", args.runner == "pooling", "pooling keeps no cache to evict from"),
        ("--scheduler-cls", args.scheduler_cls, "the policy brings its own scheduler"),
        (
            f"--worker-cls {args.worker_cls}",
            args.worker_cls not in ("auto", *_STOCK_WORKERS),
            "the policy brings its own worker",
        ),
    ]
    for flag, wanted, why in wants:
        if wanted:
            _refuse(flag, why)
    for part in policy.parts:
        part.prepare_args(policy, args)
    _check_backend(args.attention_backend or args.attention_config.backend)
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ValueError(
            "a KV policy does not work with VLLM_USE_RUST_FRONTEND yet: requests would not be "
            "checked and counters not shown; unset it"
        )
    if current_platform.device_type == "cpu":
        from vllm_pyramid.platform import defaults

        defaults.choose(args)


def _check_backend(chosen: AttentionBackendEnum | str | None) -> None:
    on_cuda = current_platform.device_type == "cuda"
    name = chosen.name if isinstance(chosen, AttentionBackendEnum) else chosen
    if name is not None and (not on_cuda or name.upper() not in BACKENDS):
        _refuse(
            f"--attention-backend {name}",
            f"per-layer tables are built for {' and '.join(BACKENDS)} here"
            if on_cuda
            else "on the CPU vllm-pyramid's own kernels run; leave the flag out",
        )


def finish_config(config: VllmConfig, settings: KVSettings) -> None:
    """Check what vLLM made of the rest, and put our scheduler, worker and backend in place.

    Raises:
        ValueError: naming the flag to change.
    """
    served = settings.served()
    assert served is not None
    policy = served.policy
    _check_model(config, policy)
    _check_resolved(config)
    inside = policy.inside
    least = 0 if inside is None else inside.min_last_chunk
    _check_chunks(config, policy, max(served.min_last_chunk, least))
    for part in policy.parts:
        part.check_config(policy, config)
    _check_graphs(config, policy)
    _probe(config, policy)
    if current_platform.device_type == "cuda":
        served = replace(served, backend=_take_backend(config, policy))
    else:
        _take_cpu_backend(config)
    config.additional_config = {**config.additional_config, SERVED_KEY: served.as_data()}
    config.parallel_config.worker_cls = _WORKERS[current_platform.device_type]
    config.scheduler_config.scheduler_cls = "vllm_pyramid.scheduler.scheduler." + (
        "PyramidAsyncScheduler" if config.scheduler_config.async_scheduling else "PyramidScheduler"
    )
    _install_front_end()


def _check_model(config: VllmConfig, policy: Policy) -> None:
    """What can be known of the model here; the rest is checked when its layers exist."""
    model_config = config.model_config
    if model_config.runner_type != "generate":
        raise ValueError(
            f"a KV policy works with models that generate; this one runs as "
            f"{model_config.runner_type}: serve it with --kv-policy none"
        )
    if model_config.is_encoder_decoder:
        raise ValueError("a KV policy works with decoder-only models; this one has an encoder")
    if model_config.use_mla:
        raise ValueError(
            "a KV policy does not work with multi-head latent attention (MLA) yet: its cache has "
            "no KV heads to choose tokens for; serve this model with --kv-policy none"
        )
    window = model_config.get_sliding_window()
    if window and window < model_config.max_model_len and policy.evicts:
        raise ValueError(SLIDING_WINDOW_REASON.format(layer="this model", window=window))


def _check_resolved(config: VllmConfig) -> None:
    """Refuse what vLLM switched on by itself, or took from the checkpoint."""
    dtype = config.cache_config.cache_dtype
    resolved: list[tuple[str, Any, str]] = [
        (
            "speculative decoding",
            config.speculative_config,
            "this checkpoint brings a draft model, and an eviction cannot be taken back; serve its "
            "base model",
        ),
        ("a KV connector", config.kv_transfer_config, "leave --kv-transfer-config out"),
        (
            "two batches a step",
            config.parallel_config.use_ubatching,
            "each would need tables of its own; leave --enable-dbo and --ubatch-size out",
        ),
        (
            f"a KV cache of type {dtype}",
            dtype not in _KV_CACHE_DTYPES,
            "the checkpoint asks for it; add --kv-cache-dtype bfloat16",
        ),
        (
            "attention_config.backend_per_kind",
            config.attention_config.backend_per_kind,
            "it would replace the backend that reads per-layer tables",
        ),
        (
            "attention_config.hisparse_config",
            config.attention_config.hisparse_config,
            "it keeps pages of its own",
        ),
        (
            "vLLM's hybrid KV cache manager switched off",
            config.scheduler_config.disable_hybrid_kv_cache_manager,
            "every layer needs a block table of its own; KV events and chunked local attention "
            "switch it off",
        ),
    ]
    for what, present, why in resolved:
        if present:
            _refuse(what, why)


def _probe(config: VllmConfig, policy: Policy) -> None:
    """Try what the user's own classes score and select with, in the shape of this model."""
    inside = policy.inside
    if inside is not None:
        _probe(config, inside)
    if not any(":" in part.kind for part in (policy.scorer, policy.selector)):
        return
    from vllm_pyramid.step.probe import probe

    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_attention_heads(parallel)
    probe(policy, heads, model.get_num_kv_heads(parallel), model.get_head_size())


def _take_backend(config: VllmConfig, policy: Policy) -> str:
    """On CUDA, put our backend in front: vLLM's kernels, reading per-layer tables. Its name."""
    if policy.evicts and not policy.fill_blocks:
        raise ValueError(
            f"policy {policy.name!r} sets fill_blocks: false, which leaves a partly filled first "
            "block that the attention kernels for CUDA cannot mask: set fill_blocks to true"
        )
    chosen = config.attention_config.backend
    name = chosen.name if chosen is not None else _default_backend(config)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    register_backend(AttentionBackendEnum.CUSTOM, BACKENDS[name])
    return name


def _take_cpu_backend(config: VllmConfig) -> None:
    """On the CPU, name our backend, which our platform then answers with."""
    from vllm_pyramid.platform.cpu import PyramidCpuPlatform

    if not isinstance(current_platform, PyramidCpuPlatform):
        raise ValueError(
            "a KV policy needs vllm-pyramid's CPU platform, and vLLM chose "
            f"{type(current_platform).__name__}: unset VLLM_TARGET_DEVICE, let VLLM_PLUGINS name "
            "vllm_pyramid_cpu too (or unset it), and uninstall other platform plugins"
        )
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    register_backend(AttentionBackendEnum.CUSTOM, CPU_BACKEND)


def _default_backend(config: VllmConfig) -> str:
    """FlashAttention where the device, this vLLM and the model allow it, else Triton."""
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    model_config = config.model_config
    if (
        current_platform.has_device_capability(80)
        and is_flash_attn_varlen_func_available()
        and FlashAttentionBackend.supports_dtype(model_config.dtype)
        and FlashAttentionBackend.supports_head_size(model_config.get_head_size())
    ):
        return "FLASH_ATTN"
    return "TRITON_ATTN"


def _check_chunks(config: VllmConfig, policy: Policy, least: int) -> None:
    """The last chunk of a prompt must be able to carry the observation window."""
    if not policy.evicts:
        return
    scheduler = config.scheduler_config
    for flag, tokens in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold),
    ):
        if tokens and tokens <= least:
            raise ValueError(
                f"{flag} {tokens} is too small for policy {policy.name!r}: the last chunk of a "
                f"prompt carries at least {least} tokens (the observation "
                f"window), so prompts could stop short of it for ever; raise it above "
                f"{least}"
            )


def _check_graphs(config: VllmConfig, policy: Policy) -> None:
    """A graph that covers prefill would replay attention without ever calling the eviction."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or not policy.evicts:
        return
    if mode.mixed_mode() == CUDAGraphMode.FULL:
        raise ValueError(
            f"compilation_config.cudagraph_mode {mode.name} captures prefill in a full graph, "
            "which would skip the eviction: use FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE "
            "or NONE"
        )


def _install_front_end() -> None:
    from vllm_pyramid import metrics
    from vllm_pyramid.compat import requests, stats

    requests.install()
    stats.install(metrics.observe)
