# SPDX-License-Identifier: Apache-2.0
"""The attention backends; those for CUDA by the name of the vLLM backend whose kernels they run."""

import torch

# Per-layer budgets are rounded to blocks, so small blocks waste less. vLLM's CPU platform would
# take 128 for its own kernels; ours do not care.
CPU_BLOCK_SIZE = 16
# Caches of 8-bit floats with one scale a layer, by their names in vLLM.
FP8_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Those of 8 bits with a scale for each token and KV head, beside the numbers in their row.
SCALED_ROWS = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}
CPU_BACKEND = "vllm_pyramid.attention.backend_cpu.PyramidCpuBackend"
BACKENDS = {
    "FLASH_ATTN": "vllm_pyramid.attention.backend_flash.PyramidFlashBackend",
    "TRITON_ATTN": "vllm_pyramid.attention.backend_triton.PyramidTritonBackend",
}
