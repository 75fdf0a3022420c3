# SPDX-License-Identifier: Apache-2.0
"""Requests with the OpenAI client, to a server that runs with a policy.

    examples/server.sh "$(vllm-pyramid model built-in)"     # in another shell
    python examples/client.py

The first request gets the server's budget, the others choose their own. Each response reports what
it kept.
"""

from __future__ import annotations

import argparse
from typing import Any

import openai

TEXT = "Every attention layer has its own budget and its own block table. " * 60


def show(name: str, answer: Any) -> None:
    """Print what the response reports about its cache."""
    report = answer.kv_transfer_params
    print(
        f"{name}: {report['prompt_tokens']} tokens in the prompt, "
        f"{report['kept_tokens'][0]} kept in the first layer, "
        f"{report['kept_tokens'][-1]} in the last, "
        f"{report['blocks_before']} blocks before, {report['blocks_after']} after"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="none")
    model = client.models.list().data[0].id

    def complete(**settings: Any) -> Any:
        return client.completions.create(
            model=model,
            prompt=TEXT,
            max_tokens=8,
            extra_body={"vllm_xargs": settings} if settings else None,
        )

    show("the server's budget", complete())
    show("half of the prompt ", complete(kv_budget="50%"))
    show("no eviction        ", complete(kv_policy="full"))


if __name__ == "__main__":
    main()
