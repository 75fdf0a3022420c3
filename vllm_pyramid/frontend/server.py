# SPDX-License-Identifier: Apache-2.0
"""What the API server of an engine with a policy gets in addition: headers, and its routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from vllm_pyramid.compat.page_server import api_keys_of
from vllm_pyramid.frontend import page, shadow
from vllm_pyramid.frontend.anchor import Anchor, parse_anchor
from vllm_pyramid.frontend.http_settings import SettingsInHeaders
from vllm_pyramid.frontend.settings import ANCHOR_KEY, PAGE_KEY, SESSION_KEY
from vllm_pyramid.policy.session_sources import parse_session_from


def attach(app: FastAPI, settings: Mapping[str, Any]) -> None:
    """Let requests give settings in headers; add the routes of the live page."""
    sources, keys = parse_session_from(settings.get(SESSION_KEY)), api_keys_of(app)
    app.add_middleware(SettingsInHeaders, session_from=sources, api_keys=keys)
    if patterns := parse_anchor(settings.get(ANCHOR_KEY)):
        app.add_middleware(Anchor, patterns=patterns)
    shadow.use_client(lambda: getattr(app.state, "engine_client", None))
    if settings.get(PAGE_KEY) is True:
        page.attach(app)
