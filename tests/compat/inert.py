# SPDX-License-Identifier: Apache-2.0
"""What a vLLM process looks like: its environment, platform, defaults, help, metrics, modules, log.

    python tests/compat/inert.py with|without MODEL RESULT.json

`without` hides this package's entry points, as if it was not installed.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ENTRY_POINTS = importlib.metadata.entry_points


def hide_entry_points() -> None:
    """Let vLLM find no entry point of this package."""

    def others(**of: Any) -> Any:
        found = ENTRY_POINTS(**of)
        if "group" not in of:
            return found
        return type(found)(point for point in found if "vllm_pyramid" not in point.value)

    importlib.metadata.entry_points = others  # type: ignore[assignment]


def serve_help() -> str:
    """What `vllm serve --help=all` prints."""
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", "--help=all"]
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        main()
    return printed.getvalue()


def metrics(config: Any) -> list[str]:
    """Names of what a server with this configuration shows."""
    import prometheus_client
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    PrometheusStatLogger(config)
    return sorted(metric.name for metric in prometheus_client.REGISTRY.collect())


def main() -> None:
    """Write what this process looks like before and after it made an engine's configuration."""
    how, model, result = sys.argv[1:]
    if how == "without":
        hide_entry_points()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    modules = sorted(sys.modules)  # before anything is asked for
    args = parser.parse_args(["--model", model, "--max-model-len", "512"])
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(config):
        backend = get_attn_backend(32, torch.bfloat16, None)
    platform = type(current_platform)
    found = {
        "platform": [f"{cls.__module__}.{cls.__qualname__}" for cls in platform.__mro__],
        "Ray's key": repr(current_platform.ray_device_key),
        "config": str(config),
        "compilation": repr(config.compilation_config),
        "block size": config.cache_config.block_size,
        "dtype": str(config.model_config.dtype),
        "scheduler": repr(config.scheduler_config.get_scheduler_cls()),
        "worker": config.parallel_config.worker_cls,
        "backend": repr(backend),
        "hash": config.compute_hash(),
        "metrics": metrics(config),
        "environment": dict(os.environ),
        "modules": modules,
        "help": serve_help(),
    }
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
