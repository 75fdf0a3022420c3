# SPDX-License-Identifier: Apache-2.0
"""Choose the attention backend of an engine with a policy: ours, over suitable kernels."""

from __future__ import annotations

from typing import cast

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_pyramid.compat.backend_names import BACKENDS, CPU_BACKEND
from vllm_pyramid.kernels import get_ops

logger = init_logger(f"vllm.{__name__}")


def take_backend(config: VllmConfig) -> str:
    """Register our backend for CUDA, which runs vLLM's kernels on per-layer tables."""
    chosen = config.attention_config.backend
    name = _default_backend(config) if chosen is None else chosen.name
    if reasons := _reasons_against(name, config):
        raise ValueError(
            f"a KV policy cannot serve this model with the attention backend {name} here: "
            f"{', '.join(reasons)}"
        )
    if name == "FLASH_ATTN" and _capability().major == 10:
        logger.info(
            "kv-policy: uses FlashAttention; stock vLLM prefers FlashInfer on this device. Compare "
            "with --attention-backend FLASH_ATTN on both sides"
        )
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    register_backend(AttentionBackendEnum.CUSTOM, BACKENDS[name])
    return name


def take_cpu_backend(config: VllmConfig) -> None:
    """Register our backend for the CPU, which our platform then selects.

    Raises:
        RuntimeError: its kernels cannot be used, which the workers would find out much later.
        ValueError: vLLM chose another platform.
    """
    from vllm_pyramid.compat.platform.cpu_platform import PyramidCpuPlatform

    if not isinstance(current_platform, PyramidCpuPlatform):
        raise ValueError(
            "a KV policy needs vllm-pyramid's CPU platform, and vLLM chose "
            f"{type(current_platform).__name__}: unset VLLM_TARGET_DEVICE, let VLLM_PLUGINS name "
            "vllm_pyramid_cpu too (or unset it), and uninstall other platform plugins"
        )
    get_ops("cpu")
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    register_backend(AttentionBackendEnum.CUSTOM, CPU_BACKEND)


def take_draft_backend(config: VllmConfig) -> None:
    """Set our backend for a draft model, whose blocks come from the same pool."""
    speculation = config.speculative_config
    if speculation is not None and speculation.uses_draft_kv_cache():
        speculation.attention_backend = AttentionBackendEnum.CUSTOM


def _default_backend(config: VllmConfig) -> str:
    """Return the first backend that device, vLLM, model and cache allow, or else the last one."""
    for name in BACKENDS:
        if not (reasons := _reasons_against(name, config)):
            return name
        logger.debug("kv-policy: no attention backend %s: %s", name, ", ".join(reasons))
    return name


def _reasons_against(name: str, config: VllmConfig) -> list[str]:
    """Return vLLM's reasons against a backend for this model and cache."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if name == "FLASH_ATTN" and not is_flash_attn_varlen_func_available():
        return ["this vLLM was built without FlashAttention"]
    backend = resolve_obj_by_qualname(BACKENDS[name])
    model, cache = config.model_config, config.cache_config
    cache_dtype: str = cache.cache_dtype  # in vLLM 0.33 plugins may add names to `CacheDType`
    text = model.hf_text_config
    assert isinstance(model.dtype, torch.dtype), "vLLM replaces names such as 'auto'"
    sizes = {model.get_head_size()}
    # Gemma 4 has larger heads where attention is full.
    if (of_layers := getattr(text, "per_layer_config", None)) is not None:
        layers = (of_layers[layer] for layer in range(text.num_hidden_layers))
        found_sizes = (getattr(layer, "head_dim", None) for layer in layers)
        sizes |= {size for size in found_sizes if size is not None}
    found: dict[str, None] = {}  # a set that keeps its order
    with set_current_vllm_config(config):
        for size in sorted(sizes):
            wanted = AttentionSelectorConfig(
                head_size=size,
                dtype=model.dtype,
                kv_cache_dtype=cast(CacheDType, cache_dtype),  # as vLLM's own selector does
                block_size=cache.block_size if cache.user_specified_block_size else None,
                has_sink=text.model_type == "gpt_oss" or bool(getattr(text, "attention_sinks", 0)),
                use_mm_prefix=bool(model.is_mm_prefix_lm),
                use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
            )
            against = backend.validate_configuration(
                device_capability=_capability(), **wanted._asdict()
            )
            found |= dict.fromkeys(against)
    return list(found)


def _capability() -> DeviceCapability:
    found = current_platform.get_device_capability()
    assert found is not None, "only CUDA devices are asked for their capability"
    return found
