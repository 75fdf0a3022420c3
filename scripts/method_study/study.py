#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares many methods on the same prompts: one prefill, then each method's kept tokens.

    .venv/bin/python scripts/method_study/study.py MODEL methods.yaml --out FOLDER

An engine computes a prompt again for every policy; here its queries, keys and values are recorded
once, and a continuation is put over what each method keeps of them, in float32. What the answers
are worth is read off the logits: an answer counts as right if each of its tokens is the greedy
choice. It is for finding out what is worth building; `vllm-pyramid eval` measures the engine.

Writes a line of JSON for every prompt, method and budget, and continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from llama import Llama
from methods import Method, Prompt

from vllm_pyramid.eval.haystack import Tokens, load_tokens
from vllm_pyramid.eval.task import Sample
from vllm_pyramid.eval.tasks import load_task

# What a row is about: one with all of these equal is not measured again.
KEY = ("run", "task", "length", "index", "method", "definition", "budget")


def continuation(
    tokens: Tokens, sample: Sample, model: Llama, prompt: Prompt, logits: torch.Tensor
) -> tuple[list[int], int]:
    """The tokens that follow the prompt, and how many of the first are not counted."""
    if sample.follows_full:
        return model.greedy(prompt.caches, logits, sample.max_tokens), 1
    before = sample.prompt + sample.lead
    space = "" if sample.forced or before.endswith((" ", "\n")) else " "
    ids = tokens.encode(before + space + sample.answers[0])
    begun = tokens.encode(before)
    assert ids[: len(begun)] == begun and begun[: prompt.tokens] == prompt.ids, sample.prompt[-50:]
    lead = len(begun) - prompt.tokens
    return ids[prompt.tokens :], lead or 1  # the first comes from the prefill


def measured(
    full: torch.Tensor, logits: torch.Tensor, ids: list[int], skip: int
) -> dict[str, float]:
    """What a method's logits `[n, V]` are worth, beside those of the whole cache.

    Row i says what follows `ids[i]`.
    """
    wanted = torch.tensor(ids[skip:])
    mine, theirs = (x[skip - 1 : -1].log_softmax(dim=-1) for x in (logits, full))
    return {
        "right": float((mine.argmax(-1) == wanted).float().prod()),
        "nats": float(-mine.gather(1, wanted[:, None]).mean()),
        "agreement": float((mine.argmax(-1) == theirs.argmax(-1)).float().mean()),
        "divergence": float((theirs.exp() * (theirs - mine)).sum(-1).mean()),
    }


def prompts(args: argparse.Namespace, tokens: Tokens) -> Iterator[tuple[str, int, int, Sample]]:
    """Every sample, so that all tasks have some after any time: task, length, index, sample."""
    loaded = [load_task(name) for name in args.tasks.split(",")]
    made = {
        (task.name, length): task.samples(tokens, length, args.samples, args.seed)
        for task in loaded
        for length in map(int, args.lengths.split(","))
    }
    for index in range(args.samples):
        for (name, length), samples in made.items():
            yield name, length, index, samples[index]


def main() -> int:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a Llama")
    parser.add_argument("methods", type=Path, help="YAML: label: [policy, {arguments}]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="needle,multi-key,few-shot,quote,second-turn,perplexity")
    parser.add_argument("--lengths", default="2048")
    parser.add_argument("--budgets", default="12%")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    methods = [
        Method.parse(label, preset, arguments)
        for label, (preset, arguments) in yaml.safe_load(args.methods.read_text()).items()
    ]
    for method in methods:
        _ = method.policy
    torch.set_grad_enabled(False)
    model, tokens = Llama(args.model), load_tokens(args.model)
    repeat = tokens.encode("\n\nRepeat the previous context exactly.\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    made = f"{args.model.name}, seed {args.seed}"
    known = set()
    if args.out.exists():
        for line in args.out.read_text().splitlines():
            row = json.loads(line)
            known.add(tuple(row[key] for key in KEY))
    with args.out.open("a") as out:
        for name, length, index, sample in prompts(args, tokens):
            wanted = [
                (method, budget)
                for method in methods
                for budget in (args.budgets.split(",") if method.policy.evicts else ["100%"])
                if (made, name, length, index, method.label, method.definition, budget) not in known
            ]
            if not wanted:
                continue
            begun = time.perf_counter()
            ids = tokens.encode(sample.prompt)
            caches, logits = model.prefill(ids)
            prompt = Prompt(model, ids, caches, repeat)
            following, skip = continuation(tokens, sample, model, prompt, logits)
            full = model.continued(caches, following)
            for method, budget in wanted:
                kept = method.kept(prompt, budget)
                got = full if kept is None else model.continued(caches, following, kept)
                values = (made, name, length, index, method.label, method.definition, budget)
                row = dict(zip(KEY, values, strict=True))
                row |= measured(full, got, following, skip)
                print(json.dumps(row), file=out, flush=True)
            print(name, length, index, f"{time.perf_counter() - begun:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
