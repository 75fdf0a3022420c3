# SPDX-License-Identifier: Apache-2.0
"""The attention backends; those for CUDA by the name of the vLLM backend whose kernels they run."""

# Per-layer budgets are rounded to blocks, so small blocks waste less. vLLM's CPU platform would
# take 128 for its own kernels; ours do not care.
CPU_BLOCK_SIZE = 16
CPU_BACKEND = "vllm_pyramid.worker.backend_cpu.PyramidCpuBackend"
BACKENDS = {
    "FLASH_ATTN": "vllm_pyramid.worker.backend_flash.PyramidFlashBackend",
    "TRITON_ATTN": "vllm_pyramid.worker.backend_triton.PyramidTritonBackend",
}
