# SPDX-License-Identifier: Apache-2.0
"""Switch off AMX matrix products that vLLM's extension does not have.

Target: `vllm.model_executor.layers.utils.check_cpu_sgl_kernel`. Why: on a processor with AMX it
sends every small weight (embeddings of small vocabularies, routers of experts) to operators of a
CPU build, and the CUDA wheel, which lacks them, ends the engine. Remove when vLLM asks whether the
operators exist.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import utils


def install() -> None:
    """Make vLLM use other operators for every weight if these do not exist. Idempotent."""
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
