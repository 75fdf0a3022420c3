# SPDX-License-Identifier: Apache-2.0
"""The record of GPU runs: with which vLLM, and on which device, this package passed its check."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logger import init_logger

from vllm_pyramid.compat.versions import vllm_version
from vllm_pyramid.version import __version__

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class GpuRun:
    """A run of scripts/gpu_check.sh, benches aside, without a failure; it prints what to add here.

    Versions stand without what follows a plus sign.
    """

    package: str
    vllm: str
    device: str


RUNS: tuple[GpuRun, ...] = ()


def warn_unless_run(device: str) -> None:
    """Log one warning unless the installed pair of versions is known to work on a GPU."""
    pair = __version__, vllm_version().partition("+")[0]
    if any((run.package, run.vllm) == pair for run in RUNS):
        return
    logger.warning_once(
        "kv-policy: vllm-pyramid %s with vLLM %s has not passed its whole check on a GPU (this is "
        "%s). Run `scripts/gpu_check.sh --json result.json` in a checkout of this version before "
        "you rely on it; docs/gpu.md lists what was tested",
        *pair,
        device,
    )
