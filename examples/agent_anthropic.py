# SPDX-License-Identifier: Apache-2.0
"""The agent of agent_openai.py with the Anthropic client, against the same server.

    examples/server.sh MODEL --enable-auto-tool-choice --tool-call-parser hermes   # another shell
    python examples/agent_anthropic.py

vLLM answers `/v1/messages`. The client's URL is the server's root, without /v1.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import anthropic
from agent_tools import MOST_CALLS, SYSTEM, TASKS, TOOLS, call_tool, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000")
    parser.add_argument("--session", default="agent-anthropic")
    args = parser.parse_args()
    key = os.environ.get("ANTHROPIC_AUTH_TOKEN", "none")  # vLLM reads no x-api-key
    headers = {"X-KV-Session": args.session}
    client = anthropic.Anthropic(base_url=args.base_url, auth_token=key, default_headers=headers)
    model = client.models.list().data[0].id
    tools: Any = [
        {
            "name": tool["name"],
            "description": tool["description"],
            "input_schema": tool["schema"],
        }
        for tool in TOOLS
    ]
    messages: list[Any] = []
    turn = 0
    for task in TASKS:
        messages.append({"role": "user", "content": task})
        for _ in range(MOST_CALLS):
            answer: Any = client.messages.create(
                model=model,
                system=SYSTEM,
                messages=messages,
                tools=tools,
                max_tokens=64,
                extra_body={"temperature": 0},
            )
            calls = [block for block in answer.content if block.type == "tool_use"]
            show(turn := turn + 1, answer.kv_transfer_params, len(calls))
            messages.append(
                {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
            )
            if not calls:
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": call_tool(call.name, call.input),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    main()
