# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: called in every vLLM process."""

from __future__ import annotations

import logging

# Not vLLM's function for loggers, which an unsupported version may not have.
logger = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Add `--kv-policy` to vLLM. Light and idempotent; nothing else changes until it is used.

    Raises nothing: where this package does not work with the installed vLLM, vLLM starts as without
    it, and an engine that is asked for a policy fails with the reason.
    """
    from vllm_pyramid.compat.versions import WrongVLLMError, check_vllm, why_no_hooks

    try:
        check_vllm()
        from vllm_pyramid.compat import connectors, engine_args
        from vllm_pyramid.frontend import entry, flags

        hooks = entry.hooks_for, entry.finish_without_policy
        engine_args.install(engine_args.FrontEnd(flags.add_flags, flags.take_flags, *hooks))
        connectors.install("PyramidConnector", "vllm_pyramid.transfer.connector")
    except Exception as error:
        from vllm_pyramid.compat import no_policies
        from vllm_pyramid.frontend.settings import CONFIG_KEYS

        reason = str(error) if isinstance(error, WrongVLLMError) else why_no_hooks(error)
        refuses = no_policies.install(reason, CONFIG_KEYS)
        logger.debug("vllm-pyramid does nothing (policies are refused: %s): %s", refuses, reason)
