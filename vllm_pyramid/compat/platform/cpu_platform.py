# SPDX-License-Identifier: Apache-2.0
"""`PyramidCpuPlatform`: vLLM's CPU platform, which can also run a KV policy's attention.

vLLM chooses the platform while it is imported, before it knows what an engine asks for, and its
modules keep the object. So ours becomes the class of that object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm import envs
from vllm.platforms import builtin_platform_plugins
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_pyramid.compat.backend_names import CPU_BACKEND, CPU_BLOCK_SIZE
from vllm_pyramid.compat.platform import ACTIVE
from vllm_pyramid.policy.served_settings import asks_for_policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _stock_platform() -> type[CpuPlatform]:
    """Return vLLM's own choice: its CPU platform, or the one for AMD's Zen with their extension."""
    path = builtin_platform_plugins["cpu"]()
    return CpuPlatform if path is None else resolve_obj_by_qualname(path)


_Stock = _stock_platform()


class PyramidCpuPlatform(_Stock):  # type: ignore[misc, valid-type]
    """vLLM's, until a KV policy asks for its attention backend."""

    # vLLM asks Ray for one of these a worker, and for its number, which Ray gives only of kinds of
    # accelerators that it knows: `ray start --num-gpus=N` says how many workers a host takes.
    ray_device_key = "GPU"
    # Set to 1 in the workers that Ray starts, which choose their platform like any vLLM process.
    ray_noset_device_env_vars: ClassVar[list[str]] = [*_Stock.ray_noset_device_env_vars, ACTIVE]

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Path of the attention backend: the policy's where one is served, else vLLM's choice."""
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            path: str = super().get_attn_backend_cls(
                selected_backend, attn_selector_config, num_heads
            )
            return path
        if attn_selector_config.use_mla or attn_selector_config.use_sparse:
            raise ValueError(
                "multi-head latent and sparse attention have no kernel that follows a KV policy: "
                "serve this model with --kv-policy none"
            )
        if attn_selector_config.use_per_head_quant_scales:
            raise ValueError(
                "a KV cache with scales of every head has no kernel that follows a KV policy: add "
                "--kv-cache-dtype bfloat16"
            )
        return CPU_BACKEND

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Take vLLM's CPU settings; with a policy, small blocks unless the user chose a size."""
        cache_config = vllm_config.cache_config
        user_block_size = cache_config.user_specified_block_size
        super().check_and_update_config(vllm_config)
        if cls._small_blocks(vllm_config) and not user_block_size:
            cache_config.block_size = CPU_BLOCK_SIZE

    @classmethod
    def _small_blocks(cls, vllm_config: VllmConfig) -> bool:
        return asks_for_policy(vllm_config.additional_config)


def activate() -> None:
    """Let vLLM's CPU platform of this process run a KV policy's attention. Idempotent.

    Leaves a platform of another package alone, and the one that `VLLM_TARGET_DEVICE=cpu` forces on
    a vLLM without kernels for the CPU.
    """
    from vllm.platforms import current_platform, vllm_version_matches_substr

    if type(current_platform) is not _Stock:
        return
    if envs.VLLM_TARGET_DEVICE != "cpu" or vllm_version_matches_substr("cpu"):
        current_platform.__class__ = PyramidCpuPlatform


def deactivate() -> None:
    """Give this process vLLM's own CPU platform back, for an engine without a policy."""
    from vllm.platforms import current_platform

    if type(current_platform) is PyramidCpuPlatform:
        current_platform.__class__ = _Stock  # type: ignore[assignment]
