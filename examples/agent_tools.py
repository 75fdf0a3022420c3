# SPDX-License-Identifier: Apache-2.0
"""What the two agents of agent_openai.py and agent_anthropic.py can do, and what they are asked.

The tools look at the files of a small station that is held in memory; nothing of this machine is
read.
"""

from __future__ import annotations

import json
from typing import Any

FILES = {
    "station/averages.py": "def hourly(samples):\n    hours = {}\n    for time, value in samples:\n"
    "        hours.setdefault(time // 3600, []).append(value)\n    return hours\n",
    "station/sensors.py": "OFF = -999.0\n\n\ndef read_all(bus, names):\n"
    "    return [(name, bus.read(name)) for name in names]\n",
}
RULES = "Read a file before you speak about it, and name the line. " * 30
SYSTEM = f"You look after the program of a weather station and have tools for its files. {RULES}"
TASKS = (
    "Which file makes averages, and does it return them?",
    "Does a sensor that is switched off get into the averages?",
    "Say in one sentence what you would change.",
)
MOST_CALLS = 4  # turns with calls of tools in one task: then the next task comes


def _tool(name: str, what: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": what, "schema": schema | {"additionalProperties": False}}


TOOLS = (
    _tool("list_files", "List all files of the station.", {}),
    _tool(
        "read_file",
        "Read a file of the station.",
        {"path": {"type": "string", "enum": list(FILES)}},
    ),
)


def call_tool(name: str, arguments: str | dict[str, Any]) -> str:
    """Return a tool's result; what a model got wrong is said to it and ends nothing."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        if name == "list_files":
            return "\n".join(FILES)
        if name == "read_file":
            return FILES[given["path"]]
    except (ValueError, KeyError, TypeError) as error:
        return f"the call is wrong: {error!r}"
    return f"there is no tool {name!r}"


def show(turn: int, report: dict[str, Any], calls: int) -> None:
    """Print what the server says of a turn's cache."""
    print(
        f"turn {turn}: {report['prompt_tokens']} tokens in the prompt, "
        f"{sum(report['kept_tokens']) // len(report['kept_tokens'])} kept in a layer, "
        f"{len(report['kv_turns'])} turns in the session, {calls} tool calls"
    )
