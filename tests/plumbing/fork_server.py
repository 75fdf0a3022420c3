# SPDX-License-Identifier: Apache-2.0
"""What the process does from which `workers.py` forks: what `child.py` was asked for, and imports.

It does so when it is imported, as multiprocessing's fork server does at its start.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

from child import REQUEST, install
from garbage import spare_collections
from workers import sleep_while_waiting

# What a worker imports. Of vllm_pyramid only what these find by themselves.
PRELOADED = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
)

install(json.loads(Path(os.environ[REQUEST]).read_text()))
sleep_while_waiting()
for name in PRELOADED:
    importlib.import_module(name)
spare_collections()
