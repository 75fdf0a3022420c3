# SPDX-License-Identifier: Apache-2.0
"""Flags and settings: from the command line, or from `additional_config`, into the engine.

Target: `EngineArgs.add_cli_args`, `.create_engine_config`, `.create_model_config`, and
`parse_known_args` of the parsers that get our flags. Why: vLLM has no hook through which a plugin
adds engine arguments or adjusts the finished configuration. The values travel in
`additional_config`, which reaches every process.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_pyramid.config import CONFIG_KEYS, NO_POLICY, KVSettings

_FLAGS: dict[str, dict[str, Any]] = {
    "kv_policy": {
        "metavar": "NAME|PATH.yaml",
        "help": "KV eviction policy with a budget per layer: 'auto' for the recommended one, a "
        "preset (vllm-pyramid policies lists them) or a YAML file. 'none' (the default) leaves "
        "vLLM as it is; 'full' runs vllm-pyramid's per-layer cache without eviction, as a "
        "baseline.",
    },
    "kv_budget": {
        "metavar": "N|P%%",
        "help": "Prompt tokens kept, on average over layers and KV heads: a number, or a share of "
        "the prompt such as 12%%. Default: the policy's own.",
    },
    "kv_min_tokens": {
        "metavar": "N",
        "help": "The least that a share of a prompt comes to: prompts of up to N tokens are kept "
        "whole. 0 for no floor. Default: the preset's own, or 256.",
    },
    "kv_policy_args": {
        "metavar": "JSON",
        "help": 'Changes to the policy\'s parameters, for example \'{"beta": 14, "window": 16}\'.',
    },
    "kv_trace": {
        "metavar": "DIR",
        "help": "Write the positions that each request keeps to DIR, one .npz a request.",
    },
    "kv_swap_space": {
        "metavar": "GiB",
        "help": "The most host memory that each worker takes at start for V, with a policy that "
        "keeps V there (kcache, or values: host). Less than the device's KV cache makes that as "
        "small. Default: as much as the device's KV cache.",
    },
    "kv_admission": {
        "metavar": "forecast|prompt",
        "help": "When a waiting prompt starts: 'forecast', if by what all requests are expected to "
        "hold it will not be preempted before it was worth its prefill (the default where the "
        "policy evicts), or 'prompt', as soon as it fits, which is vLLM's own rule.",
    },
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    if "--kv-policy" in parser._option_string_actions:
        return
    group = parser.add_argument_group(
        "KV policy (vllm-pyramid)",
        "A KV cache budget for every layer, and eviction: at the end of a prompt, or later too.",
    )
    for key, options in _FLAGS.items():
        group.add_argument("--" + key.replace("_", "-"), dest=key, default=None, **options)
    _check_while_parsing(parser)


def _check_while_parsing(parser: argparse.ArgumentParser) -> None:
    """Make the parser check our flags together and move them into `additional_config`.

    Wrong values are answered as argparse does: one line, exit status 2, nothing loaded yet. A
    `type` of each flag could not do it: whether a budget is possible depends on the policy and its
    parameters. They move here, not in `EngineArgs.from_cli_args`, because processes that get the
    finished namespace (`--api-server-count 2`) call that before plugins are loaded.
    """
    parse_known_args = parser.parse_known_args

    @functools.wraps(parse_known_args)
    def parse_and_check(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse_known_args(*args, **kwargs)
        try:
            _move_flags(namespace)
            KVSettings.from_additional_config(namespace.additional_config)
        except ValueError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_and_check  # type: ignore[method-assign, assignment]


def _move_flags(namespace: argparse.Namespace) -> None:
    """Put the flags that were given into `additional_config`, and set them back to None."""
    given = {key: value for key in CONFIG_KEYS if (value := getattr(namespace, key)) is not None}
    if not given:
        return
    base = namespace.additional_config or {}
    if not isinstance(base, dict):
        raise ValueError(f"--additional-config must be a JSON object, not {base!r}")
    both = [f"--{key.replace('_', '-')}" for key in given if key in base]
    if both:
        raise ValueError(
            f"{', '.join(both)} given both as a flag and in --additional-config: leave one out"
        )
    namespace.additional_config = {**base, **given}
    for key in given:
        setattr(namespace, key, None)


def install() -> None:
    """Put the wrappers in place. Idempotent."""
    if getattr(EngineArgs, "_vllm_pyramid", False):
        return
    add_cli_args = EngineArgs.add_cli_args
    create_engine_config = EngineArgs.create_engine_config
    create_model_config = EngineArgs.create_model_config

    @functools.wraps(add_cli_args)
    def add_cli_args_with_policy(parser: Any) -> Any:
        parser = add_cli_args(parser)
        _add_flags(parser)
        return parser

    @functools.wraps(create_engine_config)
    def create_engine_config_with_policy(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        settings = KVSettings.from_additional_config(self.additional_config)
        if settings is None or settings.kv_policy == NO_POLICY:
            if (defaults := sys.modules.get("vllm_pyramid.platform.defaults")) is not None:
                defaults.withdraw()  # an earlier engine of this process had a policy
            return create_engine_config(self, *args, **kwargs)
        from vllm_pyramid.engine_config import finish_config, prepare_args

        asks_prefix_caching = self.enable_prefix_caching is True  # None until vLLM has its default
        prepare_args(self, settings)
        types = self.dtype, self.kv_cache_dtype
        try:
            config = create_engine_config(self, *args, **kwargs)
        finally:  # the same arguments may make an engine without a policy
            self.dtype, self.kv_cache_dtype = types
        finish_config(config, settings, asks_prefix_caching=asks_prefix_caching)
        return config

    @functools.wraps(create_model_config)
    def create_model_config_with_policy(self: EngineArgs) -> ModelConfig:
        model_config = create_model_config(self)
        settings = KVSettings.from_additional_config(self.additional_config)
        if settings is not None and settings.kv_policy != NO_POLICY:
            from vllm_pyramid.engine_config import prepare_for_model

            if prepare_for_model(self, model_config, settings):
                model_config = create_model_config(self)
        return model_config

    EngineArgs.create_model_config = create_model_config_with_policy  # type: ignore[method-assign]
    EngineArgs.add_cli_args = staticmethod(add_cli_args_with_policy)  # type: ignore[method-assign]
    EngineArgs.create_engine_config = create_engine_config_with_policy  # type: ignore[method-assign]
    EngineArgs._vllm_pyramid = True  # type: ignore[attr-defined]
