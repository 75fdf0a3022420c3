# SPDX-License-Identifier: Apache-2.0
"""Prompts by application and length, and the budget that is certified for each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lab.certified.risk import (
    MOST_PROMPTS,
    Losses,
    certified,
    least_prompts,
    prompts_that_would_do,
)


class Prompt(NamedTuple):
    """A prompt of the user's.

    Attributes:
        token_ids: its tokens. application: the name that its line gives; empty for none.
    """

    token_ids: list[int]
    application: str = ""


class Group(NamedTuple):
    """Prompts for which one budget is looked for.

    Attributes:
        application: their application. shortest, longest: their tokens; None: any number above.
    """

    application: str
    shortest: int
    longest: int | None

    def __str__(self) -> str:
        parts = [repr(self.application)] if self.application else []
        if self.longest is not None:
            parts.append(f"{self.shortest} to {self.longest} tokens")
        elif self.shortest > 1:
            parts.append(f"{self.shortest} tokens and more")
        return ", ".join(parts) or "all prompts"


@dataclass(frozen=True)
class Finding:
    """What the prompts of a group say.

    Attributes:
        group: the group. prompts: their number.
        budget: the smallest certified one; None if there is none.
        losses: the mean loss at each budget, as far as they were tested.
        reason: why no budget is certified; empty if one is.
    """

    group: Group
    prompts: int
    budget: str | None
    losses: Mapping[str, float]
    reason: str = ""


def group_prompts(prompts: Sequence[Prompt], lengths: Sequence[int]) -> dict[Group, list[int]]:
    """Return the indices of the prompts of each group, in the order of groups' names and lengths.

    Args:
        lengths: the longest prompts of all groups but the last; empty for one group of any length.
    """
    bounds = [0, *sorted(set(lengths))]
    spans: list[tuple[int, int | None]] = [(low + 1, high) for low, high in pairwise(bounds)]
    spans.append((bounds[-1] + 1, None))
    found: dict[Group, list[int]] = {}
    for application in sorted({prompt.application for prompt in prompts}):
        for shortest, longest in spans:
            indices = [
                index
                for index, prompt in enumerate(prompts)
                if prompt.application == application
                and shortest <= len(prompt.token_ids) <= (longest or len(prompt.token_ids))
            ]
            if indices:
                found[Group(application, shortest, longest)] = indices
    return found


def check_enough(groups: Mapping[Group, Sequence[int]], risk: float, confidence: float) -> None:
    """Refuse groups with so few prompts that no budget can be certified, whatever the losses.

    Raises:
        ValueError: naming the groups, and how many prompts it takes at least.
    """
    least = least_prompts(risk, confidence)
    few = [f"{group} has {len(found)}" for group, found in groups.items() if len(found) < least]
    if few:
        raise ValueError(
            f"a risk of {risk:g} with a confidence of {confidence:g} takes at least {least} "
            f"prompts of each group, even if no budget changed a single token, and "
            f"{'; '.join(few)}: give more prompts, join groups, or accept a larger risk or a "
            "smaller confidence"
        )


def find_budget(
    group: Group, losses: Losses, budgets: Sequence[str], risk: float, confidence: float
) -> Finding:
    """Return the smallest budget of a group whose mean loss is certified to be below the risk.

    Args:
        losses: `[budgets, n]`. budgets: from the largest down.
    """
    # The test looks at one prompt after the other; their order must not come from a sorted file.
    order = np.random.default_rng(0).permutation(losses.shape[1])
    losses = losses[:, order]
    count = certified(losses, risk, confidence)
    means = losses[: count + 1].mean(axis=1).tolist()
    tested = dict(zip(budgets[: count + 1], means, strict=True))
    if count:
        return Finding(group, losses.shape[1], budgets[count - 1], tested)
    would_do = prompts_that_would_do(losses[0], risk, confidence)
    if means[0] >= risk:
        reason = f"at {budgets[0]} {means[0]:.3f} of the tokens differ, which is not below the risk"
        reason += ": add larger budgets (--budgets), or accept a larger risk"
    elif would_do is None:
        reason = f"at {budgets[0]} {means[0]:.4f} of the tokens differ, so near to the risk that "
        reason += f"more than {MOST_PROMPTS:,} prompts would be needed: add larger budgets"
    else:
        reason = f"at {budgets[0]} {means[0]:.4f} of the tokens differ, and {losses.shape[1]} "
        reason += f"prompts are too few to be sure: about {would_do:,} like these would do"
    return Finding(group, losses.shape[1], None, tested, reason)
