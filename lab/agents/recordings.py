# SPDX-License-Identifier: Apache-2.0
"""Recorded sessions of agents: the file of `--file`, and the tokens of its turns.

A line of the file is a session, a JSON object: its name (`session`), its `messages` as OpenAI's
chat completions have them, and its `tools`. A message may have `wait`, the seconds that its agent
thinks or its tool works. A session that goes on behind the first N messages of an earlier one has
that one's name (`branch_of`), N (`after`), and the messages that follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from lab.agents.replay import Turn
from vllm_pyramid.frontend.chat_template import MarkedChat, template_spans

CHATML = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MARK = "<the answer stands here>"


class Message(BaseModel):
    """A message as clients send it; what is not named here goes to the chat template as it is."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    wait: float = Field(0.0, ge=0, allow_inf_nan=False)

    def rendered(self) -> dict[str, Any]:
        """Return the message as vLLM gives it to a chat template: text, arguments as objects.

        Raises:
            ValueError: a part that is no text, or arguments that are no JSON.
        """
        made = self.model_dump(exclude={"wait"}, exclude_none=True) | {"content": self.text}
        for call in made.get("tool_calls", ()):
            arguments = call["function"].get("arguments") or "{}"
            if isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments)
        return made

    @property
    def text(self) -> str:
        """The message's own text."""
        if isinstance(self.content, list):
            if wrong := [part.get("type") for part in self.content if "text" not in part]:
                raise ValueError(
                    f"a message has a part of type {wrong[0]!r}: only text is replayed"
                )
            return "\n".join(part["text"] for part in self.content)
        return self.content or ""

    @property
    def answer(self) -> str:
        """What the model wrote for it: its text and its tool calls."""
        calls = [json.dumps(call["function"]) for call in self.tool_calls or ()]
        return "\n".join(filter(None, [self.text, *calls]))


class Session(BaseModel):
    """A line of the file."""

    model_config = ConfigDict(extra="forbid")

    session: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    branch_of: str | None = None
    after: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _check_branch(self) -> Session:
        if (self.branch_of is None) != (self.after is None):
            raise ValueError("`branch_of` and `after` go together")
        if self.branch_of is not None and self.tools is not None:
            raise ValueError("a branch has the tools of its session: leave `tools` out")
        if self.branch_of is None and self.messages[0].role == "assistant":
            raise ValueError("a session begins with an answer to nothing")
        return self


@dataclass
class _Path:
    """A session with the messages that it shares with the one it branches from.

    Attributes:
        agent: the session that all of them branch from, and whose tools they have.
        turns: their numbers among the agent's, each with how many messages its prompt has.
        fixed: tokens of a prompt before the first message, if the agent has tools.
    """

    agent: Session
    messages: list[Message]
    turns: list[tuple[int, int]]
    fixed: int


def read_sessions(path: Path) -> list[Session]:
    """Return the sessions of a file, in its order.

    Raises:
        ValueError: the file cannot be read, or a line is wrong; the message names it.
    """
    try:
        # Text may have what splitlines() takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    found: dict[str, Session] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            session = Session.model_validate_json(line)
            _check_place(session, found)
            [(message.rendered(), message.answer) for message in session.messages]
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            said = first["msg"].removeprefix("Value error, ")
            raise ValueError(
                f"{path}, line {number}: {place + ': ' if place else ''}{said}"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = f"a tool call without {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {said}") from None
        found[session.session] = session
    if not found:
        raise ValueError(f"{path} has no sessions")
    return list(found.values())


def _check_place(session: Session, found: dict[str, Session]) -> None:
    if session.session in found:
        raise ValueError(f"there are two sessions {session.session!r}")
    if session.branch_of is not None and session.branch_of not in found:
        raise ValueError(f"branch_of {session.branch_of!r} is no session of an earlier line")


@dataclass(frozen=True)
class Recording:
    """Recorded agents as tokens.

    Attributes:
        agents: the turns of each.
        ends: tokens that end an answer. own_answers: whether prompts have the engine's answers.
        branches: the most turns that an agent ends with: its session's, and those of branches.
    """

    agents: list[list[Turn]]
    ends: list[int]
    own_answers: bool
    branches: int

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(turn.prompt_len for turns in self.agents for turn in turns)

    @property
    def turns(self) -> int:
        """Turns of the longest path."""
        return max(turn.number for turns in self.agents for turn in turns)


def read_recording(
    path: Path, model: str, template: str | None, *, most_agents: int | None, **options: Any
) -> Recording:
    """Return the agents of a file, as tokens of a model.

    Args:
        template: a file, or `chatml`, instead of the model's own.
        most_agents: how many, from the first; None for all. options: see `Tokeniser`.

    Raises:
        ValueError: the file or the template cannot be used.
    """
    from jinja2 import TemplateError
    from transformers import AutoConfig, AutoTokenizer

    sessions = read_sessions(path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if template == "chatml":
        template = CHATML
    elif template is not None:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template: cannot read {template}: {error}") from None
    elif tokenizer.chat_template is None:
        raise ValueError(f"{model!r} has no chat template: give --chat-template, such as chatml")
    try:
        agents = Tokeniser(tokenizer, template, **options).agents(sessions)[:most_agents]
    except TemplateError as error:
        raise ValueError(f"{path}: the chat template refuses a message: {error}") from None
    of_config = getattr(AutoConfig.from_pretrained(model), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(of_config if isinstance(of_config, list) else [of_config])}
    branches = max(len(turns) - len({turn.before for turn in turns} - {None}) for turns in agents)
    return Recording(agents, sorted(ends - {None}), bool(options["own_answers"]), branches)


class Tokeniser:
    """Turns sessions into tokens, as a server would by its chat template.

    Args:
        tokenizer: of Transformers. template: instead of the model's own.
        most_turns: of each path from a session's beginning; None for all.
        output_len: the most tokens of an answer.
        own_answers: whether prompts will have the answers of the engine instead of the recorded.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        *,
        most_turns: int | None,
        output_len: int,
        own_answers: bool,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._most_turns, self._output_len = most_turns, output_len
        self._own_answers = own_answers

    def agents(self, sessions: Sequence[Session]) -> list[list[Turn]]:
        """Return the turns of each agent: of a session, and of all that branch from it.

        Raises:
            ValueError: a branch begins behind its session's end, or a template rewrites what came
                before and prompts are to have the engine's answers.
        """
        paths: dict[str, _Path] = {}
        agents: dict[str, list[Turn]] = {}
        for session in sessions:
            path = paths[session.session] = _path(session, paths)
            turns = agents.setdefault(path.agent.session, [])
            for end in _prompt_ends(path.messages, len(path.messages) - len(session.messages)):
                if len(path.turns) == self._most_turns:
                    break
                turns.append(self._turn(path, end, turns))
                path.turns.append((len(turns) - 1, end))
        return [turns for turns in agents.values() if turns]

    def _turn(self, path: _Path, end: int, turns: Sequence[Turn]) -> Turn:
        """Return the turn whose prompt has the first `end` messages; `turns` are those before."""
        text = self._render(path, path.messages[:end], answer=True)
        prompt = self._encode(text)
        shared, rest, length, begin = 0, prompt, len(prompt), 0
        before = None
        if path.turns:
            before, begin = path.turns[-1]
            earlier = self._render(path, path.messages[:begin], answer=True)
            pairs = zip(self._encode(earlier), prompt, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            rest = prompt[shared:]
            if self._own_answers:
                shared = turns[before].prompt_len
                rest = self._encode(self._behind(path, begin, earlier, text))
                length = shared + turns[before].max_tokens + len(rest)
        most = self._output_len
        if end < len(path.messages):
            most = min(most, len(self._encode(path.messages[end].answer)))
        wait = sum(message.wait for message in path.messages[begin:end])
        if not turns and path.agent.tools:
            path.fixed = self._fixed(path, path.messages[:end], text)
        number = len(path.turns) + 1
        return Turn(number, before, shared, rest, length, max(2, most), wait, path.fixed)

    def _fixed(self, path: _Path, messages: Sequence[Message], text: str) -> int:
        """Return how many tokens of a prompt come before the first message, as servers find it."""
        marked = MarkedChat([message.rendered() for message in messages])
        again = self._apply(path, marked.conversation, answer=True)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = template_spans(marked.contents(again, text), found["offset_mapping"], 0)
        return spans[1] if spans[:1] == [0] else 0

    def _behind(self, path: _Path, begin: int, earlier: str, text: str) -> str:
        """Return what a prompt has behind the answer to the prompt of `begin` messages."""
        answer = Message(role="assistant", content=_MARK, wait=0.0)
        closing = self._render(path, [*path.messages[:begin], answer]).rpartition(_MARK)[2]
        recorded = self._render(path, path.messages[: begin + 1])
        if not (text.startswith(recorded) and recorded.startswith(earlier)):
            raise ValueError(
                f"session {path.agent.session!r}: the chat template rewrites earlier turns, so the "
                "engine's answers cannot stand in the place of the recorded ones: leave "
                "--own-answers out"
            )
        return closing + text[len(recorded) :]

    def _render(self, path: _Path, messages: Sequence[Message], *, answer: bool = False) -> str:
        return self._apply(path, [message.rendered() for message in messages], answer=answer)

    def _apply(self, path: _Path, messages: list[dict[str, Any]], *, answer: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=path.agent.tools,
            chat_template=self._template,
            add_generation_prompt=answer,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _path(session: Session, paths: Mapping[str, _Path]) -> _Path:
    """Return a session's messages, and the turns of earlier sessions that it has too."""
    if session.branch_of is None:
        return _Path(session, list(session.messages), [], 0)
    base, after = paths[session.branch_of], session.after
    assert after is not None
    if after > len(base.messages):
        raise ValueError(
            f"session {session.session!r} goes on behind {after} messages of "
            f"{session.branch_of!r}, which has {len(base.messages)}"
        )
    turns = [(turn, end) for turn, end in base.turns if end < after]  # whose answers it has
    return _Path(base.agent, [*base.messages[:after], *session.messages], turns, base.fixed)


def _prompt_ends(messages: Sequence[Message], known: int) -> list[int]:
    """Return how many messages each prompt has: those before an answer, or all if the last is none.

    Args:
        known: messages whose turns are another session's.
    """
    ends = [i for i, one in enumerate(messages) if one.role == "assistant" and i >= known]
    return ends if messages[-1].role == "assistant" else [*ends, len(messages)]
