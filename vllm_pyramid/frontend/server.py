# SPDX-License-Identifier: Apache-2.0
"""What the API server of an engine with a policy gets in addition: a header, and its routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from vllm_pyramid.frontend import page, shadow
from vllm_pyramid.frontend.follow_sessions import SessionHeader
from vllm_pyramid.frontend.settings import PAGE_KEY


def attach(app: FastAPI, settings: Mapping[str, Any]) -> None:
    """Let requests name their session in a header; add the routes of the live page.

    Args:
        settings: of the server, which have been checked.
    """
    app.add_middleware(SessionHeader)
    shadow.use_client(lambda: getattr(app.state, "engine_client", None))
    if settings.get(PAGE_KEY) is True:
        page.attach(app)
