# SPDX-License-Identifier: Apache-2.0
"""Refuse KV policies, and change nothing else, where this package cannot work with vLLM."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm_pyramid.compat.versions import WrongVLLMError

_INSTALLED = "_vllm_pyramid"
_NONE = (None, "none")
# Where a configuration is made of arguments, else where it is made at all: module, class, method,
# and how its call shows `additional_config`.
_PLACES: tuple[tuple[str, str, str, Callable[[Any, Mapping[str, Any]], object]], ...] = (
    (
        "vllm.engine.arg_utils",
        "EngineArgs",
        "create_engine_config",
        lambda self, _: getattr(self, "additional_config", None),
    ),
    ("vllm.config", "VllmConfig", "__init__", lambda _, given: given.get("additional_config")),
)


def install(reason: str, keys: Collection[str]) -> bool:
    """Let engines that are asked for a policy fail with `reason`. Idempotent.

    `keys` are those of `additional_config` that ask for one; each has a flag of the same name.
    Returns whether vLLM has a place that this module knows, so that a policy is refused there.
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
    for module, cls, method, asked_of in _PLACES:
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            owner = getattr(importlib.import_module(module), cls)
            _check_before(owner, method, lambda *given, of=asked_of: check(of(*given)))
            return True
    return False


def _check_before(owner: type, name: str, check: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Call `check(self, kwargs)` before a method of vLLM's class `owner`; AttributeError if it is
    missing.
    """
    stock = getattr(owner, name)
    if getattr(stock, _INSTALLED, False):
        return

    @functools.wraps(stock)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, kwargs)
        return stock(self, *args, **kwargs)

    setattr(checked, _INSTALLED, True)
    setattr(owner, name, checked)


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
