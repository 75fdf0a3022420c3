# SPDX-License-Identifier: Apache-2.0
"""The words of a running request's prompt, and how many heads kept each (`--kv-page-prompts`).

The tokens are asked of the engines, and what was kept is read from the request's trace.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_pyramid.compat.page_server import ask_prompt, ranks_of, tokenizer_of
from vllm_pyramid.step.trace_files import Kept, read_request

_TIMEOUT_S = 10.0
_SPACE = "\u2581"  # of SentencePiece
_HALF = "\ufffd"  # what a part of a character is decoded to


class PromptWords:
    """Answers for `/pyramid/prompt`, one at a time.

    Args:
        folder: of the traces.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()

    async def get(self, engine_client: Any, request_id: str) -> dict[str, Any]:
        """Return a request's words and what kept them.

        Returns:
            pieces: the text of each token. layers: the model's own numbers of the layers that
            evict. heads: KV heads of each. counts: how many of them kept each token, `[layers *
            tokens]` little-endian uint16 in base64.

        Raises:
            LookupError: it does not run, has no tokens, or no trace yet.
            RuntimeError, TimeoutError: the engines do not answer.
        """
        async with self._lock:
            asked = ask_prompt(engine_client, request_id)
            tokens = await asyncio.wait_for(asked, _TIMEOUT_S)
            if tokens is None:
                raise LookupError(
                    f"no request {request_id[:80]!r} runs here, and words are shown while one does"
                )
            if not tokens:
                raise LookupError("its prompt came as embeddings, which have no words")
            ranks, tokenizer = ranks_of(engine_client), tokenizer_of(engine_client)
            return await asyncio.to_thread(self._read, request_id, tokens, ranks, tokenizer)

    def _read(
        self, request_id: str, tokens: list[int], ranks: int, tokenizer: Any
    ) -> dict[str, Any]:
        kept = self._kept(request_id, len(tokens), ranks)
        return {
            "request": request_id,
            "pieces": pieces(tokens, tokenizer),
            "layers": kept.layers,
            "heads": kept.heads,
            "counts": base64.b64encode(kept.counts.astype("<u2").tobytes()).decode(),
        }

    def _kept(self, request_id: str, num_tokens: int, ranks: int) -> Kept:
        """Return a request's trace; raise LookupError if there is none of this prompt."""
        try:
            kept = read_request(self._folder, request_id, ranks)
        except (OSError, ValueError) as error:
            raise LookupError(f"its trace cannot be read: {error}") from error
        # An earlier server may have left a trace of the same name.
        if kept is None or kept.tokens != num_tokens:
            raise LookupError("its prompt has not been evicted from yet, or has no trace")
        return kept


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token stands for; joined, they are the prompt's.

    Of tokens that share one character (bytes of it), the first has it. Without a tokenizer a token
    is its number.
    """
    if tokenizer is None:
        return [f"\u27e8{token}\u27e9" for token in tokens]
    texts = {token: _text(token, tokenizer) for token in set(tokens)}
    found = [texts[token] for token in tokens]
    start = 0
    while start < len(found):
        end = start + 1
        if _HALF in found[start]:
            end = _end_of_character(tokens, start, found, tokenizer)
        start = end
    return found


def _text(token: int, tokenizer: Any) -> str:
    """Return one token's text, with the spaces before it that decoders leave out."""
    name = tokenizer.convert_ids_to_tokens([token])[0] or ""
    text: str = tokenizer.decode([token])
    spaces = len(name) - len(name.lstrip(_SPACE))
    return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text


def _end_of_character(
    tokens: Sequence[int], start: int, found: list[str], tokenizer: Any, longest: int = 8
) -> int:
    """Put whole characters, whose first byte is in token `start`, into `found`; return their end.

    Where no few tokens make characters, the bytes stay as they are.
    """
    for end in range(start + 2, min(start + longest, len(tokens)) + 1):
        text = tokenizer.decode(list(tokens[start:end]))
        if _HALF not in text:
            found[start:end] = [text, *[""] * (end - start - 1)]
            return end
    return start + 1
