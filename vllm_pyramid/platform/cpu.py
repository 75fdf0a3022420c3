# SPDX-License-Identifier: Apache-2.0
"""`PyramidCpuPlatform`: vLLM's CPU platform with our attention and small pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Per-layer budgets are rounded to blocks, so small blocks waste less. vLLM's CPU platform would
# take 128 for its own kernels; ours do not care.
DEFAULT_BLOCK_SIZE = 16


class PyramidCpuPlatform(CpuPlatform):
    """The CPU as vLLM knows it, minus the operators that only a CPU build of vLLM has."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Path of the attention backend; MLA and sparse attention have no kernel here."""
        if attn_selector_config.use_mla or attn_selector_config.use_sparse:
            raise ValueError(
                "multi-head latent and sparse attention have no kernel in vllm-pyramid's CPU "
                "platform; run this model on a GPU, or on a CPU build of vLLM without vllm-pyramid"
            )
        return "vllm_pyramid.worker.backend_cpu.PyramidCpuBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Take vLLM's CPU settings, then ours: small blocks, PyTorch's rotary."""
        cache_config = vllm_config.cache_config
        user_block_size = cache_config.user_specified_block_size
        super().check_and_update_config(vllm_config)
        if not user_block_size:
            cache_config.block_size = DEFAULT_BLOCK_SIZE
        custom_ops = vllm_config.compilation_config.custom_ops
        if "+rotary_embedding" not in custom_ops and "-rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")

    @classmethod
    def import_kernels(cls) -> None:
        """Define the few CPU operators that vLLM calls without asking whether they exist."""
        from vllm_pyramid.platform.torch_ops import define_missing_ops

        define_missing_ops()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the Triton kernels of the step by host code, where Triton has no device.

        vLLM calls this in every worker before it makes the model runner, so it is also the place
        for what the runner needs.
        """
        from vllm.triton_utils import HAS_TRITON
        from vllm.triton_utils.dispatcher import register_kernels

        from vllm_pyramid.compat import linear
        from vllm_pyramid.platform import seeds
        from vllm_pyramid.platform.torch_ops import compute_slot_mapping

        seeds.install()
        linear.install()
        if HAS_TRITON:
            return
        register_kernels(
            {"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping}
        )
