# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: called in every vLLM process."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED_VLLM = "0.32"


def register() -> None:
    """Make `--kv-policy` known. Light and idempotent; nothing else changes until it is used.

    Raises:
        RuntimeError: another version of vLLM is installed than the one this package was made for.
    """
    installed = version("vllm")
    if installed.split(".")[:2] != SUPPORTED_VLLM.split("."):
        raise RuntimeError(
            f"vllm-pyramid {version('vllm-pyramid')} works with vLLM {SUPPORTED_VLLM}.x, but vLLM "
            f"{installed} is installed: install a matching pair, or uninstall vllm-pyramid"
        )
    from vllm_pyramid.compat import engine_args

    engine_args.install()
