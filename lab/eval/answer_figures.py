# SPDX-License-Identifier: Apache-2.0
"""Figures of answers that lm-eval scores: intervals of shares, the answers' length, the speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lab.eval.recall import Measured
from lab.eval.task import Figure
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result

ANSWER_TOKENS = "tokens of an answer, up to its stop text"
SPEED = "generated tokens a second"


def with_interval(figure: Figure, values: Sequence[Any]) -> Figure:
    """Return the figure with Wilson's interval if it is the share of prompts with the value 1.

    `values` holds what lm-eval made of each prompt: numbers, or what its aggregation takes.
    """
    if not all(value in (0, 1) for value in values):
        return figure
    share = Figure.share(figure.metric, int(sum(values)), len(values))
    if not math.isclose(share.score, figure.score, abs_tol=1e-9):
        return figure
    return replace(share, lower_is_better=figure.lower_is_better)


def answer_figures(
    tokens: Tokens, answers: Sequence[str], results: Sequence[Result]
) -> list[Figure]:
    """Return the answers' mean length, and the speed if all results have their seconds.

    The speed counts all generated tokens, those behind a stop text too, over the time that the
    engine took for prompts and answers.
    """

    def lengths(texts: Sequence[str]) -> list[int]:
        return [tokens.count(text) - tokens.count("") for text in texts]

    figures = [Figure.of(ANSWER_TOKENS, lengths(answers), lower_is_better=None)]
    seconds = [one.seconds for one in results if isinstance(one, Measured)]
    known = [one for one in seconds if one is not None]
    if len(known) == len(results):
        generated = sum(lengths([result.text for result in results]))
        figures.append(Figure(SPEED, generated / sum(known)))
    return figures
