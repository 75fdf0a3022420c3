# SPDX-License-Identifier: Apache-2.0
"""Add routes and a middleware to vLLM's API server, which may ask the scheduler for its state."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from vllm_pyramid.compat.wrap import wrap

_PAGE = "vllm_pyramid_page"


def is_server() -> bool:
    """Return whether this process has loaded vLLM's API server, as one that starts it has."""
    return "vllm.entrypoints.launchers.app" in sys.modules


def install(attach: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Call `attach` with the application and its settings when this process builds its API server.

    Idempotent. ValueError: this vLLM has no place for it.
    """

    def attach_page_too(original: Any, app: Any, *args: Any, **kwargs: Any) -> None:
        original(app, *args, **kwargs)
        attach(app, settings_of(app.state.args))

    try:
        from vllm.entrypoints.launchers import app as module

        wrap(module, "attach_endpoint_plugins", attach_page_too)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--kv-page does not work with this vLLM ({error}): leave it out"
        ) from None


def settings_of(args: Namespace) -> Mapping[str, Any]:
    """Return the settings of a server in its `additional_config`."""
    config = getattr(args, "additional_config", None)
    return config if isinstance(config, Mapping) else {}


def install_engine() -> None:
    """Let front ends call `page_data` of this process's scheduler. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    def vllm_pyramid_page(self: Any) -> str:
        return json.dumps(self.scheduler.page_data())

    setattr(EngineCore, _PAGE, vllm_pyramid_page)


async def ask_engines(engine_client: Any) -> list[dict[str, Any]]:
    """Return `page_data` of each engine of a front end; RuntimeError: it has no such call."""
    ask = getattr(engine_client.engine_core, "call_utility_all_async", None)
    if ask is None:
        raise RuntimeError("the engine runs in the front end's process, which has no such call")
    return [json.loads(text) for text in await ask(_PAGE)]


def is_authorized(app: Any, headers: Any) -> bool:
    """Return whether a request has one of the server's API keys; True where it has none."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    keys = api_keys_of(app)
    return not keys or AuthenticationMiddleware(app, keys).verify_token(headers)


def api_keys_of(app: Any) -> list[str]:
    """Return the API keys of a server."""
    from vllm import envs

    return [key for key in (app.state.args.api_key or [envs.VLLM_API_KEY]) if key]


def input_processor_of(engine_client: Any) -> Any:
    """Return what reads the requests of an API server; None in one that has no engine."""
    return getattr(engine_client, "input_processor", None)
