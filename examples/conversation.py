# SPDX-License-Identifier: Apache-2.0
"""A conversation with the OpenAI client: each turn resumes what the turns before it kept.

    examples/server.sh "$(vllm-pyramid model built-in)"     # in another shell
    python examples/conversation.py

`kv_session` names the conversation: the server remembers where the prompts of its turns ended.
Prompts are then evicted where each turn ended, and the kept tokens are found again. `kv_turns` of a
response lists these places; a client could also send it with the next turn, in place of a name.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

TEXT = "Every attention layer has its own budget and its own block table. " * 60
QUESTIONS = ("What has a budget of its own?", "And what else?", "Who shares it?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    client = openai.OpenAI(base_url=args.base_url, api_key=key)
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": TEXT}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        # A salt keeps this conversation apart, and lets the report say what was found.
        settings = {"vllm_xargs": {"kv_session": "example"}, "cache_salt": "conversation.py"}
        answer: Any = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=32,
            temperature=0,
            extra_body=settings,
        )
        report = answer.kv_transfer_params
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        print(
            f"turn {len(report['kv_turns'])}: {report['prompt_tokens']} tokens in the prompt, "
            f"{report['resumed_tokens']} resumed, {sum(report['kept_tokens'])} kept in "
            f"{len(report['kept_tokens'])} layers"
        )


if __name__ == "__main__":
    main()
