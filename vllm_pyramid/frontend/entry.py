# SPDX-License-Identifier: Apache-2.0
"""The configuration hooks that the plugin registers with vLLM.

Every vLLM process imports this module, so it imports what a policy needs only when one is served.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_pyramid.frontend.settings import KVSettings, without_ours
from vllm_pyramid.policy.served_settings import NO_POLICY

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pyramid.policy.capabilities import Used


class PolicyConfig:
    """The configuration of one engine with a policy (`compat.engine_args.ConfigHooks`)."""

    def __init__(self, settings: KVSettings) -> None:
        self._settings = settings
        self._used: Used = {}
        self._gives_sizes = False

    def prepare_args(self, args: EngineArgs) -> None:
        """Refuse what a policy cannot serve, and switch off vLLM's own defaults."""
        from vllm_pyramid.frontend import engine_config, graphs

        self._gives_sizes = graphs.gives_sizes(args)
        self._used = engine_config.prepare_args(args, self._settings)

    def prepare_for_model(self, args: EngineArgs, model_config: ModelConfig) -> bool:
        """Do the same for what depends on the model; return whether the arguments changed."""
        from vllm_pyramid.frontend import engine_config

        return engine_config.prepare_for_model(args, model_config, self._settings)

    def finish_config(self, config: VllmConfig) -> None:
        """Check the finished configuration and put the policy's classes in place."""
        from vllm_pyramid.frontend import engine_config, graphs

        engine_config.finish_config(config, self._settings, self._used)
        policy = self._settings.policy()
        if policy is not None and not self._gives_sizes:
            graphs.capture_more(config, policy)


def hooks_for(args: EngineArgs) -> PolicyConfig | None:
    """Return the hooks of an engine with a policy; None leaves the engine to vLLM."""
    settings = KVSettings.from_additional_config(args.additional_config)
    if settings is not None and settings.kv_policy != NO_POLICY:
        return PolicyConfig(settings)
    if "vllm_pyramid.compat.platform.cpu_platform" in sys.modules:
        # An earlier engine had a policy: of this process, or of the one that started it.
        from vllm_pyramid.compat.platform import defaults

        defaults.withdraw()
    return None


def finish_without_policy(config: VllmConfig) -> None:
    """Take our keys out of an engine's configuration, which vLLM compiles models by."""
    given = config.additional_config
    if isinstance(given, dict) and len(others := without_ours(given)) < len(given):
        config.additional_config = others
