# SPDX-License-Identifier: Apache-2.0
"""The metrics of LongBench and RULER: what one answer is worth, from 0 to 1.

LongBench (https://arxiv.org/abs/2308.14508, appendix A) scores an answer against one reference at a
time and takes the best; RULER (https://arxiv.org/abs/2404.06654, section 4) looks for all
references at once. Where the values can differ from those of the benchmarks' own scripts, the
docstring says why.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

__all__ = [
    "check_packages",
    "classification",
    "code_similarity",
    "count",
    "retrieval",
    "rouge_l",
    "string_match_all",
    "string_match_part",
    "token_f1",
]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def check_packages() -> None:
    """Fail before anything runs where LongBench's answers cannot be scored.

    Raises:
        ValueError: rouge-score or rapidfuzz is not installed.
    """
    needed = {"rouge_score": "rouge-score", "rapidfuzz": "rapidfuzz"}
    missing = [name for module, name in needed.items() if find_spec(module) is None]
    if missing:
        raise ValueError(
            f"LongBench's metrics need {' and '.join(missing)}: pip install 'vllm-pyramid[eval]'"
        )


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, each counted as often as it comes.

    SQuAD's definition (https://arxiv.org/abs/1606.05250, section 6.1), which LongBench takes over:
    lower case, no ASCII punctuation, no articles (a, an, the), split at white space.
    """
    given, wanted = Counter(_words(answer)), Counter(_words(reference))
    same = (given & wanted).total()
    return 2 * same / (given.total() + wanted.total()) if same else 0.0


def _words(text: str) -> list[str]:
    text = text.lower().translate(_NO_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def rouge_l(answer: str, reference: str) -> float:
    """F of the longest common subsequence of words, by the package rouge-score, without stemming.

    LongBench calls another package, `rouge`, which keeps upper case and punctuation, works sentence
    by sentence and weighs precision and recall differently: compare figures of this bench with each
    other, not with the leaderboard's.
    """
    return float(_rouge_scorer().score(reference, answer)["rougeL"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them, else 0.

    A class whose name is a part of the right one's does not count: naming "animal" is no mistake
    where "animal behaviour" is right.
    """
    named = [c for c in classes if c in answer and (c == reference or c not in reference)]
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str) -> float:
    """The share of the numbers in the answer that are the right one; 0 where there is none."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str) -> float:
    """As `count`, for a reference such as "Paragraph 12".

    Raises:
        ValueError: the reference is not of that form.
    """
    wanted = re.search(r"Paragraph (\d+)", reference)
    if wanted is None:
        raise ValueError(f"the reference {reference!r} names no paragraph, as 'Paragraph 12' does")
    return count(answer, wanted[1])


def code_similarity(answer: str, reference: str) -> float:
    """Edit similarity of the answer's first line of code, by rapidfuzz's `fuzz.ratio`.

    A line that holds a backtick, `#` or `//` is no code. LongBench's fuzzywuzzy computes the same
    ratio and rounds it to whole per cent.
    """
    from rapidfuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return float(fuzz.ratio(next(code, ""), reference)) / 100


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """The share of the references that stand in the answer, in upper or lower case."""
    found = [reference.lower() in answer.lower() for reference in references]
    return sum(found) / len(found)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 if any of the references stands in the answer, in upper or lower case, else 0."""
    return float(any(reference.lower() in answer.lower() for reference in references))
