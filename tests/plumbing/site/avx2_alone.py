# SPDX-License-Identifier: Apache-2.0
"""Make vLLM take its AVX2 build of a CPU's operators on a processor that has more.

`make test-avx2` forces AVX2 by a variable upon our kernels, upon PyTorch and upon oneDNN; vLLM asks
PyTorch what the processor has.
"""

from __future__ import annotations

import os


def pretend() -> None:
    """Answer vLLM's questions as on a processor with AVX2 alone, if PyTorch's variable asks so."""
    if os.environ.get("ATEN_CPU_CAPABILITY") != "avx2":
        return
    import torch.cpu

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        assert hasattr(torch.cpu, name), f"this PyTorch has no torch.cpu.{name}"
        setattr(torch.cpu, name, lambda: False)
