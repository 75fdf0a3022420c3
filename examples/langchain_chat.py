# SPDX-License-Identifier: Apache-2.0
"""LangChain's chat model with a budget for each chain (pip install langchain-openai).

    examples/server.sh "$(vllm-pyramid model built-in)"     # in another shell
    python examples/langchain_chat.py

Settings of a request go into `extra_body`. LangChain does not pass on what a response reports of
its cache; the OpenAI client does (client.py).
"""

from __future__ import annotations

import argparse
import os

import openai
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

TEXT = "Every attention layer has its own budget and its own block table. " * 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    model = openai.OpenAI(base_url=args.base_url, api_key=key).models.list().data[0].id
    for budget in ("12%", "50%"):
        chat = ChatOpenAI(
            model=model,
            base_url=args.base_url,
            api_key=SecretStr(key),
            max_completion_tokens=16,
            extra_body={"vllm_xargs": {"kv_budget": budget}, "cache_salt": f"chain {budget}"},
        )
        answer = chat.invoke([("system", TEXT), ("human", "What has a budget of its own?")])
        used = answer.usage_metadata
        assert used is not None, "the server counts tokens"
        print(f"budget {budget}: {used['input_tokens']} tokens in the prompt")


if __name__ == "__main__":
    main()
