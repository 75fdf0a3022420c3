# SPDX-License-Identifier: Apache-2.0
"""Check the bodies of HTTP requests where vLLM makes parameters of them.

vLLM ignores unknown keys of a body, so a setting at the wrong place does nothing; beam search
leaves `vllm_xargs` out; `prompt_cache_key` reaches no engine. Requests of `/v1/messages` do not
remember unknown keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

from vllm.exceptions import VLLMValidationError

from vllm_pyramid.compat.wrap import wrap
from vllm_pyramid.policy.session_sources import BODY_NAMES, SESSION_ID

_REQUESTS = (
    ("completion", "CompletionRequest"),
    ("chat_completion", "ChatCompletionRequest"),
    ("responses", "ResponsesRequest"),
)


class Body(NamedTuple):
    """What a check sees of an HTTP body: keys that vLLM does not know, and its `vllm_xargs`.

    `names` are the values of the keys that may name a session; `beams`: whether it is a beam
    search.
    """

    unknown: Mapping[str, Any]
    xargs: Mapping[str, Any]
    names: Mapping[str, Any]
    beams: bool = False


# Raises VLLMValidationError, which is answered with status 400.
BodyCheck: TypeAlias = Callable[[Body], None]


def install(check: BodyCheck) -> None:
    """Call `check` for each body. Idempotent. ImportError, AttributeError: no place for it."""
    for folder, name in _REQUESTS:
        module = import_module(f"vllm.entrypoints.openai.{folder}.protocol")
        request = getattr(module, name)
        wrap(request, "to_sampling_params", _checked(check, beams=False))
        if hasattr(request, "to_beam_search_params"):
            wrap(request, "to_beam_search_params", _checked(check, beams=True))
    _check_messages(check)


def _check_messages(check: BodyCheck) -> None:
    """Call `check` for each body of `/v1/messages`; its `vllm_xargs` are checked as a chat's."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Messages

    known = AnthropicMessagesRequest.model_fields.keys()

    async def create_messages(
        original: Any, self: Any, request: Any, raw_request: Any = None
    ) -> Any:
        try:
            if raw_request is not None:
                body = await raw_request.json()  # parsed before, and remembered by the request
                check(Body({key: body[key] for key in body.keys() - known}, {}, {}))
            return await original(self, request, raw_request)
        except VLLMValidationError as error:  # vLLM would log it with its traceback
            return self.create_error_response(error)

    wrap(Messages, "create_messages", create_messages)


def _checked(check: BodyCheck, *, beams: bool) -> Callable[..., Any]:
    last: ref[Any] | None = None

    def checked(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        if last is None or last() is not self:  # once for all prompts of a body
            unknown, xargs = self.model_extra or {}, getattr(self, "vllm_xargs", None) or {}
            names = {name: getattr(self, name, None) or unknown.get(name) for name in BODY_NAMES}
            # vLLM reads it there, too.
            names[SESSION_ID] = names[SESSION_ID] or xargs.get(SESSION_ID)
            check(Body(unknown, xargs, names, beams))
            last = ref(self)
        return original(self, *args, **kwargs)

    return checked
