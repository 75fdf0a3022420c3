# SPDX-License-Identifier: Apache-2.0
r"""Convert logs of chats or requests to recorded sessions, for `python -m lab.agents --file FILE`.

    python -m lab.agents.convert LOG.jsonl sessions.jsonl
    python -m lab.agents.convert requests.jsonl sessions.jsonl --messages body.messages \
        --answer response.choices.0.message --tools body.tools

The log is JSON lines, or a JSON array, or an object with an array in it (--records). A record has
OpenAI's messages: of a whole session, or of a request. A request that begins with all messages of
a session goes on with it, and one that leaves it behind an answer branches from it. Everything
else is a session of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.agents.recordings import read_sessions

Messages = list[dict[str, Any]]


@dataclass
class _Session:
    """A session under way: its line, its tools, and all its messages, shared ones included."""

    line: dict[str, Any]
    tools: Any
    messages: Messages


def at(record: Any, path: str) -> Any:
    """Return what is at a path such as `response.choices.0.message`; None where there is none."""
    for part in path.split("."):
        if isinstance(record, list) and part.isdigit() and int(part) < len(record):
            record = record[int(part)]
        elif isinstance(record, dict):
            record = record.get(part)
        else:
            return None
    return record


def records(text: str, path: str | None) -> list[Any]:
    """Return the records of a log.

    Raises:
        ValueError: it is no JSON, or has no array there.
    """
    if path is None and not text.lstrip().startswith("["):
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    found = json.loads(text) if path is None else at(json.loads(text), path)
    if not isinstance(found, list):
        raise ValueError(f"--records {path}: there is no array")
    return found


def _said(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return what counts of a message: responses have keys that clients do not send back."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return message.get("role"), message.get("content") or "", calls, message.get("tool_call_id")


def common(one: Messages, other: Messages) -> int:
    """Return how many messages two lists begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    least = min(len(one), len(other))
    return next((i for i, (a, b) in pairs if _said(a) != _said(b)), least)


def convert(log: list[Any], names: str | None, messages: str, answer: str, tools: str) -> list[Any]:
    """Return the lines of the sessions; arguments are paths in a record.

    Raises:
        ValueError: a record has no messages.
    """
    sessions: list[_Session] = []
    for number, record in enumerate(log):
        found = at(record, messages)
        if not isinstance(found, list) or not found:
            raise ValueError(f"record {number} has no messages at {messages!r}")
        last = at(record, answer)
        said = {"role": "assistant", "content": last} if isinstance(last, str) else last
        all_messages: Messages = [
            {name: value for name, value in message.items() if value is not None}
            for message in [*found, *([said] if said else [])]
        ]
        own = at(record, tools)
        alike = [session for session in sessions if session.tools == own]
        best = max(alike, key=lambda one: common(one.messages, all_messages), default=None)
        same = common(best.messages, all_messages) if best else 0
        if best and same == len(best.messages):
            best.line["messages"] += all_messages[same:]
            best.messages = all_messages
            continue
        if same == len(all_messages):
            continue  # said before
        name = str((at(record, names) if names else None) or f"session-{len(sessions) + 1}")
        if any(one.line["session"] == name for one in sessions):
            name = f"{name}-{len(sessions) + 1}"
        line: dict[str, Any] = {"session": name}
        if best and any(message["role"] == "assistant" for message in all_messages[:same]):
            line |= {"branch_of": best.line["session"], "after": same}
            line["messages"] = all_messages[same:]
        else:
            line |= ({"tools": own} if own else {}) | {"messages": list(all_messages)}
        sessions.append(_Session(line, own, all_messages))
    return [session.line for session in sessions]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--records", metavar="PATH", help="of the array in a JSON object: cases")
    parser.add_argument("--messages", metavar="PATH", default="messages", help="in a record")
    parser.add_argument(
        "--answer", metavar="PATH", default="answer", help="to the messages, if any"
    )
    parser.add_argument("--tools", metavar="PATH", default="tools", help="if any")
    parser.add_argument("--name", metavar="PATH", help="of the session, if any")
    args = parser.parse_args()
    try:
        log = records(args.log.read_text(encoding="utf-8"), args.records)
        lines = convert(log, args.name, args.messages, args.answer, args.tools)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        args.output.write_text(text, encoding="utf-8")
        sessions = read_sessions(args.output)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    turns = sum(m.role == "assistant" for session in sessions for m in session.messages)
    print(f"{len(log)} records: {len(sessions)} sessions with {turns} answers in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
