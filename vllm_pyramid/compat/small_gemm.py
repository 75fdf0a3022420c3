# SPDX-License-Identifier: Apache-2.0
"""Switch off AMX matrix products that vLLM's extension does not have.

On a processor with AMX, vLLM sends every small weight (embeddings of small vocabularies, routers of
experts) to operators that the CUDA wheel lacks.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import utils


def install() -> None:
    """Make vLLM use other operators for every weight if these do not exist. Idempotent."""
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
