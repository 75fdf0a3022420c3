#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far into the hidden number an answer is right: the digits table of docs/quality.md.

    scripts/needle_digits.py eval-results --policies full,snapkv --budgets 12% --seeds 0,1,2

Reads the answers that `vllm-pyramid eval` has left in the folder for the same model, policies,
budgets, samples and seeds; runs nothing.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_pyramid.demo import model_path
from vllm_pyramid.eval.haystack import load_tokens
from vllm_pyramid.eval.run import Run, Settings, Store
from vllm_pyramid.eval.tasks import load_task
from vllm_pyramid.eval.words import DIGITS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="--out of vllm-pyramid eval")
    parser.add_argument("--model", default=str(model_path()), help="default: the built-in model")
    parser.add_argument("--policies", required=True)
    parser.add_argument("--budgets", required=True)
    parser.add_argument("--task", choices=("needle", "multi-key"), default="needle")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--seeds", default="0")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    settings = Settings(
        model=options.model,
        policies=tuple(options.policies.split(",")),
        budgets=tuple(options.budgets.split(",")),
        tasks=(load_task(options.task),),
        lengths=(options.length,),
        samples=options.samples,
        seeds=tuple(map(int, options.seeds.split(","))),
    )
    right: dict[tuple[str, str], list[int]] = {}
    with closing(Store(options.folder / "samples.jsonl")) as store:
        for answer in Run(settings, load_tokens(options.model)).answers(store):
            number = answer.sample.answers[0]
            pairs = zip(number, answer.result.text.strip(), strict=False)
            digits = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            right.setdefault((answer.policy, answer.budget), []).append(digits)
    table = Table("policy", "budget", *(f"first {n}" for n in range(1, DIGITS + 1)))
    for (policy, budget), found in right.items():
        shares = [sum(digits >= n for digits in found) / len(found) for n in range(1, DIGITS + 1)]
        table.add_row(policy, budget, *(f"{share:.2f}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
