# SPDX-License-Identifier: Apache-2.0
"""Learn which tokens of a chat its template has written, where vLLM renders it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from vllm.exceptions import VLLMValidationError
from vllm.renderers import hf
from vllm.renderers.hf import HfRenderer
from vllm.tokenizers.registry import tokenizer_args_from_config
from vllm.utils.async_utils import make_async

from vllm_pyramid.compat.wrap import wrap

# Keys of vLLM's prompts: where messages are in the text, and the spans of tokens to keep.
_CONTENTS, _SPANS = "vllm_pyramid_contents", "vllm_pyramid_spans"
_NEEDS_OFFSETS = (
    "needs a fast tokenizer, which says where its tokens are in the text, and this model's is none"
)


class MarkedChat(Protocol):
    """A chat whose texts are marked."""

    @property
    def conversation(self) -> list[Any]: ...
    @property
    def documents(self) -> Any: ...

    def contents(self, marked: str, text: str) -> list[Any]:
        """Return where messages are in `text`, from the rendering of `conversation`."""


class ChatSpans(Protocol):
    """What the front end does with a chat."""

    def wanted(self, config: Any, tools: bool) -> bool:
        """Return whether an engine keeps the templates of chats with, or without, tools."""

    def give_up(self, config: Any, error: Exception) -> None:
        """Go on without spans; raise the error if the engine must have them."""

    def mark(self, conversation: Sequence[Any], documents: Any) -> MarkedChat:
        """Return the chat with its texts marked."""

    def spans(
        self, config: Any, contents: Sequence[Any], offsets: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Return the spans to keep, from the characters of each token."""


class Template(NamedTuple):
    """The spans of a chat's template, and the tokens of the whole prompt."""

    spans: list[int]
    prompt_tokens: int


def template_of(prompt: Any) -> Template | None:
    """Return the template of a prompt that vLLM has rendered; None if its spans are not kept."""
    if not isinstance(prompt, Mapping) or _SPANS not in prompt:
        return None
    return Template(prompt[_SPANS], len(prompt["prompt_token_ids"]))


def why_no_renderer(model_config: Any) -> str | None:
    """Return why the chats of a model are not rendered by a template that can be asked twice."""
    if model_config.skip_tokenizer_init:
        return "the server has no tokenizer (--skip-tokenizer-init)"
    if model_config.hf_config.model_type == "gpt_oss":
        return "chats of this model are rendered without a template (Harmony)"
    mode, *_ = tokenizer_args_from_config(model_config)
    if mode != "hf":
        return f"chats of this model are rendered without a template of Transformers ({mode!r})"
    if model_config.enable_prompt_embeds:
        return "prompts may hold embeddings (--enable-prompt-embeds), which are no text"
    return None


def install(spans: ChatSpans) -> None:
    """Wrap the renderer of templates so that its prompts have spans. Idempotent."""

    def new_init(init: Any, self: Any, config: Any, tokenizer: Any) -> None:
        init(self, config, tokenizer)
        if spans.wanted(config, tools=False) and not self._can_produce_offsets():
            raise ValueError(f"--kv-keep {_NEEDS_OFFSETS}: leave the flag out")

    def new_warmup(warmup: Any, self: Any, chat_params: Any) -> None:
        if spans.wanted(self.config, tools=False):  # as text, like requests, and not as tokens
            own = chat_params.chat_template_kwargs | {"tokenize": False}
            chat_params = dataclasses.replace(chat_params, chat_template_kwargs=own)
        warmup(self, chat_params)

    def text_of(self: Any, prompt: Any) -> str:
        """Return the text of a prompt whose tokens can be found in it."""
        if not self._can_produce_offsets():
            raise VLLMValidationError(f"--kv-keep {_NEEDS_OFFSETS}", parameter="messages")
        if prompt.get("multi_modal_data") or not isinstance(prompt.get("prompt"), str):
            raise VLLMValidationError(
                "--kv-keep does not go with images or other inputs that are no text yet: send "
                "text, or start the server without --kv-keep",
                parameter="messages",
            )
        text: str = prompt["prompt"]
        tokens, tokenizer = self.default_chat_tok_params.max_input_tokens, self.get_tokenizer()
        if tokens is not None and len(text) > (most := tokens * tokenizer.max_chars_per_token):
            raise VLLMValidationError(
                f"--kv-keep: the chat has {len(text)} characters, and {tokens} tokens have at most "
                f"{most}: send a shorter chat",
                parameter="messages",
            )
        return text

    @contextmanager
    def giving_up(config: Any) -> Iterator[None]:
        """Go on without spans where something refuses them, unless the engine must have them."""
        try:
            yield
        except (VLLMValidationError, RecursionError, TimeoutError) as error:
            spans.give_up(config, error)

    def begin(self: Any, prompt: Any, params: Any) -> str | None:
        """Return a chat's text; None if its spans are not kept."""
        if spans.wanted(self.config, tools=bool(params.chat_template_kwargs.get("tools"))):
            with giving_up(self.config):
                return text_of(self, prompt)
        return None

    def render_messages(render: Any, self: Any, messages: Any, params: Any) -> Any:
        rendered: Any = render(self, messages, params)
        conversation, prompt = rendered
        if (text := begin(self, prompt, params)) is not None:
            own = params.get_apply_chat_template_kwargs()
            model, tokenizer = self.model_config, self.get_tokenizer()
            with giving_up(self.config):
                marked = spans.mark(conversation, own.get("documents"))
                own["documents"] = marked.documents
                again = hf.safe_apply_chat_template(model, tokenizer, marked.conversation, **own)
                prompt[_CONTENTS] = marked.contents(str(again), text)
        return conversation, prompt

    async def render_messages_async(render: Any, self: Any, messages: Any, params: Any) -> Any:
        rendered: Any = await render(self, messages, params)
        conversation, prompt = rendered
        if (text := begin(self, prompt, params)) is not None:
            own = params.get_apply_chat_template_kwargs()
            model, tokenizer = self.model_config, self.get_tokenizer()
            with giving_up(self.config):  # long chats take time, which other requests need
                mark = make_async(spans.mark, self._executor)
                marked = await mark(conversation, own.get("documents"))
                own["documents"] = marked.documents
                rendering = self._apply_chat_template_async
                made = rendering(model, tokenizer, marked.conversation, **own)
                again = str(await self._render_with_timeout(made))
                found = make_async(marked.contents, self._executor)
                prompt[_CONTENTS] = await found(again, text)
        return conversation, prompt

    def new_wants_offsets(wants_offsets: Any, self: Any, prompt: Any, params: Any) -> Any:
        return _CONTENTS in prompt or wants_offsets(self, prompt, params)

    def add_spans(self: Any, prompt: Any, engine_input: Any) -> None:
        offsets, tokens = prompt["prompt_token_offsets"], prompt["prompt_token_ids"]
        with giving_up(self.config):
            if len(offsets) != len(tokens):
                raise VLLMValidationError(
                    f"--kv-keep: the prompt was changed to {len(tokens)} tokens behind its "
                    f"tokenizer, which made {len(offsets)}: do not pad prompts",
                    parameter="messages",
                )
            engine_input[_SPANS] = spans.spans(self.config, prompt[_CONTENTS], offsets)

    def process_tokens(process: Any, self: Any, prompt: Any, **kwargs: Any) -> Any:
        engine_input = process(self, prompt, **kwargs)
        if _CONTENTS in prompt:
            add_spans(self, prompt, engine_input)
        return engine_input

    async def process_tokens_async(process: Any, self: Any, prompt: Any, **kwargs: Any) -> Any:
        engine_input = await process(self, prompt, **kwargs)
        if _CONTENTS in prompt:
            await make_async(add_spans, self._executor)(self, prompt, engine_input)
        return engine_input

    new: dict[str, Any] = {
        "__init__": new_init,
        "warmup": new_warmup,
        "render_messages": render_messages,
        "render_messages_async": render_messages_async,
        "_wants_offsets": new_wants_offsets,
        "_process_tokens": process_tokens,
        "_process_tokens_async": process_tokens_async,
    }
    for name, function in new.items():
        wrap(HfRenderer, name, function)
