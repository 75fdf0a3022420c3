# SPDX-License-Identifier: Apache-2.0
"""Refuse KV policies, and change nothing else, where this package cannot work with vLLM.

Target: `EngineArgs.create_engine_config`, or `VllmConfig.__init__` where that one is missing;
`EngineArgs.add_cli_args` for the flags. Why: a vLLM that is not supported has to start as without
this package, and a policy that it is asked for must not be ignored. Remove when plugins can declare
the versions that they support.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm_pyramid.compat.versions import WrongVLLMError

_INSTALLED = "_vllm_pyramid"
_NONE = (None, "none")


def install(reason: str, keys: Collection[str]) -> bool:
    """Let engines that are asked for a policy fail with `reason`. Idempotent.

    Args:
        keys: those of `additional_config` that ask for one. Each has a flag of the same name.

    Returns:
        Whether vLLM has a place that this module knows, so that a policy is refused there.
    """

    def check(additional_config: object) -> None:
        given = additional_config if isinstance(additional_config, Mapping) else {}
        asked = [key for key in keys if given.get(key) not in _NONE]
        if asked:
            raise WrongVLLMError(
                f"a KV policy is asked for ({', '.join(asked)} in additional_config), but {reason}"
            )

    with contextlib.suppress(ImportError, AttributeError, TypeError):
        _refuse_flags(reason, keys)
    for place in (_check_engine_args, _check_config):
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            place(check)
            return True
    return False


def _check_engine_args(check: Callable[[object], None]) -> None:
    """Check the arguments from which a configuration is made.

    Raises:
        ImportError, AttributeError: this vLLM does not have them.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, _INSTALLED, False):
        return

    @functools.wraps(create)
    def create_without_policy(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(getattr(self, "additional_config", None))
        return create(self, *args, **kwargs)

    setattr(create_without_policy, _INSTALLED, True)
    EngineArgs.create_engine_config = create_without_policy  # type: ignore[method-assign]


def _check_config(check: Callable[[object], None]) -> None:
    """Check the configuration itself.

    Raises:
        ImportError, AttributeError: this vLLM does not have it.
    """
    from vllm.config import VllmConfig

    init = VllmConfig.__init__
    if getattr(init, _INSTALLED, False):
        return

    @functools.wraps(init)
    def init_without_policy(self: Any, *args: Any, **kwargs: Any) -> None:
        check(kwargs.get("additional_config"))
        init(self, *args, **kwargs)

    setattr(init_without_policy, _INSTALLED, True)
    VllmConfig.__init__ = init_without_policy  # type: ignore[method-assign]


def _refuse_flags(reason: str, keys: Collection[str]) -> None:
    """Add our flags to parsers of engine arguments, unlisted; the parser answers with `reason`."""
    from vllm.engine.arg_utils import EngineArgs

    add_cli_args = EngineArgs.add_cli_args
    if getattr(add_cli_args, _INSTALLED, False):
        return

    class Refuse(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            if values not in _NONE or self.dest != "kv_policy":
                parser.error(f"{option} asks for a KV policy, but {reason}")

    @functools.wraps(add_cli_args)
    def add_cli_args_without_policy(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_cli_args(parser, *args, **kwargs)
        for key in keys:
            with contextlib.suppress(argparse.ArgumentError):  # a flag of this vLLM's own
                parser.add_argument(
                    "--" + key.replace("_", "-"),
                    dest=key,
                    action=Refuse,
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )
        return parser

    setattr(add_cli_args_without_policy, _INSTALLED, True)
    EngineArgs.add_cli_args = staticmethod(add_cli_args_without_policy)  # type: ignore[method-assign]
