# SPDX-License-Identifier: Apache-2.0
"""Let the front end add flags to vLLM's engine arguments and adjust the configuration."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_pyramid.compat.wrap import wrap

# Arguments that hooks may change for the one engine.
_CHANGED = (
    *("additional_config", "async_scheduling", "dtype", "enable_prefix_caching"),
    "kv_cache_dtype",
)


class ConfigHooks(Protocol):
    """Hooks that run while vLLM builds the configuration of one engine with a policy.

    Each raises ValueError naming the flag to change.
    """

    def prepare_args(self, args: EngineArgs) -> None:
        """Check and change the arguments before vLLM resolves its defaults."""

    def prepare_for_model(self, args: EngineArgs, model_config: ModelConfig) -> bool:
        """Check and change the arguments once the model's configuration has been read.

        Returns whether they changed, so that `model_config` has to be made again.
        """

    def finish_config(self, config: VllmConfig) -> None:
        """Check the finished configuration and put the policy's classes in place."""


class FrontEnd(NamedTuple):
    """The front end's flags and hooks.

    Attributes:
        add_flags: adds flags to a parser of engine arguments; called once per parser.
        take_flags: reads the parsed flags; on a ValueError the parser answers with exit status 2.
        hooks_for: returns the hooks of an engine that is being configured; None without a policy.
        finish_without_policy: changes the finished configuration of an engine without a policy.
    """

    add_flags: Callable[[argparse.ArgumentParser], None]
    take_flags: Callable[[argparse.Namespace], None]
    hooks_for: Callable[[EngineArgs], ConfigHooks | None]
    finish_without_policy: Callable[[VllmConfig], None]


def _add_flags(parser: argparse.ArgumentParser, front_end: FrontEnd) -> None:
    if "--kv-policy" in parser._option_string_actions:
        return
    front_end.add_flags(parser)
    parse_known_args = parser.parse_known_args

    @functools.wraps(parse_known_args)
    def parse_and_check(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse_known_args(*args, **kwargs)
        try:
            front_end.take_flags(namespace)
        except ValueError as error:  # as argparse answers: one line, nothing loaded yet
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_and_check  # type: ignore[method-assign]


def install(front_end: FrontEnd) -> None:
    """Wrap vLLM's functions so that they call `front_end`. Idempotent."""

    def add_cli_args_with_policy(add_cli_args: Any, parser: Any) -> Any:
        parser = add_cli_args(parser)
        _add_flags(parser, front_end)
        return parser

    def create_engine_config_with_policy(
        create_engine_config: Any, self: EngineArgs, *args: Any, **kwargs: Any
    ) -> Any:
        hooks = front_end.hooks_for(self)
        if hooks is None:
            config = create_engine_config(self, *args, **kwargs)
            front_end.finish_without_policy(config)
            return config
        given = {name: getattr(self, name) for name in _CHANGED}
        try:
            hooks.prepare_args(self)
            config = create_engine_config(self, *args, **kwargs)
        finally:  # the same arguments may make an engine without a policy
            for name, value in given.items():
                setattr(self, name, value)
        hooks.finish_config(config)
        return config

    def create_model_config_with_policy(create_model_config: Any, self: EngineArgs) -> Any:
        model_config = create_model_config(self)
        hooks = front_end.hooks_for(self)
        if hooks is not None and hooks.prepare_for_model(self, model_config):
            model_config = create_model_config(self)
        return model_config

    wrap(EngineArgs, "create_model_config", create_model_config_with_policy)
    wrap(EngineArgs, "add_cli_args", add_cli_args_with_policy)
    wrap(EngineArgs, "create_engine_config", create_engine_config_with_policy)
