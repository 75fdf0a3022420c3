# SPDX-License-Identifier: Apache-2.0
"""Refuse settings in an HTTP body that would have no effect there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_pyramid.frontend.follow_sessions import header_session
from vllm_pyramid.plan.quoted import quoted
from vllm_pyramid.policy.checks import looks_like_ours

_XARGS, _EXTRA_BODY = "vllm_xargs", "extra_body"


def check_body(unknown: Mapping[str, Any], xargs: Mapping[str, Any], beams: bool) -> None:
    """Refuse settings at the wrong place, and settings of a beam search.

    Args:
        unknown: keys of the body that vLLM does not know, which it ignores.
        xargs: the body's `vllm_xargs`. beams: whether it asks for beam search.

    Raises:
        VLLMValidationError: naming the right place.
    """
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
    if not beams:
        return
    if setting := next(filter(looks_like_ours, xargs), None):
        raise VLLMValidationError(
            f"{quoted(setting)} does not work with beam search, whose beams are requests of their "
            "own and take the server's policy: leave it out, or leave use_beam_search out",
            parameter=_XARGS,
        )
    if (session := header_session()) is not None:
        raise VLLMValidationError(
            f"the session {quoted(session)} in X-KV-Session does not work with beam search, in "
            "which each token of each beam would be a turn: leave the header out",
            parameter="use_beam_search",
        )
