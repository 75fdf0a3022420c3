#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far our policies and kvpress's presses keep the same tokens and give the same answers.

    python scripts/kvpress_parity/compare.py --out FOLDER

Agreement of a KV head is |ours ∩ theirs| / |theirs| over all prompts of a budget. Where a token is
kept by one side only, its distance from the cut says why: the relative difference of its score from
the lowest score that kvpress kept. Distances of the size of float32's rounding are ties.

Ends with status 1 if, where the definitions match, a head agrees by less than --threshold, or both
kept the same and yet the answers differ although kvpress's best logit led by more than --max-lead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from cases import (
    AGREEMENT,
    FULL,
    POLICIES,
    PUBLISHED,
    SCORED,
    Cases,
    key,
    ours_file,
    theirs_file,
)
from rich.console import Console
from rich.table import Table

Arrays = dict[str, np.ndarray]


@dataclass
class Agreement:
    """One policy and budget.

    Attributes:
        matched: whether the definitions are the same, so that the selections should be.
        mean: agreement over all heads. heads: `[layers][KV heads]`, each over all prompts.
        next_head: the same as `mean` with kvpress's next KV head of the layer instead: what would
            come out if heads did not matter. 1 where a policy keeps the same for all heads.
        lowest: of a single head of a single prompt. differing: tokens of theirs that ours lack, of
            `tokens`, those that theirs kept.
        shared: |ours ∩ theirs| / min(|ours|, |theirs|): 1 where one selection holds the other.
        ours_kept, theirs_kept: tokens a layer, mean over the prompts.
        by_beta: largest difference between our tokens of a layer and those of PyramidKVPress's
            formula with the beta that expresses ours (pyramidkv only).
        farthest: largest distance from the cut of a token kept by one side only; 0 without any.
        answers: prompts whose greedy tokens are all equal, of `prompts`. first_tokens: whose first.
        equal_tokens: mean number of tokens before the first difference.
        lead: the largest lead of kvpress's best logit at a first difference; 0 without any.
    """

    policy: str
    percent: float
    matched: bool
    prompts: int
    mean: float
    next_head: float
    heads: list[list[float]]
    lowest: float
    differing: int
    tokens: int
    shared: float
    ours_kept: list[float]
    theirs_kept: list[float]
    answers: int
    first_tokens: int
    equal_tokens: float
    lead: float
    farthest: float = 0.0
    by_beta: int | None = None


def compare(cases: Cases, ours: Arrays, theirs: Arrays, policy: str, percent: float) -> Agreement:
    """All prompts, layers and heads of one policy and budget."""
    mine = "pyramidkv" if policy == PUBLISHED else policy
    layers = sum(name.startswith(key(mine, percent, cases.prompts[0], "kept_")) for name in ours)
    heads = ours[key(mine, percent, cases.prompts[0], "kept_0")].shape[0]
    # Over the prompts: tokens of theirs, of the smaller selection, and in both.
    total, smaller, both, other = (np.zeros((layers, heads), np.int64) for _ in range(4))
    kept = np.zeros((2, layers))
    lowest, farthest, by_beta = 1.0, 0.0, 0
    for prompt in cases.prompts:
        for layer in range(layers):
            left = ours[key(mine, percent, prompt, f"kept_{layer}")]
            right = theirs[key(policy, percent, prompt, f"kept_{layer}")]
            if policy != PUBLISHED and left.shape != right.shape:
                raise RuntimeError(
                    f"{policy}, {percent} %, {prompt.name}, layer {layer}: ours kept "
                    f"{left.shape[1]} tokens a head, kvpress {right.shape[1]}"
                )
            kept[:, layer] += left.shape[1], right.shape[1]
            scores = theirs.get(key("snapkv", 0, prompt, f"scores_{layer}"))
            for head in range(heads):
                common = len(np.intersect1d(left[head], right[head], assume_unique=True))
                total[layer, head] += right.shape[1]
                smaller[layer, head] += min(left.shape[1], right.shape[1])
                both[layer, head] += common
                other[layer, head] += len(np.intersect1d(left[head], right[(head + 1) % heads]))
                lowest = min(lowest, common / right.shape[1])
                if policy in SCORED and scores is not None:
                    distance = distance_from_cut(left[head], right[head], scores[head])
                    farthest = max(farthest, distance)
        if policy == "pyramidkv":
            formula = theirs[key(policy, percent, prompt, "by_beta")]
            counts = [
                ours[key(mine, percent, prompt, f"kept_{layer}")].shape[1]
                for layer in range(layers)
            ]
            by_beta = max(by_beta, int(np.abs(formula - counts).max()))
    answers, first_tokens, equal_tokens, lead = compare_answers(
        cases, ours, theirs, policy, percent
    )
    return Agreement(
        policy=policy,
        percent=percent,
        matched=policy != PUBLISHED,
        prompts=len(cases.prompts),
        mean=float(both.sum() / total.sum()),
        next_head=float(other.sum() / total.sum()),
        heads=(both / total).tolist(),
        lowest=lowest,
        differing=int(total.sum() - both.sum()),
        tokens=int(total.sum()),
        shared=float(both.sum() / smaller.sum()),
        ours_kept=(kept[0] / len(cases.prompts)).tolist(),
        theirs_kept=(kept[1] / len(cases.prompts)).tolist(),
        answers=answers,
        first_tokens=first_tokens,
        equal_tokens=equal_tokens,
        lead=lead,
        farthest=farthest,
        by_beta=by_beta if policy == "pyramidkv" else None,
    )


def distance_from_cut(left: np.ndarray, right: np.ndarray, scores: np.ndarray) -> float:
    """Largest relative distance of a token that one side alone kept from the other's cut.

    Args:
        left, right: positions that ours and kvpress kept. scores: kvpress's, `[prompt]`.
    """
    single = np.setxor1d(left, right, assume_unique=True)
    if not single.size:
        return 0.0
    cut = scores[right].min()
    return float(np.abs(scores[single] - cut).max() / cut)


def compare_answers(
    cases: Cases, ours: Arrays, theirs: Arrays, policy: str, percent: float
) -> tuple[int, int, float, float]:
    """Equal answers, equal first tokens, mean tokens before a difference, largest lead at one."""
    mine = "pyramidkv" if policy == PUBLISHED else policy
    equal, leads = [], [0.0]
    for prompt in cases.prompts:
        left = ours[key(mine, percent, prompt, "tokens")]
        right = theirs[key(policy, percent, prompt, "tokens")]
        different = np.flatnonzero(left != right)
        equal.append(int(different[0]) if different.size else len(right))
        if different.size:
            leads.append(float(theirs[key(policy, percent, prompt, "margins")][different[0]]))
    full = sum(tokens == cases.max_tokens for tokens in equal)
    return full, sum(tokens > 0 for tokens in equal), float(np.mean(equal)), max(leads)


def show(console: Console, cases: Cases, rows: list[Agreement]) -> None:
    """The table, and under it the kept tokens of a layer where they differ."""
    lengths = [len(prompt.token_ids) for prompt in cases.prompts]
    table = Table(
        title=f"{len(lengths)} prompts of {min(lengths):,} to {max(lengths):,} tokens, "
        f"{cases.dtype}, window {cases.window}, average pooling of {cases.kernel_size}"
    )
    table.add_column("policy")
    for heading in ("budget", "mean", "lowest head", "lowest of a prompt", "tokens that differ"):
        table.add_column(heading, justify="right")
    for heading in ("distance from cut", "next head", "answers equal", "lead at difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            f"{row.percent:g} %",
            f"{row.mean:.3%}",
            f"{np.min(row.heads):.3%}",
            f"{row.lowest:.3%}",
            f"{row.differing:,} of {row.tokens:,}",
            f"{row.farthest:.1e}" if row.farthest else "",
            f"{row.next_head:.1%}",
            f"{row.answers} of {row.prompts}",
            f"{row.lead:.1e}" if row.lead else "",
        )
    console.print(table)
    for row in rows:
        if not row.matched:
            console.print(
                f"{row.policy} at {row.percent:g} %: kvpress's own budgets "
                f"{_counts(row.theirs_kept)}, ours {_counts(row.ours_kept)} tokens a layer; of the "
                f"smaller selection {row.shared:.3%} is in the larger"
            )


def as_markdown(rows: list[Agreement]) -> str:
    """The table of docs/results/kvpress.md."""
    lines = [
        "| Policy | Budget | Mean agreement | Lowest head | Tokens that differ | Distance from the "
        "cut | With the next head | Equal answers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.policy}` | {row.percent:g} % | {row.mean:.3%} | {np.min(row.heads):.3%} | "
        f"{row.differing:,} of {row.tokens:,} | "
        f"{f'{row.farthest:.1e}' if row.farthest else '–'} | {row.next_head:.1%} | "
        f"{row.answers} of {row.prompts} |"
        for row in rows
        if row.matched
    ]
    return "\n".join(lines) + "\n"


def _counts(kept: list[float]) -> str:
    return " ".join(f"{tokens:.0f}" for tokens in kept)


def load(paths: Iterable[Path]) -> Arrays:
    """The arrays of all files."""
    arrays: Arrays = {}
    for path in paths:
        with np.load(path) as file:
            arrays |= {name: file[name] for name in file.files}
    return arrays


def main() -> int:
    """Compare, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder given to ours.py")
    parser.add_argument("--threshold", type=float, default=0.99, help="default: 0.99")
    parser.add_argument("--max-lead", type=float, default=1e-3, help="default: 0.001")
    parser.add_argument("--markdown", type=Path, help="also write the table for the documentation")
    args = parser.parse_args()
    cases = Cases.read(args.out)
    ours = load(args.out / ours_file(policy) for policy in POLICIES)
    theirs = load(args.out / theirs_file(policy) for policy in (FULL, *POLICIES, PUBLISHED))
    rows = [
        compare(cases, ours, theirs, policy, percent)
        for policy in (*POLICIES, PUBLISHED)
        for percent in cases.percents
    ]
    console = Console()
    show(console, cases, rows)
    full, _, equal_tokens, lead = compare_answers(cases, ours, theirs, FULL, 100.0)
    console.print(
        f"control, full cache: {full} of {len(cases.prompts)} answers equal, "
        f"{equal_tokens:.1f} of {cases.max_tokens} tokens before a difference"
    )
    result = {
        "model": cases.model,
        "dtype": cases.dtype,
        "window": cases.window,
        "kernel_size": cases.kernel_size,
        "sinks": cases.sinks,
        "beta": cases.beta,
        "max_tokens": cases.max_tokens,
        "prompts": {prompt.name: len(prompt.token_ids) for prompt in cases.prompts},
        "threshold": args.threshold,
        "full": {"answers": full, "equal_tokens": equal_tokens, "lead": lead},
        "rows": [asdict(row) for row in rows],
    }
    (args.out / AGREEMENT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(as_markdown(rows), encoding="utf-8")
    below = [
        f"{row.policy} {row.percent:g} % layer {layer} head {head}: {agreement:.3%}"
        for row in rows
        if row.matched
        for layer, heads in enumerate(row.heads)
        for head, agreement in enumerate(heads)
        if agreement < args.threshold
    ]
    for line in below:
        console.print(f"[red]below {args.threshold:.0%}:[/red] {line}")
    other = [
        f"{row.policy} {row.percent:g} %: same tokens kept, other answers at a lead of {row.lead:g}"
        for row in rows
        if row.matched and not row.differing and row.lead > args.max_lead
    ]
    for line in other:
        console.print(f"[red]answers:[/red] {line}")
    return 1 if below or other else 0


if __name__ == "__main__":
    sys.exit(main())
