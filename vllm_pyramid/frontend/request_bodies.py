# SPDX-License-Identifier: Apache-2.0
"""Refuse settings in an HTTP body that would have no effect, and read what names a session."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.exceptions import VLLMValidationError

from vllm_pyramid.compat.request_bodies import Body
from vllm_pyramid.frontend.http_settings import HEADERS, current, read_body
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.checks import looks_like_ours

_XARGS, _EXTRA_BODY = "vllm_xargs", "extra_body"


def check_body(body: Body) -> None:
    """Refuse settings at the wrong place, and settings of a beam search.

    Raises:
        VLLMValidationError: naming the right place.
    """
    unknown = body.unknown
    if misplaced := next(filter(looks_like_ours, unknown), None):
        raise VLLMValidationError(
            f"{quoted(misplaced)} stands at the top level of the body, where it has no effect: put "
            f'it into {_XARGS}, as in {{"{_XARGS}": {{"kv_budget": "25%"}}}}',
            parameter=_XARGS,
        )
    inner = unknown.get(_EXTRA_BODY)
    if isinstance(inner, Mapping) and any(key == _XARGS or looks_like_ours(key) for key in inner):
        raise VLLMValidationError(
            f"{_EXTRA_BODY} is an argument of OpenAI's Python client, which puts its keys into the "
            f"body; in a body it has no effect: send {_XARGS} at the top level",
            parameter=_XARGS,
        )
    read_body(body.names, beams=body.beams)
    if not body.beams:
        return
    if setting := next(filter(looks_like_ours, body.xargs), None):
        raise VLLMValidationError(
            f"{quoted(setting)} does not work with beam search, whose beams are requests of their "
            "own and take the server's policy: leave it out, or leave use_beam_search out",
            parameter=_XARGS,
        )
    settings = current()
    if settings is not None and settings.given:
        key, value = next(iter(settings.given.items()))
        header = next(header for header, own in HEADERS.items() if own == key)
        raise VLLMValidationError(
            f"{quoted(value)} in {header} does not work with beam search, whose beams are requests "
            "of their own: leave the header out",
            parameter="use_beam_search",
        )
