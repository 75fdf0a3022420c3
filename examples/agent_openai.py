# SPDX-License-Identifier: Apache-2.0
"""An agent with tools that uses the OpenAI client; its session resumes what earlier turns kept.

    examples/server.sh MODEL --enable-auto-tool-choice --tool-call-parser hermes   # another shell
    python examples/agent_openai.py

`X-KV-Session` names the session, so nothing else of the loop differs from that of any agent. The
parser depends on the model (hermes: Qwen's), and its chat template has to know tools.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import openai
from agent_tools import MOST_CALLS, SYSTEM, TASKS, TOOLS, call_tool, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--session", default="agent-openai")
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    headers = {"X-KV-Session": args.session}
    client = openai.OpenAI(base_url=args.base_url, api_key=key, default_headers=headers)
    model = client.models.list().data[0].id
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["schema"],
            },
        }
        for tool in TOOLS
    ]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    turn = 0
    for task in TASKS:
        messages.append({"role": "user", "content": task})
        for _ in range(MOST_CALLS):
            answer: Any = client.chat.completions.create(
                model=model, messages=messages, tools=tools, max_tokens=64, temperature=0
            )
            said = answer.choices[0].message
            calls = said.tool_calls or []
            show(turn := turn + 1, answer.kv_transfer_params, len(calls))
            messages.append(
                {
                    "role": "assistant",
                    "content": said.content or "",
                    **({"tool_calls": [call.model_dump() for call in calls]} if calls else {}),
                }
            )
            if not calls:
                break
            for call in calls:
                result = call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
