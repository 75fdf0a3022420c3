# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a chat are its template's, by templates of several kinds and a real tokenizer."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError

from vllm_pyramid.compat import chat_renderer
from vllm_pyramid.frontend import chat_template
from vllm_pyramid.frontend.chat_template import (
    Content,
    MarkedChat,
    TemplateSpans,
    template_spans,
)
from vllm_pyramid.policy.limits import MAX_SPANS
from vllm_pyramid.policy.served_settings import ServedSettings

CHATML = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for one in documents or [] %}{{ one.title }}: {{ one.text }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}[CALL {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}\n{% endfor %}<|assistant|>"
)
# As Qwen 3's: what a message thought is cut off before its text.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% set text = m.content.split('</think>')[-1].lstrip('\\n') %}{{ text }}\n{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  How long is\na river?  "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "function": {"name": "look_up", "arguments": {"of": 'the "Elbe"', "n": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": "1,094 km"},
    {"role": "user", "content": "And in miles? " * 3},
]


def render(template: str, messages: list[Any], **values: Any) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=True)
    return environment.from_string(template).render(messages=messages, **values)


def contents(template: str, messages: list[Any], **values: Any) -> tuple[str, list[Content]]:
    text, marked = render(template, messages, **values), MarkedChat(messages)
    return text, marked.contents(render(template, marked.conversation, **values), text)


def test_everything_but_what_messages_say_is_the_templates() -> None:
    before = json.dumps(CHAT)
    text, found = contents(CHATML, CHAT, tools=[{"name": "look_up"}])
    assert json.dumps(CHAT) == before
    assert [(part.message, text[part.start : part.end]) for part in found] == [
        (1, "How long is\na river?"),
        (2, 'the \\"Elbe\\"'),
        (3, "1,094 km"),
        (4, ("And in miles? " * 3).strip()),
    ]
    assert "Be brief." in text[: found[0].start] and 'TOOLS [{"name"' in text[: found[0].start]


def test_contents_in_parts() -> None:
    parts = [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]
    text, found = contents(PARTS, [{"role": "user", "content": parts}])
    assert [text[part.start : part.end] for part in found] == ["One.", "Two."]
    assert {part.message for part in found} == {0}


def test_what_a_template_cuts_off() -> None:
    """The first marker goes with it: the content then begins where the message before ended."""
    chat = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>Hm.</think>\nSo."},
        {"role": "user", "content": "Ah."},
    ]
    text, found = contents(THINKING, chat)
    assert [text[part.start : part.end] for part in found] == ["Why?", "\n<|assistant|>So.", "Ah."]


@pytest.mark.parametrize("filter", ["upper", "reverse", "length", "truncate(5)"])
def test_templates_that_change_what_is_marked(filter: str) -> None:
    template = "{% for m in messages %}{{ m.content | FILTER }}{% endfor %}".replace(
        "FILTER", filter
    )
    with pytest.raises(VLLMValidationError, match="cannot tell this chat's messages"):
        contents(template, [{"role": "user", "content": "A longer text."}])


def test_a_message_cannot_name_a_marker() -> None:
    """Not even one that has seen those of another chat."""
    seen = MarkedChat([{"role": "user", "content": "x"}]).conversation[0]["content"]
    text, found = contents(CHATML, [{"role": "user", "content": f"{seen} and {seen}"}])
    assert [text[part.start : part.end] for part in found] == [f"{seen} and {seen}"]


def test_tokens_of_the_template() -> None:
    contents = [Content(0, 10, 20), Content(1, 25, 28), Content(1, 28, 33)]
    # The first is the tokenizer's own; one overlaps both sides of 10, another lies inside 20.
    offsets = [(0, 0), (0, 4), (4, 11), (11, 15), (15, 20), (20, 25), (25, 28), (28, 30), (30, 33)]
    assert template_spans(contents, offsets, 0) == [0, 3, 5, 6]
    assert template_spans(contents, offsets, 1) == [0, 4, 5, 7]
    assert template_spans(contents, offsets, 2) == [0, 8]
    assert template_spans(contents, offsets, 9) == [0, 9]
    assert template_spans([], offsets, 0) == [0, 9]
    many = [Content(i, 2 * i + 1, 2 * i + 2) for i in range(MAX_SPANS)]
    single = [(i, i + 1) for i in range(2 * MAX_SPANS + 1)]
    with pytest.raises(VLLMValidationError, match=f"has {MAX_SPANS + 1} spans"):
        template_spans(many, single, 0)
    assert len(template_spans(many, single[:-1], 0)) == 2 * MAX_SPANS


def test_with_a_real_tokenizer(random_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    chat = [message for message in CHAT if "tool_calls" not in message]
    apply: Callable[..., Any] = tokenizer.apply_chat_template
    arguments: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    text, marked = apply(chat, **arguments), MarkedChat(chat)
    found = marked.contents(apply(marked.conversation, **arguments), text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = template_spans(found, encoded["offset_mapping"], 0)
    kept = {
        token for bounds in zip(spans[::2], spans[1::2], strict=True) for token in range(*bounds)
    }
    others = [token for token in range(len(encoded["input_ids"])) if token not in kept]
    words = tokenizer.decode([encoded["input_ids"][token] for token in others])
    assert "Be brief" not in words and "|user|" not in words and "|assistant|" not in words
    for said in ("river", "1,094 km", "miles"):
        assert said in words
    template = tokenizer.decode([encoded["input_ids"][token] for token in sorted(kept)])
    assert "Be brief." in template and template.count("<|user|>") == 2 and "river" not in template


def test_marking_ends_at_a_number_of_texts() -> None:
    """What is behind the limit is not looked at."""

    class Texts(list[Any]):
        seen = 0

        def __iter__(self) -> Any:
            for text in super().__iter__():
                self.seen += 1
                yield text

    texts = Texts(["x"] * 100_000)
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": {"of": texts}}}]}
    with pytest.raises(VLLMValidationError, match="more than 4096 texts"):
        MarkedChat([message])
    assert texts.seen == 4097


def nested(depth: int) -> list[Any]:
    value: Any = "x"
    for _ in range(depth):
        value = {"in": value}
    call = {"function": {"name": "f", "arguments": value}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


class Stub:
    """A renderer of vLLM, as far as the wrapped functions use it."""

    def __init__(self, config: Any, fails: Exception | None = None) -> None:
        self.config, self.fails, self.model_config = config, fails, None
        self._executor = ThreadPoolExecutor(1)
        self.default_chat_tok_params = SimpleNamespace(max_input_tokens=1000)

    def _can_produce_offsets(self) -> bool:
        return True

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(max_chars_per_token=10)

    async def _apply_chat_template_async(self, _: Any, __: Any, chat: Any, **own: Any) -> str:
        return render(CHATML, chat, **own)

    async def _render_with_timeout(self, made: Any) -> Any:
        found = await made
        if self.fails is not None:
            raise self.fails
        return found


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions that the renderer's are wrapped in, by name."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(chat_renderer, "wrap", lambda _, name, new: made.setdefault(name, new))
    chat_renderer.install(TemplateSpans())
    return made


def params(**own: Any) -> Any:
    return SimpleNamespace(
        chat_template_kwargs=own, get_apply_chat_template_kwargs=lambda: dict(own)
    )


def served(
    stub: Stub, messages: list[Any], monkeypatch: pytest.MonkeyPatch, **more: Any
) -> dict[str, Any]:
    """The prompt that the wrapped renderer returns for a chat with tools."""
    own = {"tools": [{"name": "f"}], **more}

    async def first(*_: Any) -> Any:
        return messages, {"prompt": render(CHATML, messages, **own)}

    renders = install(monkeypatch)["render_messages_async"]
    prompt: dict[str, Any] = asyncio.run(renders(first, stub, messages, params(**own)))[1]
    return prompt


CASES = [
    (nested(600), None, "nested"),
    (nested(1), TimeoutError("after 30s"), "after 30s"),
    ([{"role": "user", "content": "x" * 10_001}], None, "10045 characters"),
]


@pytest.mark.parametrize(("messages", "fails", "why"), CASES)
def test_what_cannot_be_marked_is_served(messages, fails, why, monkeypatch) -> None:
    """Without spans by default; `--kv-keep` refuses it."""
    settings = SimpleNamespace(keep_template=None, keep_tools=True)
    monkeypatch.setattr(ServedSettings, "of", lambda config: settings)
    logged: list[str] = []
    monkeypatch.setattr(chat_template._logger, "warning_once", lambda _, why: logged.append(why))
    assert set(served(Stub(None, fails), messages, monkeypatch)) == {"prompt"}
    assert len(logged) == 1 and not re.search(r"\d", logged[0])
    settings.keep_template = 0
    error = type(fails) if fails else VLLMValidationError
    with pytest.raises(error, match=why):
        served(Stub(None, fails), messages, monkeypatch)


def test_spans_leave_the_event_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the work waits here until the loop has answered another request."""
    settings = SimpleNamespace(keep_template=None, keep_tools=True)
    monkeypatch.setattr(ServedSettings, "of", lambda config: settings)
    answered, waited = threading.Event(), []

    def slow(part: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any) -> Any:
            answered.clear()
            waited.append(answered.wait(1))
            return part(*args)

        return waits

    async def first(*_: Any) -> Any:
        return CHAT, {"prompt": render(CHATML, CHAT, tools=[{"name": "f"}])}

    async def tokenized(_: Any, prompt: Any) -> Any:
        return {"prompt_token_ids": prompt["prompt_token_ids"]}

    async def others() -> None:
        while True:
            answered.set()
            await asyncio.sleep(0.001)

    async def chat() -> Any:
        made, stub, other = install(monkeypatch), Stub(None), asyncio.create_task(others())
        _, prompt = await made["render_messages_async"](
            first, stub, CHAT, params(tools=[{"name": "f"}])
        )
        size = len(prompt["prompt"])
        prompt |= {"prompt_token_ids": [1] * size}
        prompt["prompt_token_offsets"] = [(at, at + 1) for at in range(size)]
        made_input = await made["_process_tokens_async"](tokenized, stub, prompt)
        other.cancel()
        return made_input

    class Slow(MarkedChat):
        __init__ = slow(MarkedChat.__init__)
        contents = slow(MarkedChat.contents)

    monkeypatch.setattr(chat_template, "MarkedChat", Slow)
    monkeypatch.setattr(chat_template, "template_spans", slow(template_spans))
    assert len(asyncio.run(chat())["vllm_pyramid_spans"]) == 10
    assert waited == [True] * 3


def test_keys_of_arguments_and_documents_are_content(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(keep_template=None, keep_tools=True)
    monkeypatch.setattr(ServedSettings, "of", lambda config: settings)
    call = {"id": "c1", "function": {"name": "look_up", "arguments": {"of": {"id": "Elbe"}}}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    own = {"documents": [{"title": "Rivers", "text": "The Elbe is long."}]}
    prompt = served(Stub(None), chat, monkeypatch, **own)
    text = prompt["prompt"]
    assert [text[part.start : part.end] for part in prompt["vllm_pyramid_contents"]] == [
        *("Rivers", "The Elbe is long.", "Elbe")
    ]
