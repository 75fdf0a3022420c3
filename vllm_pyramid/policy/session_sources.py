# SPDX-License-Identifier: Apache-2.0
"""What names a session besides `kv_session`, where the operator says so (`--kv-session-from`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllm_pyramid.plan.quoted import quoted

# Keys of a body: vLLM's own name of a session, and OpenAI's of a cache.
SESSION_ID, CACHE_KEY = "session_id", "prompt_cache_key"
BODY_NAMES = (SESSION_ID, CACHE_KEY)
# Headers that say the same as a key; of another source, the header of its name.
HEADERS_OF = {SESSION_ID: ("x-session-id",), CACHE_KEY: ()}
_HEADER = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MAX = 8
# Headers that say something else, or who somebody is.
_OTHERS = ("authorization", "cookie", "x-api-key", "content-type", "user-agent", "host")


def parse_session_from(value: object) -> tuple[str, ...]:
    """Parse `kv_session_from`: keys of `BODY_NAMES` and names of headers, the first one given wins.

    `value` is a list, or its text with commas; None for an empty one. ValueError: anything else.
    """
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    how = (
        f"kv_session_from must name headers, {SESSION_ID} or {CACHE_KEY}, at most {_MAX} of them, "
        f"such as {SESSION_ID},x-claude-code-session-id"
    )
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{how}, not {quoted(value)}")
    names = tuple(dict.fromkeys(part.strip().lower() for part in parts))
    if not names or len(names) > _MAX:
        raise ValueError(f"{how}, not {quoted(value)}")
    for name in names:
        if not _HEADER.fullmatch(name) or name in _OTHERS:
            raise ValueError(f"{how}, not {quoted(name)}")
        if name.startswith("x-kv-"):
            raise ValueError(f"X-KV-Session always names a session: leave {quoted(name)} out")
    return names
