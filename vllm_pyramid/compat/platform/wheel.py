# SPDX-License-Identifier: Apache-2.0
"""`WheelCpuPlatform`: the CUDA wheel of vLLM on a machine without a GPU.

It lets code be tried against a version of vLLM that has no CPU build at hand. It is slow: vLLM's
matrix products, norms and rotary for the CPU are not in the wheel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_pyramid.compat.platform.cpu_platform import PyramidCpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class WheelCpuPlatform(PyramidCpuPlatform):
    """Our attention with a policy and without, PyTorch's operators for what is missing."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Always ours: vLLM's CPU attention is not in the wheel."""
        return super().get_attn_backend_cls(
            AttentionBackendEnum.CUSTOM, attn_selector_config, num_heads
        )

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Finish the configuration for the CPU and take PyTorch's rotary embedding."""
        super().check_and_update_config(vllm_config)
        logger.warning_once(
            "This vLLM was built for CUDA. On the CPU it runs PyTorch's operators, slowly; install "
            "a CPU build of vLLM to serve here"
        )
        custom_ops = vllm_config.compilation_config.custom_ops
        if "+rotary_embedding" not in custom_ops and "-rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")

    @classmethod
    def _small_blocks(cls, vllm_config: VllmConfig) -> bool:
        return True

    @classmethod
    def import_kernels(cls) -> None:
        """Define the few CPU operators that vLLM calls without asking whether they exist."""
        from vllm_pyramid.compat.platform.torch_ops import define_missing_ops

        define_missing_ops()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the Triton kernels of the step by host code, where Triton has no device.

        vLLM calls this in every worker before it loads the model, so matrix products that the wheel
        lacks are switched off here too.
        """
        from vllm.triton_utils import HAS_TRITON
        from vllm.triton_utils.dispatcher import register_kernels

        from vllm_pyramid.compat import small_gemm
        from vllm_pyramid.compat.platform.torch_ops import compute_slot_mapping

        small_gemm.install()
        if HAS_TRITON:
            return
        register_kernels(
            {"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping}
        )
