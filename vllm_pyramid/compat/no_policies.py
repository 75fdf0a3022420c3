# SPDX-License-Identifier: Apache-2.0
"""Refuse KV policies, and change nothing else, where this package cannot work with vLLM."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm_pyramid.compat.versions import WrongVLLMError
from vllm_pyramid.compat.wrap import wrap

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

            def refuse(stock: Any, self: Any, *args: Any, of: Any = asked_of, **kwargs: Any) -> Any:
                check(of(self, kwargs))
                return stock(self, *args, **kwargs)

            wrap(owner, method, refuse)
            return True
    return False


def _refuse_flags(reason: str, keys: Collection[str]) -> None:
    """Add our flags to parsers of engine arguments, unlisted; the parser answers with `reason`."""
    from vllm.engine.arg_utils import EngineArgs

    class Refuse(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            if values not in _NONE or self.dest != "kv_policy":
                parser.error(f"{option} asks for a KV policy, but {reason}")

    def add_cli_args_without_policy(
        add_cli_args: Any, parser: Any, *args: Any, **kwargs: Any
    ) -> Any:
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

    wrap(EngineArgs, "add_cli_args", add_cli_args_without_policy)
