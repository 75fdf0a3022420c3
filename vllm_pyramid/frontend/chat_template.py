# SPDX-License-Identifier: Apache-2.0
"""Find which tokens of a chat are its template's, its tools' and its system prompt's (`--kv-keep`).

The template renders the chat a second time, with a marker on both sides of every text of a message.
Without the markers the second rendering must be the first one: then the markers stand where the
contents of messages are in the prompt, and everything else is the template's. Texts of the system
prompt (roles `system` and `developer`) get no markers, and tools are no message: they count as the
template's.

    first    <|im_start|>system Be brief.<|im_end|><|im_start|>user  How long ...?  <|im_end|>
    second   <|im_start|>system Be brief.<|im_end|><|im_start|>user [How long ...?] <|im_end|>
    kept     ------------------------------------------------------                 ----------
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from vllm_pyramid.policy.kept_spans import flat, merged
from vllm_pyramid.policy.limits import MAX_SPANS
from vllm_pyramid.policy.served_settings import ServedSettings

_logger = init_logger(f"vllm.{__name__}")
_SYSTEM = ("system", "developer")
# What templates compare or print as it is; not what a message says. Arguments may have such keys.
_NOT_CONTENT = ("role", "type", "id", "tool_call_id", "name")
_MAX_TEXTS = 4 * MAX_SPANS  # templates may leave some out, or join them


class Content(NamedTuple):
    """Characters `start` to `end` of a prompt, which the message of index `message` says."""

    message: int
    start: int
    end: int


class MarkedChat:
    """A chat whose texts are marked; the conversation that it is made of is not changed.

    Args:
        documents: from which the template has the model answer, if any: they count as messages.

    Raises:
        VLLMValidationError: messages have more than `_MAX_TEXTS` texts.
        RecursionError: values of a message are nested too deeply.
    """

    def __init__(self, conversation: Sequence[Any], documents: Any = None) -> None:
        # Letters and digits pass through JSON; no message can contain a number drawn later.
        self._name = f"kvx{secrets.token_hex(8)}"
        self._texts = 0
        self.conversation = [
            message if message.get("role") in _SYSTEM else self._marked(message, index)
            for index, message in enumerate(conversation)
        ]
        self.documents = self._marked(documents, len(conversation), ())

    def _marked(self, value: Any, index: int, plain: Sequence[str] = _NOT_CONTENT) -> Any:
        """Return a value with its texts marked; keys in `plain` stay, but not in arguments."""
        if isinstance(value, str):
            text = value.strip()  # templates strip contents: the spaces stay outside
            if not text:
                return value
            self._texts += 1
            if self._texts > _MAX_TEXTS:
                raise VLLMValidationError(
                    f"--kv-keep: the messages of this chat have more than {_MAX_TEXTS} texts, "
                    "values in the arguments of calls included: send fewer",
                    parameter="messages",
                )
            start = value.index(text)
            marks = (f"{self._name}{kind}{index}z" for kind in "be")
            return value[:start] + next(marks) + text + next(marks) + value[start + len(text) :]
        if isinstance(value, Mapping):
            return {
                key: part
                if key in plain
                else self._marked(part, index, () if key == "arguments" else plain)
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(part, index, plain) for part in value]
        return value

    def contents(self, marked: str, text: str) -> list[Content]:
        """Return where the contents of messages are in the prompt `text`.

        Where a template has cut off one of a content's markers, the content begins at the marker
        before, or ends at the one behind.

        Args:
            marked: what the template makes of `conversation`.

        Raises:
            VLLMValidationError: the prompt is another one than the marked text without markers.
        """
        found: list[Content] = []
        pieces: list[str] = []
        at = end_of_mark = last = 0
        opened: tuple[int, int] | None = None
        for match in re.finditer(rf"{self._name}([be])(\d+)z", marked):
            pieces.append(marked[end_of_mark : match.start()])
            at, end_of_mark = at + len(pieces[-1]), match.end()
            index = int(match[2])
            if opened is not None:
                found.append(Content(opened[0], opened[1], at))
            elif match[1] == "e":
                found.append(Content(index, last, at))
            opened = (index, at) if match[1] == "b" else None
            last = at
        pieces.append(marked[end_of_mark:])
        if "".join(pieces) != text:
            raise VLLMValidationError(
                "--kv-keep cannot tell this chat's messages from its template, which renders "
                "another text when messages are marked: send the prompt without the chat template "
                "and name spans with kv_keep, or start the server without --kv-keep",
                parameter="messages",
            )
        if opened is not None:
            found.append(Content(opened[0], opened[1], len(text)))
        return found


def template_spans(
    contents: Sequence[Content], offsets: Sequence[tuple[int, int]], first: int
) -> list[int]:
    """Return the spans of tokens that are not messages' alone, as `kv_keep` has them.

    Args:
        offsets: the characters of each token of the prompt; an empty range for a token that the
            tokenizer adds.
        first: tokens at the beginning of each message that are kept too.

    Raises:
        VLLMValidationError: there are more than `MAX_SPANS` spans.
    """
    spans: list[tuple[int, int]] = []
    content, left = 0, dict.fromkeys((part.message for part in contents), first)
    for token, (start, end) in enumerate(offsets):
        while content < len(contents) and contents[content].end <= start:
            content += 1
        here = contents[content] if content < len(contents) else None
        if here is not None and here.start <= start < end <= here.end:
            if not left[here.message]:
                continue
            left[here.message] -= 1
        spans.append((token, token + 1))
    found = merged(spans)
    if len(found) > MAX_SPANS:
        raise VLLMValidationError(
            f"--kv-keep: the template of this chat has {len(found)} spans between its messages, "
            f"and at most {MAX_SPANS} are kept: send fewer messages, or join some",
            parameter="messages",
        )
    return flat(found)


class TemplateSpans:
    """The spans of chats' templates (`compat.chat_renderer.ChatSpans`)."""

    def wanted(self, config: Any, tools: bool) -> bool:
        """Return whether an engine keeps the templates of chats with, or without, tools."""
        settings = ServedSettings.of(config)
        if settings is None:
            return False
        return settings.keep_template is not None or (tools and settings.keep_tools)

    def give_up(self, config: Any, error: Exception) -> None:
        """Go on without spans, with a warning; raise the error if `--kv-keep` asks for them."""
        settings = ServedSettings.of(config)
        assert settings is not None
        reason = re.sub(r"kvx\w+|\d+", "N", str(error))  # one line for all chats of a kind
        if isinstance(error, RecursionError):
            reason = "values of its messages are nested too deeply"
        if settings.keep_template is None:
            _logger.warning_once("the tools of a chat are not kept: %s", reason)
        elif isinstance(error, RecursionError):
            raise VLLMValidationError(f"--kv-keep: {reason}", parameter="messages") from None
        else:
            raise error

    def mark(self, conversation: Sequence[Any], documents: Any) -> MarkedChat:
        """Return the chat with its texts marked."""
        return MarkedChat(conversation, documents)

    def spans(
        self, config: Any, contents: Sequence[Content], offsets: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Return the spans to keep; see `template_spans`."""
        settings = ServedSettings.of(config)
        assert settings is not None
        return template_spans(contents, offsets, settings.keep_template or 0)
