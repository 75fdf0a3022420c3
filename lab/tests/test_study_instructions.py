# SPDX-License-Identifier: Apache-2.0
"""The study's task of instructions, and the spans of a chat that it keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from lab.tests.study_scripts import study_scripts
from vllm_pyramid.frontend.chat_template import MarkedChat, template_spans
from vllm_pyramid.tools.eval.haystack import Tokens

pytestmark = pytest.mark.cpu

NAMES = ("own_tasks", "study")
ALSO = (
    *("code_task", "instruction_task", "gates", "methods", "model", "selected", "static_heads"),
    *("gates_meter", "gates_pages", "gates_ridge", "gates_tiles"),
)
LENGTH = 1500


class ChatML:
    """A token for every word, mark and space, and one for each mark of the template."""

    bos_token = None
    chat_template = "stands for one"

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    @staticmethod
    def pieces(text: str) -> list[re.Match[str]]:
        return list(re.finditer(r"<\|im_start\|>|<\|im_end\|>|\w+|[^\w]", text))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self.ids.setdefault(piece[0], len(self.ids)) for piece in self.pieces(text)]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + "<|im_start|>assistant\n" * add_generation_prompt


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with study_scripts(NAMES, ALSO) as found:
        yield found


def test_each_rule_is_applied_behind_the_eviction(modules: dict[str, ModuleType]) -> None:
    tokens, task = Tokens(ChatML()), modules["own_tasks"].load_task("instructions")
    asked = []
    for index in range(8):
        sample = task.numbered(tokens, LENGTH, index, seed=3)
        assert LENGTH - 64 <= tokens.count(sample.prompt) <= LENGTH
        (answer,) = sample.answers
        system, rest = sample.prompt.split("<|im_end|>", 1)
        assert system.count(answer) == 1 and answer not in rest + sample.lead
        assert system.count("description") == 3 and system.count("When ") == 3
        assert sample.lead.count("<|im_start|>user") == 1
        asked.append(sample.lead.rsplit("assistant\n", 1)[1])
    assert len(set(asked[:4])) == 4 and asked[:4] == asked[4:]
    assert sample == task.numbered(tokens, LENGTH, 7, seed=3)
    assert sample.answers != task.numbered(tokens, LENGTH, 7, seed=4).answers
    with pytest.raises(ValueError, match="leave no room for a text"):
        task.numbered(tokens, 200, 0, seed=3)


def test_spans_are_those_of_the_server(modules: dict[str, ModuleType]) -> None:
    """What `--kv-keep template` finds from the template's second rendering."""
    tokenizer: Any = ChatML()
    tokens = Tokens(tokenizer)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How long is the river?"},
        {"role": "assistant", "content": "Long."},
        {"role": "user", "content": "And the other one?"},
    ]
    text, marked = tokens.chat(chat), MarkedChat(chat)
    contents = marked.contents(tokens.chat(marked.conversation), text)
    offsets = [piece.span() for piece in tokenizer.pieces(text)]
    flat = template_spans(contents, offsets, 0)
    wanted = [
        i for start, end in zip(flat[::2], flat[1::2], strict=True) for i in range(start, end)
    ]
    study = modules["study"].Study(None, tokens, "x")
    ids = tokens.encode(text)
    assert study._template(ids, study._messages(ids)) == wanted
    assert study._template(tokens.encode("no chat"), []) == []
