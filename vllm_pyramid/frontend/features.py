# SPDX-License-Identifier: Apache-2.0
"""Detect the features that an engine uses: of the user's flags, and of the finished configuration,
since defaults and checkpoints enable features too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_pyramid.compat.backend_names import BACKENDS, FP8_CACHES, SCALED_ROWS
from vllm_pyramid.frontend.layer_kinds import SLIDING, has_other_layers, has_states, layer_kinds
from vllm_pyramid.frontend.refusals import CACHE_TYPES, DRAFTERS
from vllm_pyramid.policy.capabilities import Feature, Used
from vllm_pyramid.transfer.settings import NAME

_STOCK_WORKERS = (
    "auto",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
)


def of_args(args: EngineArgs) -> Used:
    """Return the features that a user asks for."""
    return _used(_OF_ARGS, args)


def of_config(config: VllmConfig) -> Used:
    """Return the features of a finished configuration."""
    return _used(_OF_CONFIG, config)


def _used(detectors: Mapping[Feature, Callable[[Any], object]], given: object) -> Used:
    """Return the features in use; a detector that returns text adds the value to the words."""
    found = ((feature, detect(given)) for feature, detect in detectors.items())
    return {
        feature: f"{feature.words} {value}" if isinstance(value, str) else feature.words
        for feature, value in found
        if value
    }


def _named(value: str, names: Collection[str]) -> str | None:
    """Return the value in brackets if it is one of the names."""
    return f"({value})" if value in names else None


def _unless(value: Any, good: tuple[str, ...]) -> str | None:
    """Return the value unless it is one of the good ones."""
    return None if value in good else str(value)


def _changed(args: EngineArgs, name: str) -> bool:
    """Return whether an argument differs from vLLM's default."""
    (own,) = (field for field in fields(EngineArgs) if field.name == name)
    default = own.default if own.default_factory is MISSING else own.default_factory()
    return bool(getattr(args, name) != default)


def _ours(args: EngineArgs, key: str) -> bool:
    """Return whether a setting of ours was given; its value is checked elsewhere."""
    given = args.additional_config
    return isinstance(given, Mapping) and given.get(key) is not None


def _other_backend(args: EngineArgs) -> str | None:
    chosen = args.attention_backend or args.attention_config.backend
    on_cuda = current_platform.device_type == "cuda"
    name = str(getattr(chosen, "name", chosen)).upper()
    return None if chosen is None else _unless(name, tuple(BACKENDS) if on_cuda else ())


def is_ours(connector: Any) -> bool:
    """Return whether a `KVTransferConfig`, or None, names our connector."""
    return getattr(connector, "kv_connector", None) == NAME


def _connector(args: EngineArgs) -> Any:
    """Return what vLLM makes of `--kv-transfer-config`, which Python may give as a dictionary."""
    given: Any = args.kv_transfer_config
    return KVTransferConfig(**given) if isinstance(given, dict) else given


def _other_connector(connector: Any) -> str | None:
    """Return the name of a KV connector that is not ours."""
    if connector is None or (is_ours(connector) and not connector.kv_connector_module_path):
        return None
    return f"({getattr(connector, 'kv_connector', None)})"


def _is_on(device: str) -> Callable[[object], bool]:
    return lambda _: current_platform.device_type == device


_OF_ARGS: dict[Feature, Callable[[EngineArgs], object]] = {
    Feature.CPU: _is_on("cpu"),
    Feature.CUDA: _is_on("cuda"),
    Feature.PIPELINE: lambda args: args.pipeline_parallel_size > 1,
    Feature.DECODE_CONTEXT: lambda args: args.decode_context_parallel_size > 1,
    Feature.PREFILL_CONTEXT: lambda args: args.prefill_context_parallel_size > 1,
    Feature.EXPERT_PARALLEL: lambda args: args.enable_expert_parallel,
    Feature.EXTERNAL_LAUNCHER: lambda args: (
        args.distributed_executor_backend == "external_launcher"
    ),
    Feature.RAY_REPLICAS: lambda args: (
        args.data_parallel_size > 1 and args.data_parallel_backend == "ray"
    ),
    Feature.SEVERAL_HOSTS: lambda args: (
        args.nnodes > 1 or args.distributed_executor_backend == "ray"
    ),
    Feature.KV_CONNECTOR: lambda args: _other_connector(_connector(args)),
    Feature.HANDOVER: lambda args: is_ours(_connector(args)),
    Feature.KV_OFFLOADING: lambda args: bool(args.kv_offloading_size),
    Feature.PREFIX_CACHING: lambda args: bool(args.enable_prefix_caching),
    Feature.NO_PREFIX_CACHING: lambda args: args.enable_prefix_caching is False,
    Feature.MATCH_UNIT: lambda args: args.prefix_match_unit is not None,
    Feature.RETENTION_INTERVAL: lambda args: _changed(args, "prefix_cache_retention_interval"),
    # They begin with a random number in each process.
    Feature.RANDOM_HASHES: lambda args: (
        os.environ.get("PYTHONHASHSEED") is None
        and _unless(args.prefix_caching_hash_algo, ("sha256", "sha256_cbor"))
    ),
    Feature.HOST_CACHE: lambda args: _ours(args, "kv_host_cache"),
    Feature.HOST_FOLDER: lambda args: _ours(args, "kv_host_cache_dir"),
    Feature.KV_EVENTS: lambda args: (
        args.kv_events_config is not None and args.kv_events_config.enable_kv_cache_events
    ),
    Feature.CACHE_METRICS: lambda args: args.kv_cache_metrics,
    Feature.ONE_BLOCK_TABLE: lambda args: bool(args.disable_hybrid_kv_cache_manager),
    Feature.OTHER_CACHE: lambda args: _unless(args.kv_cache_dtype, CACHE_TYPES),
    Feature.ASYNC_SCHEDULING: lambda args: bool(args.async_scheduling),
    Feature.TWO_BATCHES: lambda args: args.enable_dbo,
    Feature.FAST_PREFILL: lambda args: args.kv_sharing_fast_prefill,
    Feature.OTHER_BACKEND: _other_backend,
    Feature.ROUTED_EXPERTS: lambda args: (
        args.enable_return_routed_experts or args.aux_output_config.enabled
    ),
    Feature.REPLAY_SSM: lambda args: args.use_replayssm,
    Feature.LORA: lambda args: args.enable_lora,
    Feature.FAULT_TOLERANCE: lambda args: args.enable_fault_tolerance,
    Feature.SCHEDULER_CLS: lambda args: bool(args.scheduler_cls),
    Feature.WORKER_CLS: lambda args: _unless(args.worker_cls, _STOCK_WORKERS),
    Feature.RUST_FRONT_END: lambda _: envs.VLLM_USE_RUST_FRONTEND,
    Feature.TRACE: lambda args: _ours(args, "kv_trace"),
    Feature.SHADOW: lambda args: _ours(args, "kv_shadow"),
    Feature.LOGITS_PROCESSORS: lambda args: bool(args.logits_processors),
    Feature.POOLING: lambda args: args.runner == "pooling",
    Feature.DIFFUSION: lambda args: args.diffusion_config is not None,
}


def _has_windows_alone(config: VllmConfig) -> bool:
    model = config.model_config
    return set(layer_kinds(model.hf_text_config, model.max_model_len)) == {SLIDING}


def _has_shared_layers(config: VllmConfig) -> bool:
    return bool(getattr(config.model_config.hf_text_config, "num_kv_shared_layers", None))


def _has_other_layers(config: VllmConfig) -> bool:
    model = config.model_config
    return has_other_layers(model.hf_text_config, model.max_model_len) or _has_shared_layers(config)


def _has_states(config: VllmConfig) -> bool:
    return has_states(config.model_config.hf_text_config, config.model_config.max_model_len)


def _drafts(detect: Callable[[Any], object]) -> Callable[[VllmConfig], object]:
    """Return a detector that looks at speculative decoding, if there is any."""
    return lambda config: (
        config.speculative_config is not None and detect(config.speculative_config)
    )


def _draft_cache(config: VllmConfig) -> str | None:
    chosen = config.speculative_config and config.speculative_config.kv_cache_dtype
    return _unless(chosen, (config.cache_config.cache_dtype,)) if chosen else None


_OF_CONFIG: dict[Feature, Callable[[VllmConfig], object]] = {
    Feature.CPU: _is_on("cpu"),
    Feature.CUDA: _is_on("cuda"),
    Feature.SECOND_RUNNER: lambda config: config.use_v2_model_runner,
    Feature.TENSOR_PARALLEL: lambda config: config.parallel_config.tensor_parallel_size > 1,
    Feature.PIPELINE: lambda config: config.parallel_config.pipeline_parallel_size > 1,
    Feature.DATA_PARALLEL: lambda config: config.parallel_config.data_parallel_size > 1,
    Feature.KV_CONNECTOR: lambda config: _other_connector(config.kv_transfer_config),
    Feature.HANDOVER: lambda config: is_ours(config.kv_transfer_config),
    Feature.ONE_BLOCK_TABLE: lambda config: config.scheduler_config.disable_hybrid_kv_cache_manager,
    Feature.OTHER_CACHE: lambda config: _unless(config.cache_config.cache_dtype, CACHE_TYPES),
    Feature.E5M2_CACHE: lambda config: config.cache_config.cache_dtype == "fp8_e5m2",
    Feature.SCALED_CACHE: lambda config: _named(config.cache_config.cache_dtype, SCALED_ROWS),
    Feature.CACHE_OF_8_BITS: lambda config: _named(
        config.cache_config.cache_dtype, (*FP8_CACHES, *SCALED_ROWS)
    ),
    Feature.TWO_BATCHES: lambda config: config.parallel_config.use_ubatching,
    Feature.FLASH_ATTENTION: lambda config: (
        getattr(config.attention_config.backend, "name", None) == "FLASH_ATTN"
    ),
    Feature.BACKEND_PER_KIND: lambda config: bool(config.attention_config.backend_per_kind),
    Feature.HISPARSE: lambda config: config.attention_config.hisparse_config is not None,
    Feature.DRAFTS: _drafts(lambda drafts: True),
    Feature.OTHER_DRAFTS: _drafts(
        lambda drafts: drafts.method not in DRAFTERS and f"({drafts.method})"
    ),
    Feature.DRAFT_MODEL: _drafts(lambda drafts: drafts.uses_draft_kv_cache()),
    Feature.HIDDEN_STATES: _drafts(lambda drafts: drafts.use_eagle()),
    Feature.MTP_MODULES: _drafts(lambda drafts: drafts.use_multi_module_mtp()),
    Feature.DRAFT_CACHE: _draft_cache,
    Feature.DRAFT_BACKEND: _drafts(
        lambda drafts: drafts.uses_draft_kv_cache() and getattr(drafts.attention_backend, "name", 0)
    ),
    Feature.POOLING: lambda config: config.model_config.runner_type != "generate",
    Feature.ENCODER: lambda config: config.model_config.is_encoder_decoder,
    Feature.MLA: lambda config: config.model_config.use_mla,
    Feature.WINDOWS_ALONE: _has_windows_alone,
    Feature.OTHER_LAYERS: _has_other_layers,
    Feature.STATES: _has_states,
    Feature.SOFT_CAP: lambda config: bool(
        getattr(config.model_config.hf_text_config, "attn_logit_softcapping", None)
    ),
    Feature.EXPERTS: lambda config: config.model_config.is_moe,
}
