# SPDX-License-Identifier: Apache-2.0
"""The Python interface: two prompts, two budgets, and a trace of what was kept.

python examples/offline.py [--model MODEL] [--trace traces]
python examples/plot_trace.py traces
"""

from __future__ import annotations

import argparse

from vllm import SamplingParams

from vllm_pyramid import LLM
from vllm_pyramid.tools.demo import model_path

PROMPTS = [
    "The policy keeps many tokens in low layers and few in high ones. " * 40,
    "The blocks in front are freed, and other requests use them. " * 60,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="default: the built-in model")
    parser.add_argument("--trace", default="traces", help="folder for the trace")
    args = parser.parse_args()

    llm = LLM(
        args.model,
        kv_policy="pyramidkv",
        kv_budget="12%",
        kv_trace=args.trace,
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
    )
    # The engine's budget for the first prompt, its own for the second.
    sampling = [
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=8, extra_args={"kv_budget": 64}),
    ]
    for output in llm.generate(PROMPTS, sampling, use_tqdm=False):
        report = output.kv_transfer_params
        print(f"answer: {output.outputs[0].text!r}")
        print(f"  of {report['prompt_tokens']} tokens each layer keeps {report['kept_tokens']}")
        print(f"  blocks: {report['blocks_before']} before, {report['blocks_after']} after")


if __name__ == "__main__":
    main()
