# SPDX-License-Identifier: Apache-2.0
"""What the API server of an engine with a policy gets in addition: a header, and its routes."""

from __future__ import annotations

from fastapi import FastAPI

from vllm_pyramid.frontend import page, shadow
from vllm_pyramid.frontend.follow_sessions import SessionHeader


def attach(app: FastAPI, shows_page: bool) -> None:
    """Let requests name their session in a header; add the routes of the live page."""
    app.add_middleware(SessionHeader)
    shadow.use_client(lambda: getattr(app.state, "engine_client", None))
    if shows_page:
        page.attach(app)
