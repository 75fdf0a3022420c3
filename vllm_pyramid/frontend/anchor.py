# SPDX-License-Identifier: Apache-2.0
"""Leave lines out of system prompts that change with every request (`--kv-anchor`).

K and V of a token depend on all tokens before it, so a new id in the first lines of a prompt makes
every prefix and session another one. The line is taken out of the body before vLLM renders it: the
model does not see it, and hits are exact for what the model sees.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_pyramid.plan.quoted import quoted

if TYPE_CHECKING:
    from prometheus_client import Counter

# Lines of a system text that are compared, and their longest one.
MAX_LINES, MAX_LINE = 16, 1024
MAX_PATTERNS, MAX_PATTERN, MIN_LITERAL = 8, 200, 8
# Of clients known to put an id into each request: vLLM leaves it out of /v1/messages alone.
PRESETS = {"billing": "x-anthropic-billing-header:*"}
_PATHS = (
    *("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    "/tokenize",
)
_HEADER = b"x-kv-anchor"
_SYSTEM = ("system", "developer")


def parse_anchor(value: object) -> tuple[str, ...]:
    """Parse `kv_anchor`: a list of patterns and names of `PRESETS`, or its text with commas.

    Raises:
        ValueError: anything else, or a pattern that could match nearly every line.
    """
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    how = (
        f"kv_anchor must be 1 to {MAX_PATTERNS} patterns of lines with commas between them, or "
        f"{', '.join(PRESETS)}; a pattern has at most {MAX_PATTERN} characters, * for any text and "
        f"? for any character, and begins with {MIN_LITERAL} others, such as 'Request id: *'"
    )
    if not isinstance(parts, Sequence) or not 0 < len(parts) <= MAX_PATTERNS:
        raise ValueError(f"{how}; not {quoted(value)}")
    for part in parts:
        if part in PRESETS:
            continue
        begins = part.strip()[:MIN_LITERAL] if isinstance(part, str) else ""
        if len(begins) < MIN_LITERAL or len(part) > MAX_PATTERN or re.search(r"[*?]", begins):
            raise ValueError(f"{how}; not {quoted(part)}")
        if re.search(r"[\[\n]", part):
            raise ValueError(f"{how}, without [ and line ends; not {quoted(part)}")
    return tuple(PRESETS.get(part, part.strip()) for part in parts)


@cache
def _left_out() -> Counter:
    from prometheus_client import Counter

    return Counter("vllm_pyramid:anchored_lines", "Lines left out of system prompts (--kv-anchor).")


class Anchor:
    """ASGI middleware that leaves lines out of the bodies of chats, and says so in a header.

    The body is read when the server asks for it, so behind the check of the API key.
    """

    def __init__(self, app: Any, patterns: Sequence[str]) -> None:
        self._app = app
        self._matches = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]
        _left_out()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        count, is_read = 0, False

        async def read() -> Any:
            nonlocal count, is_read
            if is_read:
                return await receive()
            parts, more = [], True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
            body, count = self.without_lines(b"".join(parts))
            is_read = True
            _left_out().inc(count)
            return {"type": "http.request", "body": body, "more_body": False}

        async def answer(message: Any) -> None:
            if count and message["type"] == "http.response.start":
                headers = [*message["headers"], (_HEADER, str(count).encode())]
                message = {**message, "headers": headers}
            await send(message)

        headers = [header for header in scope["headers"] if header[0] != b"content-length"]
        await self._app({**scope, "headers": headers}, read, answer)

    def without_lines(self, body: bytes) -> tuple[bytes, int]:
        """Return a body without the lines, and how many these are; vLLM answers what is no chat."""
        try:
            content = json.loads(body)
            count = self._change(content) if isinstance(content, dict) else 0
            return (json.dumps(content).encode(), count) if count else (body, 0)
        except (ValueError, RecursionError):
            return body, 0

    def _change(self, content: dict[str, Any]) -> int:
        count = sum(self._change_text(content, key) for key in ("system", "instructions"))
        for key in ("messages", "input"):
            for message in content[key] if isinstance(content.get(key), list) else ():
                if isinstance(message, dict) and message.get("role") in _SYSTEM:
                    count += self._change_text(message, "content")
        return count

    def _change_text(self, holder: dict[str, Any], key: str) -> int:
        """Leave lines out of a text, or of the texts of a list of parts."""
        value = holder.get(key)
        if isinstance(value, list):
            parts = (part for part in value if isinstance(part, dict))
            return sum(self._change_text(part, "text") for part in parts)
        if not isinstance(value, str):
            return 0
        lines = value.split("\n", MAX_LINES)
        kept = [line for line in lines[:MAX_LINES] if not self._is_left_out(line)]
        holder[key] = "\n".join([*kept, *lines[MAX_LINES:]])
        return min(len(lines), MAX_LINES) - len(kept)

    def _is_left_out(self, line: str) -> bool:
        return len(line) <= MAX_LINE and any(matches(line) for matches in self._matches)
