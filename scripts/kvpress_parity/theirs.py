#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvpress's side: runs the same prompts through its presses, writes what every head kept.

    KVPRESS_ENVIRONMENT/bin/python scripts/kvpress_parity/theirs.py --out FOLDER

Reads the cases that `ours.py` has written; runs in an environment with kvpress 0.5.5 and
transformers 4.57. The presses are kvpress's own, unchanged; two numbers are chosen for them, so
that the selection is compared and not the arithmetic of budgets:

- `compression_ratio` is set half a token above the budget's share, because the presses truncate
  `prompt * (1 - compression_ratio)`, which a rounding error could take below the whole number;
- PyramidKVPress is asked for our number of tokens of each layer. It also runs with its own.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import FULL, POLICIES, PUBLISHED, Cases, Prompt, counts_key, key, theirs_file
from kvpress import BasePress, PyramidKVPress, SnapKVPress, StreamingLLMPress
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

KVPRESS = "0.5.5"
Arrays = dict[str, np.ndarray]


class Recorder:
    """Notes which positions a press keeps, without touching what it does.

    `compress` picks rows of keys and values by the same indices. It is called once as it is, and
    once more with every value row replaced by its position: what comes back are the indices.

    Attributes:
        kept: `[KV heads, kept]` int32 a layer, ascending. scores: `[KV heads, prompt]` a layer.
    """

    def __init__(self, press: BasePress) -> None:
        self.kept: dict[int, np.ndarray] = {}
        self.scores: dict[int, np.ndarray] = {}
        self._compress, self._score = press.compress, press.score
        press.compress, press.score = self.compress, self.score

    def score(self, module: Any, *args: Any) -> torch.Tensor:
        scores = self._score(module, *args)
        self.scores[module.layer_idx] = scores[0].float().numpy()
        return scores

    def compress(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = self._compress(module, hidden_states, keys, values, attentions, kwargs)
        positions = torch.arange(keys.shape[2])[None, None, :, None].expand(values.shape)
        _, kept = self._compress(module, hidden_states, keys, positions, attentions, kwargs)
        for cache, compressed in zip((keys, values), result, strict=True):
            if not torch.equal(cache.gather(2, kept), compressed):
                raise RuntimeError("the press kept other rows than the positions that it named")
        self.kept[module.layer_idx] = kept[0, :, :, 0].sort(-1).values.int().numpy()
        return result


def load_model(path: str, dtype: str) -> Any:
    """The model on the CPU, with the rotary base that its configuration names.

    transformers 5 writes the base into `rope_parameters`, which 4.57 does not read: it would take
    its default without a word.

    Raises:
        ValueError: 4.57 reads another rotary embedding than 5 does.
    """
    config = AutoConfig.from_pretrained(path)
    raw = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    rope = raw.get("rope_parameters") or {}
    wanted = rope.get("rope_theta", config.rope_theta)
    if wanted != config.rope_theta:
        raise ValueError(
            f"{path}/config.json has rope_theta {wanted} in rope_parameters, but transformers 4 "
            f'reads {config.rope_theta}: write "rope_theta": {wanted} beside rope_parameters'
        )
    if rope.get("rope_type", "default") != "default" and not config.rope_scaling:
        raise ValueError(
            f"{path}/config.json scales its rotary embedding in rope_parameters alone, which "
            "transformers 4 does not read: write rope_scaling beside it"
        )
    # Eager attention would mask by the first layer's length; the presses then differ by layer.
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()


def make_press(cases: Cases, policy: str, prompt: Prompt, percent: float) -> Any:
    """The press for a policy of ours, or for `PUBLISHED`."""
    length, budget = len(prompt.token_ids), cases.budget(prompt, percent)
    ratio = 1 - (budget + 0.5) / length
    if policy == "streaming-llm":
        return StreamingLLMPress(compression_ratio=ratio, n_sink=cases.sinks)
    window = {"window_size": cases.window, "kernel_size": cases.kernel_size}
    if policy == "snapkv":
        return SnapKVPress(compression_ratio=ratio, **window)
    # Its formula rounds instead of truncating, and takes the budget without the half token.
    press = PyramidKVPress(compression_ratio=1 - budget / length, beta=cases.beta, **window)
    if policy == "pyramidkv":
        counts = cases.layer_counts[counts_key(percent, prompt)]
        press.get_layer_budget = lambda module, q_len: counts[module.layer_idx]
    return press


def counts_by_beta(cases: Cases, model: Any, prompt: Prompt, budget: int) -> np.ndarray:
    """What PyramidKVPress's own formula gives with the beta that expresses ours: `[layers]` int32.

    Its arithmetic sequence includes the window, ours comes on top of it. The top layers agree when
    budget / beta' = window + (budget - window) / beta, and with them the whole sequence.
    """
    beta = budget / (cases.window + (budget - cases.window) / cases.beta)
    length = len(prompt.token_ids)
    press = PyramidKVPress(1 - budget / length, cases.window, cases.kernel_size, beta=beta)
    layers = [layer.self_attn for layer in model.model.layers]
    return np.array([press.get_layer_budget(layer, length) for layer in layers], dtype=np.int32)


@torch.inference_mode()
def generate(
    model: Any, prompt: Prompt, max_tokens: int, press: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens, and by how much the best logit led the second: `[max_tokens]` each.

    As kvpress's pipeline does it: the press is in force for the prompt alone, and new tokens stand
    at their true positions, whatever was evicted.
    """
    cache = DynamicCache()
    ids = torch.tensor([prompt.token_ids])
    if press is None:
        output = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    else:
        with press(model):
            output = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    tokens, margins = [], []
    for step in range(max_tokens):
        best = output.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        if step + 1 < max_tokens:
            output = model(
                input_ids=torch.tensor([[tokens[-1]]]),
                past_key_values=cache,
                position_ids=torch.tensor([[ids.shape[1] + step]]),
            )
    return np.array(tokens, dtype=np.int32), np.array(margins, dtype=np.float32)


def run_policy(cases: Cases, model: Any, policy: str) -> Arrays:
    """All prompts with all budgets through one kind of press."""
    arrays: Arrays = {}
    for percent in cases.percents if policy != FULL else [100.0]:
        for prompt in cases.prompts:
            press, recorder = None, None
            if policy != FULL:
                press = make_press(cases, policy, prompt, percent)
                recorder = Recorder(press)
            tokens, margins = generate(model, prompt, cases.max_tokens, press)
            arrays[key(policy, percent, prompt, "tokens")] = tokens
            arrays[key(policy, percent, prompt, "margins")] = margins
            if recorder is None:
                continue
            for layer, kept in recorder.kept.items():
                arrays[key(policy, percent, prompt, f"kept_{layer}")] = kept
            if policy == "pyramidkv":
                by_beta = counts_by_beta(cases, model, prompt, cases.budget(prompt, percent))
                arrays[key(policy, percent, prompt, "by_beta")] = by_beta
            # They do not depend on the budget: those of the first are enough.
            if policy == "snapkv" and percent == cases.percents[0]:
                for layer, scores in recorder.scores.items():
                    arrays[key(policy, 0, prompt, f"scores_{layer}")] = scores
    return arrays


def main() -> None:
    """Run every press and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder given to ours.py")
    args = parser.parse_args()
    if version("kvpress") != KVPRESS:
        raise ValueError(f"the comparison is with kvpress {KVPRESS}, not {version('kvpress')}")
    cases = Cases.read(args.out)
    model = load_model(cases.model, cases.dtype)
    for policy in (FULL, *POLICIES, PUBLISHED):
        file = args.out / theirs_file(policy)
        if not file.is_file():
            start = time.perf_counter()
            arrays = run_policy(cases, model, policy)
            partial = file.with_suffix(".part.npz")
            np.savez_compressed(partial, **arrays)
            partial.rename(file)
            print(f"kvpress: {policy}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
