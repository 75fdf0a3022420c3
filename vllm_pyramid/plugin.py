# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: called in every vLLM process."""

from __future__ import annotations


def register() -> None:
    """Add `--kv-policy` to vLLM. Light and idempotent; nothing else changes until it is used.

    Raises:
        WrongVLLMError: this version of vLLM is not supported, or two distributions of it are mixed.
    """
    from vllm_pyramid.compat.versions import check_vllm

    check_vllm()
    from vllm_pyramid.compat import engine_args
    from vllm_pyramid.frontend.entry import PolicyFrontEnd

    engine_args.install(PolicyFrontEnd())
