# SPDX-License-Identifier: Apache-2.0
"""Replay agents on all variants in turns, and say what each turn found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from lab.agents.replay import Turn
from vllm_pyramid.tools.bench.job import Job, Variant
from vllm_pyramid.tools.bench.prepare import Prepared
from vllm_pyramid.tools.bench.processes import Engines
from vllm_pyramid.tools.bench.report import Samples, identity
from vllm_pyramid.tools.command_parts import Progress

ALL = "all"  # in the place of a turn's number
NO_SESSIONS = "none"  # among turn modes


def made_up(job: Job, number: int, branches: int) -> list[list[Turn]]:
    """Return agents of random tokens: each goes on in `branches` ways behind half of its turns."""
    agents = []
    others = [job.later_turns(f"{number}, branch {branch}") for branch in range(1, branches)]
    mains = zip(job.prompts(number), job.later_turns(number), strict=True)
    for place, (first, later) in enumerate(mains):
        turns = [Turn(1, None, 0, first, len(first), job.output_len, 0.0)]
        half = job.turns - 1 - job.turns // 2
        for begin, rests in ((0, later), *((half, other[place][half:]) for other in others)):
            before = begin
            for rest in rests:
                shared = turns[before].prompt_len
                length = shared + job.output_len + len(rest)
                turn = Turn(
                    turns[before].number + 1, before, shared, rest, length, job.output_len, 0.0
                )
                before = len(turns)
                turns.append(turn)
        agents.append(turns)
    return agents


def replays(
    prepared: Prepared,
    engines: Engines,
    rounds: Sequence[tuple[float, int]],
    progress: Progress,
    agents_of: Callable[[int], list[list[Turn]]],
    ends: Sequence[int],
    *,
    own_answers: bool,
) -> Samples:
    """Replay all agents in each round, variant by variant; each engine warms up first.

    Args:
        agents_of: the agents of a repetition.
        ends: tokens that end an answer.

    Raises:
        ValueError: a variant with a budget evicted nothing.
    """
    settings = {"own_answers": own_answers, "ends": ends}
    samples: Samples = []
    for place, (pool, number) in enumerate(rounds):
        agents = [[asdict(turn) for turn in turns] for turns in agents_of(number)]
        for variant in prepared.variants:
            task: dict[str, Any] = {"budget": variant.budget, **settings}
            task["turn_mode"] = None if variant.turn_mode == NO_SESSIONS else variant.turn_mode
            engines.limit_pool(variant, pool)
            if place == 0:
                progress.stage(f"{variant.label}, warm-up")
                first = [[{**agents[0][0], "max_tokens": 2, "wait": 0.0}]]
                salt = f"warm-up {variant.label}"
                engines.ask(variant, "replay", agents=first, concurrency=1, salt=salt, **task)
            progress.stage(f"{variant.label}, {number + 1}")
            task |= {"agents": agents, "concurrency": prepared.job.concurrency}
            task["salt"] = f"{place} {variant.label}"
            sample = engines.ask(variant, "replay", progress.advance, **task)
            if variant.budget and not any(one["evicted"] for one in sample["requests"]):
                raise ValueError(
                    f"{variant.label} evicted nothing from any prompt: give longer sessions, or a "
                    "smaller budget"
                )
            samples.append((variant, sample | {"pool_prompts": pool}))
    _add_agreement(samples, ends)
    return samples


def _add_agreement(samples: Samples, ends: Sequence[int]) -> None:
    """Compare each answer with that of the first variant that evicts nothing, in the same round."""
    whole = next((variant for variant, _ in samples if variant.budget is None), None)
    if whole is None:
        return
    rounds = len([variant for variant, _ in samples if variant == whole])
    size = len(samples) // rounds
    for start in range(0, len(samples), size):
        of_round = samples[start : start + size]
        (reference,) = (sample for variant, sample in of_round if variant == whole)
        answers = {(one["agent"], one["index"]): one["answer"] for one in reference["requests"]}
        for _, sample in of_round:
            for one in sample["requests"]:
                expected = answers[one["agent"], one["index"]]
                one["agreed"], one["compared"] = agreed_tokens(expected, one["answer"], ends)
            sample["agreement"] = _share(sample["requests"], "agreed", "compared")


def agreed_tokens(
    expected: Sequence[int], answer: Sequence[int], ends: Sequence[int]
) -> tuple[int, int]:
    """Return how many tokens of the expected answer come before the first that differs, and of how
    many: of those up to the first that ends an answer, that one included.
    """
    length = next((i + 1 for i, token in enumerate(expected) if token in ends), len(expected))
    pairs = zip(expected[:length], answer, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), length), length


def _share(requests: Sequence[dict[str, Any]], part: str, of: str) -> float | None:
    if not requests or part not in requests[0]:
        return None
    return float(sum(one[part] for one in requests) / sum(one[of] for one in requests))


def by_turn(samples: Samples) -> pd.DataFrame:
    """Return a row for each turn of each variant, over all agents and repetitions, and one for all.

    ttft, e2e: from when a turn is sent, or should be, to its first and to its last token.
    """
    groups: dict[tuple[float, int | str, Variant], list[dict[str, Any]]] = {}
    for variant, sample in samples:
        for one in sample["requests"]:
            for turn in (one["turn"], ALL):
                groups.setdefault((sample["pool_prompts"], turn, variant), []).append(one)
    variants = list(dict.fromkeys(variant for variant, _ in samples))

    def place(key: tuple[float, int | str, Variant]) -> tuple[Any, ...]:
        pool, turn, variant = key
        return -pool, turn == ALL, turn, variants.index(variant)

    rows = []
    for pool, turn, variant in sorted(groups, key=place):
        requests = groups[pool, turn, variant]
        row: dict[str, Any] = {"pool_prompts": pool, "turn": turn, **identity(variant)}
        row["requests"] = len(requests)
        row["prompt_tokens"] = float(np.median([one["prompt_len"] for one in requests]))
        row["cached_share"] = _share(requests, "cached", "prompt_len")
        row["agreement"] = _share(requests, "agreed", "compared")
        for name, time in (("ttft", "first"), ("e2e", "last")):
            for percent in (50, 95):
                seconds = [one[time] for one in requests]
                row[f"{name}_p{percent}_ms"] = 1e3 * float(np.percentile(seconds, percent))
        rows.append(row)
    return pd.DataFrame(rows)


def turns_table(rows: pd.DataFrame) -> str:
    """Return the rows as text, the variants of a turn below each other."""
    shown = rows.dropna(axis="columns", how="all").round({"cached_share": 3, "agreement": 3})
    texts = dict.fromkeys(("pool_prompts", "cached_share", "agreement"), "{:g}".format)
    return shown.to_string(index=False, formatters=texts, float_format="{:,.0f}".format)
