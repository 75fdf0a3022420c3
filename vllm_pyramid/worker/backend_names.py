# SPDX-License-Identifier: Apache-2.0
"""The attention backends for CUDA, by the name of the vLLM backend whose kernels they run."""

BACKENDS = {
    "FLASH_ATTN": "vllm_pyramid.worker.backend_flash.PyramidFlashBackend",
    "TRITON_ATTN": "vllm_pyramid.worker.backend_triton.PyramidTritonBackend",
}
BACKEND_KEY = "vllm_pyramid_attention"  # of additional_config: which of them the workers use
