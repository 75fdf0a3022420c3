# SPDX-License-Identifier: Apache-2.0
"""Names of attention backends and cache types."""

import torch

# Per-layer budgets are rounded to blocks, so small blocks waste less. vLLM's CPU kernels need
# blocks of 128 tokens; ours take any size.
CPU_BLOCK_SIZE = 16
# Caches of 8-bit floats with one scale a layer, by their names in vLLM.
FP8_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Caches of 8 bits with a scale for each token and KV head, stored in the row of its numbers.
SCALED_ROWS = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
CPU_BACKEND = "vllm_pyramid.attention.backend_cpu.PyramidCpuBackend"
# Ours for CUDA, by the name of the vLLM backend whose kernels they run.
BACKENDS = {
    "FLASH_ATTN": "vllm_pyramid.attention.backend_flash.PyramidFlashBackend",
    "TRITON_ATTN": "vllm_pyramid.attention.backend_triton.PyramidTritonBackend",
}
