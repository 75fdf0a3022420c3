# SPDX-License-Identifier: Apache-2.0
"""Put a request's report into the last chunk of its stream, as `kv_transfer_params`.

Chats and completions carry it in the last chunk before `[DONE]`, messages in `message_delta`,
beside the usage. A chunk is held back only when the engine has ended the request: no token waits.
vLLM's `/v1/responses` has a place for reports.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm_pyramid.compat.wrap import wrap

_KEY, _DATA, _DELTA = "kv_transfer_params", "data: ", "event: message_delta\n"


@dataclass
class _Seen:
    """How many prompts of a stream have not ended, and the report of the first that has."""

    waiting: int = 1
    report: dict[str, Any] | None = None

    def take(self, output: Any) -> None:
        """Look at an output of the engine, or one with its prompt's number."""
        number, output = output if isinstance(output, tuple) else (0, output)
        if getattr(output, "finished", False):
            self.waiting -= 1
            if output.kv_transfer_params and (number == 0 or self.report is None):
                self.report = output.kv_transfer_params


def install() -> None:
    """Wrap the generators of streams. Idempotent."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Messages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat as Chat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as Completion

    chat = "chat_completion_stream_generator"
    has_chats = chat in vars(Messages)
    wrap(Chat, chat, _of_chat)
    wrap(Completion, "completion_stream_generator", _of_completion)
    if has_chats:
        wrap(Messages, chat, _of_chat)
    else:
        wrap(Messages, "message_stream_converter", _of_messages)


def _of_chat(
    original: Any, self: Any, request: Any, results: Any, *args: Any, **kwargs: Any
) -> Any:
    seen = _Seen()
    chunks = original(self, request, _watched(results, seen.take), *args, **kwargs)
    return with_report(chunks, seen)


def _of_completion(
    original: Any, self: Any, request: Any, prompts: Any, results: Any, *args: Any, **kwargs: Any
) -> Any:
    seen = _Seen(len(prompts))
    chunks = original(self, request, prompts, _watched(results, seen.take), *args, **kwargs)
    return with_report(chunks, seen)


def _of_messages(original: Any, self: Any, chunks: Any) -> Any:
    seen = _Seen()

    def take(chunk: str) -> None:  # the chat's last chunk, which has the report
        if _KEY in chunk and (found := _parsed(chunk)) is not None and found.get(_KEY):
            seen.waiting, seen.report = 0, found[_KEY]

    return with_report(original(self, _watched(chunks, take)), seen)


async def _watched(
    items: AsyncIterator[Any], take: Callable[[Any], None]
) -> AsyncGenerator[Any, None]:
    """Pass items on, each of which `take` sees first; close what they come from at the end."""
    try:
        async for item in items:
            take(item)
            yield item
    finally:
        if (close := getattr(items, "aclose", None)) is not None:
            await close()


async def with_report(chunks: AsyncGenerator[str, None], seen: Any) -> AsyncGenerator[str, None]:
    """Pass the chunks of a stream on, the last of which gets the report that was seen."""
    held: str | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            if seen.waiting > 0 or seen.report is None:
                yield chunk
            elif chunk.startswith(_DELTA):
                yield _DELTA + _with(chunk.removeprefix(_DELTA), seen.report)
            elif not chunk.startswith(_DATA):
                yield chunk
            elif _parsed(chunk) is None:  # [DONE]
                if held is not None:
                    yield _with(held, seen.report)
                held = None
                yield chunk
            else:
                if held is not None:
                    yield held
                held = chunk
    if held is not None:
        yield _with(held, seen.report)


def _parsed(chunk: str) -> dict[str, Any] | None:
    """Return the object in a chunk; None if it has none."""
    try:
        found = json.loads(chunk.removeprefix(_DATA))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _with(chunk: str, report: dict[str, Any]) -> str:
    """Return a chunk with the report, unless it tells of an error."""
    found = _parsed(chunk)
    if found is None or "error" in found:
        return chunk
    text = json.dumps({**found, _KEY: report}, ensure_ascii=False, separators=(",", ":"))
    return f"{_DATA}{text}\n\n"
