# SPDX-License-Identifier: Apache-2.0
"""Check requests where vLLM turns a client's request into the engine's.

In the engine core a mistake in `vllm_xargs` would end the engine instead of the request.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_pyramid.compat.chat_renderer import Template, template_of
from vllm_pyramid.compat.wrap import wrap


class RequestChecks(Protocol):
    """Checks of requests, called in turn; a VLLMValidationError is answered with status 400."""

    def before(
        self, processor: InputProcessor, params: Any, template: Template | None, *, resumable: bool
    ) -> tuple[Any, Any]:
        """Check the parameters before the prompt is tokenised.

        `template` is that of a chat of which the server keeps it; None for other prompts.
        Returns what goes to `after`, and the parameters with which the request goes on.
        """

    def after(self, processor: InputProcessor, request: EngineCoreRequest, found: Any) -> None:
        """Check the engine's request, whose prompt has been tokenised."""


def check_whole(resumable: bool) -> None:
    """Refuse streaming input, a prompt that comes in pieces."""
    if resumable:
        raise VLLMValidationError(
            "streaming input does not work with a KV policy: the prompt would grow after its "
            "cache was evicted; send the prompt whole",
            parameter="resumable",
        )


def check_images(model_config: ModelConfig, request: Any) -> None:
    """Refuse images and similar inputs of models in which their tokens attend in both directions.

    Attention to later tokens does not work with chunks that end at an eviction, and the CPU has no
    kernel for it.
    """
    if request.mm_features and model_config.is_mm_prefix_lm:
        raise VLLMValidationError(
            "a KV policy does not work with the images of this model yet, whose tokens attend to "
            "each other in both directions: send text, or start the server with --kv-policy none",
            parameter="messages",
        )


def api_servers(parallel_config: Any) -> int:
    """Return how many API servers share the engines of this one's configuration."""
    return int(getattr(parallel_config, "_api_process_count", 1))


def install(checks: RequestChecks) -> None:
    """Wrap `process_inputs` so that it calls `checks`. Idempotent."""

    def process_checked_inputs(
        process_inputs: Any,
        self: InputProcessor,
        request_id: str,
        prompt: Any,
        params: Any,
        *args: Any,
        resumable: bool = False,
        **kwargs: Any,
    ) -> Any:
        found, params = checks.before(self, params, template_of(prompt), resumable=resumable)
        request = process_inputs(
            self, request_id, prompt, params, *args, resumable=resumable, **kwargs
        )
        checks.after(self, request, found)
        return request

    wrap(InputProcessor, "process_inputs", process_checked_inputs)
