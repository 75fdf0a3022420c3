#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A scorer of your own, offline: what docs/write_a_method.md serves, and which tokens it kept.

python examples/own_scorer.py MODEL
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

CLASS = '''
from vllm_pyramid.policy.scorer import Scorer


class NormScorer(Scorer):
    """The norm of a key, plus `weight` times the norm of its value."""

    weight: float = 1.0

    def score(self, inputs):
        return inputs.keys.norm(dim=-1) + self.weight * inputs.values.norm(dim=-1)
'''
POLICY = """
budget: 25%
window: 8
sinks: 4
scorer: {kind: "my_methods:NormScorer", weight: 0.5}
allocator: arithmetic
"""


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_methods.py").write_text(CLASS)
        (folder / "norms.yaml").write_text(POLICY)
        # Here and in the processes that the engine starts.
        sys.path.insert(0, name)
        os.environ["PYTHONPATH"] = os.pathsep.join([name, os.environ.get("PYTHONPATH", "")])

        from vllm import SamplingParams

        from vllm_pyramid import LLM

        llm = LLM(
            model,
            kv_policy=str(folder / "norms.yaml"),
            kv_trace=str(folder / "traces"),
            max_model_len=2048,
            enforce_eager=True,
        )
        text = "The archive holds the letters of three generations. " * 30
        output = llm.generate([text], SamplingParams(max_tokens=8), use_tqdm=False)[0]
        report = output.kv_transfer_params
        print(f"prompt {report['prompt_tokens']} tokens, kept by layer: {report['kept_tokens']}")
        (trace,) = (folder / "traces").glob("*.npz")
        with np.load(trace) as arrays:
            print(f"layer 0, KV head 0 kept the positions {arrays['kept_0'][0].tolist()}")


if __name__ == "__main__":
    main(sys.argv[1])
