# SPDX-License-Identifier: Apache-2.0
"""Check the bodies of HTTP requests where vLLM makes parameters of them.

Target: `to_sampling_params` and `to_beam_search_params` of the requests of completions, chats and
responses. Why: vLLM ignores unknown keys of a body, so a setting at the wrong place does nothing;
beam search leaves `vllm_xargs` out. Remove when plugins can validate bodies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

_REQUESTS = (
    ("completion", "CompletionRequest"),
    ("chat_completion", "ChatCompletionRequest"),
    ("responses", "ResponsesRequest"),
)
_SAMPLING, _BEAMS = "to_sampling_params", "to_beam_search_params"

# Called with the keys that vLLM does not know, the body's `vllm_xargs`, and whether it asks for
# beam search. Raises VLLMValidationError, which is answered with status 400.
BodyCheck: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any], bool], None]


def install(check: BodyCheck) -> None:
    """Call `check` for each body. Idempotent.

    Raises:
        ImportError, AttributeError: this vLLM has no place for it.
    """
    for folder, name in _REQUESTS:
        module = import_module(f"vllm.entrypoints.openai.{folder}.protocol")
        request = getattr(module, name)
        if getattr(request, "_vllm_pyramid", False):
            continue
        setattr(request, _SAMPLING, _checked(getattr(request, _SAMPLING), check, beams=False))
        if hasattr(request, _BEAMS):
            setattr(request, _BEAMS, _checked(getattr(request, _BEAMS), check, beams=True))
        request._vllm_pyramid = True


def _checked(original: Callable[..., Any], check: BodyCheck, *, beams: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self.model_extra or {}, getattr(self, "vllm_xargs", None) or {}, beams)
        return original(self, *args, **kwargs)

    return checked
